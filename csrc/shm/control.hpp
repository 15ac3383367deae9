// Control words of domains and progress words of workers, in memory shared by server, engine and workers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace dynamictp::shm {

inline constexpr std::size_t cache_line = 64;

enum class DomainState : std::uint8_t { free = 0, live = 1, aborted = 2 };
enum class WorkerState : std::uint8_t { idle = 0, computing = 1, waiting = 2 };

struct Control {
    std::uint64_t epoch;
    DomainState state;
    bool operator==(const Control&) const = default;
};

struct Progress {
    std::uint64_t plan;
    std::uint32_t layer;
    WorkerState state;
    std::int64_t changed_ns;
};

// One domain's word, and the futex on which its waiters sleep. The line is written only when the domain changes or
// someone sleeps, so that waiters and arrivals read it from their own cache.
//
// Sleep and wake (no wake-up is lost):
//     waiter: s = sequence; asleep = 1; condition true? done : sleep while sequence == s
//     waker:  make the condition true; if asleep: asleep = 0, sequence += 1, wake all
// Both sides are sequentially consistent, so either the waker sees `asleep` or the waiter sees the condition.
// `asleep` is a flag and not a count, so a killed sleeper leaves nothing behind.
struct alignas(cache_line) DomainSlot {
    std::atomic<std::uint64_t> word;  // epoch << 8 | DomainState
    std::atomic<std::uint32_t> sequence;
    std::atomic<std::uint32_t> asleep;

    Control load() const noexcept;
    // Call after the condition is made true with a sequentially consistent store.
    void wake() noexcept {
        if (asleep.load(std::memory_order_seq_cst) != 0) wake_sleepers();
    }

private:
    void wake_sleepers() noexcept;
};

// One worker's progress under a sequence lock: one writer (the thread that executes plans), any number of readers.
struct alignas(cache_line) WorkerSlot {
    std::atomic<std::uint64_t> version;  // odd while the writer is inside
    std::atomic<std::uint64_t> plan;
    std::atomic<std::uint64_t> layer_state;  // layer << 8 | WorkerState
    std::atomic<std::int64_t> changed_ns;

    void store(std::uint64_t plan_number, std::uint32_t layer, WorkerState state) noexcept;
    void store_state(WorkerState state) noexcept;
    // The plan as it is, computing.
    void store_layer(std::uint32_t layer) noexcept;
    // A writer killed inside leaves the version odd: after a bounded number of tries the words are returned as found.
    Progress load() const noexcept;
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(sizeof(DomainSlot) == cache_line && sizeof(WorkerSlot) == cache_line);

// A view of `slots` domain words followed by `workers` progress words. Fresh shared memory (zeros) is a valid block.
class ControlBlock {
public:
    ControlBlock(std::byte* memory, std::size_t slots, std::size_t workers) noexcept;
    static std::size_t bytes_needed(std::size_t slots, std::size_t workers) noexcept;

    // Both throw std::out_of_range.
    DomainSlot& slot(std::size_t index) const;
    WorkerSlot& worker(std::size_t index) const;

    void set_control(std::size_t slot, std::uint64_t epoch, DomainState state) const;

private:
    DomainSlot* slots_;
    WorkerSlot* workers_;
    std::size_t slot_count_;
    std::size_t worker_count_;
};

std::uint64_t pack(Control control) noexcept;

}  // namespace dynamictp::shm
