// Sleeping and waking across processes, and the clock they share.
#pragma once

#include <atomic>
#include <cstdint>

namespace dynamictp::shm {

// CLOCK_MONOTONIC in nanoseconds: one clock for every process of the node.
std::int64_t now_ns() noexcept;

// Sleeps until `word` differs from `seen` or someone wakes it (true), a signal arrives or `slice_ns` pass (false).
bool futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t slice_ns) noexcept;

void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept;

inline void cpu_relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace dynamictp::shm
