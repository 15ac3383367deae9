#include "kernels/team.hpp"

#include <pthread.h>
#include <sched.h>

#include <csignal>
#include <stdexcept>
#include <system_error>

#include "shm/futex.hpp"

namespace dynamictp::kernels {

namespace {

constexpr std::int64_t yield_ns = 1'000'000;
constexpr std::int64_t slice_ns = 1'000'000'000;

// Blocks all signals of this thread, and so of the threads it starts, while it lives: signals are for the interpreter's.
class SignalsBlocked {
public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

private:
    sigset_t before_;
};

void bind(std::thread& thread, int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    const int error = pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);
    if (error != 0) throw std::system_error(error, std::generic_category(), "core " + std::to_string(core));
}

}  // namespace

void Gate::advance() noexcept {
    count_.fetch_add(1, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) == 0) return;
    asleep_.store(0, std::memory_order_seq_cst);
    sequence_.fetch_add(1, std::memory_order_seq_cst);
    shm::futex_wake_all(sequence_);
}

void Gate::wait_for(std::uint64_t value, std::uint32_t spin) noexcept {
    for (std::uint32_t poll = 0; poll < spin; ++poll) {
        if (reached(value)) return;
        shm::cpu_relax();
    }
    const std::int64_t yield_until_ns = shm::now_ns() + yield_ns;
    do {
        if (reached(value)) return;
        sched_yield();
    } while (shm::now_ns() < yield_until_ns);
    while (true) {
        const std::uint32_t seen = sequence_.load(std::memory_order_seq_cst);
        asleep_.store(1, std::memory_order_seq_cst);
        if (reached(value)) return;
        shm::futex_wait(sequence_, seen, slice_ns);
    }
}

Team::Team(std::size_t threads, const std::vector<int>& cores, std::uint32_t spin) : spin_(spin) {
    if (threads == 0) throw std::invalid_argument("a team has at least one thread");
    if (!cores.empty() && cores.size() < threads) {
        throw std::invalid_argument(std::to_string(threads) + " threads on " + std::to_string(cores.size()) + " cores");
    }
    seen_.resize(threads);
    helpers_.reserve(threads - 1);
    const SignalsBlocked blocked;
    try {
        for (std::size_t thread = 1; thread < threads; ++thread) {
            helpers_.emplace_back([this, thread] { help(thread); });
            if (!cores.empty()) bind(helpers_.back(), cores[thread]);
        }
    } catch (...) {
        stop();
        throw;
    }
}

Team::~Team() { stop(); }

void Team::stop() noexcept {
    job_ = nullptr;
    release();
    for (std::thread& helper : helpers_) helper.join();
}

void Team::run(const std::function<void(std::size_t)>& job) {
    job_ = &job;
    abandoned_ = false;
    release();
    std::exception_ptr failure;
    try {
        job(0);
    } catch (...) {
        failure = std::current_exception();
    }
    await_helpers();
    if (failure) std::rethrow_exception(failure);
}

void Team::await_helpers() noexcept {
    expected_ += helpers_.size();
    arrived_.wait_for(expected_, spin_);
}

void Team::helper_meet(std::size_t thread) {
    arrived_.advance();
    await_release(thread);
    if (abandoned_) throw Abandoned{};
}

void Team::help(std::size_t thread) noexcept {
    while (true) {
        await_release(thread);
        if (job_ == nullptr) return;
        try {
            (*job_)(thread);
        } catch (const Abandoned&) {
        }
        arrived_.advance();
    }
}

}  // namespace dynamictp::kernels
