// The threads of one device: the caller and helpers that live as long as the team.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

namespace dynamictp::kernels {

// A counter that only grows, and a place to wait until it has reached a value: polls, then yields for a millisecond, then
// sleeps. One waiter's sleep and the wake that ends it meet as in shm::DomainSlot.
class alignas(128) Gate {
public:
    void advance() noexcept;
    void wait_for(std::uint64_t value, std::uint32_t spin) noexcept;

private:
    bool reached(std::uint64_t value) const noexcept { return count_.load(std::memory_order_seq_cst) >= value; }

    std::atomic<std::uint64_t> count_{0};
    std::atomic<std::uint32_t> sequence_{0};
    std::atomic<std::uint32_t> asleep_{0};
};

// Used by one thread at a time, which is thread 0 of every job. Helpers sleep between jobs and block all signals.
class Team {
public:
    // What a helper leaves a job with when thread 0 has failed.
    struct Abandoned {};

    // Helper i is bound to the i-th of `cores` (the caller binds itself to the first), or not when there are none.
    // `spin` polls precede the first yield; 0 when threads outnumber cores. Throws std::invalid_argument for no threads or
    // too few cores, std::system_error when a thread can't be started or bound.
    Team(std::size_t threads, const std::vector<int>& cores, std::uint32_t spin);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    std::size_t size() const noexcept { return helpers_.size() + 1; }

    // Calls job(thread) on every thread. Returns, or throws what thread 0 threw, when all have left. A job throws only
    // out of `meet`.
    void run(const std::function<void(std::size_t)>& job);

    // A barrier inside a job, which every thread passes equally often. Thread 0 calls `between` when all are there and
    // before any goes on; when it throws, the others leave the job with Abandoned.
    template <typename Between>
    void meet(std::size_t thread, const Between& between) {
        if (thread != 0) return helper_meet(thread);
        await_helpers();
        try {
            between();
        } catch (...) {
            abandoned_ = true;
            release();
            throw;
        }
        release();
    }

private:
    struct alignas(128) Seen {
        std::uint64_t releases = 0;  // that this helper has waited for
    };

    void help(std::size_t thread) noexcept;
    void helper_meet(std::size_t thread);
    void await_release(std::size_t thread) noexcept { released_.wait_for(++seen_[thread].releases, spin_); }
    void await_helpers() noexcept;
    void release() noexcept { released_.advance(); }
    void stop() noexcept;

    std::uint32_t spin_;
    Gate arrived_;   // of helpers, at a barrier or at the end of a job
    Gate released_;  // by thread 0, into a job or from a barrier
    std::uint64_t expected_ = 0;
    // Written by thread 0 before a release, read by helpers after it.
    const std::function<void(std::size_t)>* job_ = nullptr;
    bool abandoned_ = false;
    std::vector<Seen> seen_;
    std::vector<std::thread> helpers_;
};

}  // namespace dynamictp::kernels
