#include "shm/futex.hpp"

#include <cerrno>
#include <climits>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace dynamictp::shm {

namespace {
constexpr std::int64_t second_ns = 1'000'000'000;
static_assert(sizeof(std::atomic<std::uint32_t>) == 4, "the kernel reads the futex word as 32 bits");

// Not FUTEX_*_PRIVATE: the word lies in memory that several processes map at different addresses.
long futex(std::atomic<std::uint32_t>& word, int op, std::uint32_t value, const timespec* timeout) noexcept {
    return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), op, value, timeout, nullptr, 0);
}
}  // namespace

std::int64_t now_ns() noexcept {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * second_ns + now.tv_nsec;
}

bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t slice_ns) noexcept {
    const timespec timeout{slice_ns / second_ns, slice_ns % second_ns};
    const long result = futex(word, FUTEX_WAIT, seen, &timeout);
    return result == 0 || errno == EAGAIN;
}

void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

}  // namespace dynamictp::shm
