// The collectives of one domain's ranks through shared memory. No Python here: kernels may call it too.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "shm/control.hpp"
#include "shm/reduce.hpp"

namespace dynamictp::shm {

// Aborted, closed, past its deadline, or ranks that disagree about what they are doing.
struct Broken : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// The operation is not legal now, such as a reset while an operation runs. The communicator goes on.
struct Misuse : std::logic_error {
    using std::logic_error::logic_error;
};
// A signal handler raised while the rank waited; the Python error is set.
struct Interrupted {};

enum class CommState : std::uint8_t { fresh, ready, broken, closed };
enum class Op : std::uint8_t { barrier = 1, all_gather = 2, all_reduce = 3, broadcast = 4 };

// A rank's arrivals at barriers, in a line that only this rank writes. It counts for ever, through resets too.
struct alignas(2 * cache_line) RankLine {
    std::atomic<std::uint64_t> arrived;
    // What the rank does between arrivals n-1 and n is in tag[n % 2], to compare with the peers'.
    std::atomic<std::uint64_t> tag[2];
};

// The region: header, one RankLine per rank, then `world` × 2 data slots of `payload_bytes`.
struct alignas(2 * cache_line) RegionHeader {
    std::atomic<std::uint64_t> shape;  // 0 in fresh memory, then what the first rank opened
};

struct WaitPolicy {
    double deadline_s;         // of one wait, from when this rank began to wait
    std::uint32_t spin;        // polls (at most 65,536) before the first yield; 0 when ranks outnumber cores
    bool (*signal_raised)();   // called every 10 ms of sleep; true when the wait must end with Interrupted
};

struct Membership {
    std::uint32_t rank;
    std::uint32_t world;
    std::size_t slot;             // the domain's word in the control block
    std::uint64_t epoch;
    std::size_t progress_worker;  // the worker whose progress word says `waiting`
};

// One rank's end. One thread runs operations; `abort`, `close` and `state` may be called from any.
//
// Barrier: a rank publishes its arrival count n and waits until every peer has arrived n times. Publishing releases,
// polling acquires: whatever a rank wrote before a barrier, every rank reads after it.
//
// Data slots: the operation that ends in arrival n uses slot n % 2 of each rank, and needs no second barrier. A rank
// writes that slot again before arrival n + 2, hence after n + 1 completed, hence after every rank arrived n + 1
// times, which each does only when it has read what it wanted of operation n.
class Communicator {
public:
    // `region` is zeros when the first rank opens it; every rank passes the same size, world and slot.
    // Throws std::invalid_argument.
    Communicator(std::byte* region, std::size_t size, const ControlBlock& control, Membership member, WaitPolicy policy);

    static std::size_t bytes_needed(std::size_t world, std::size_t payload_bytes) noexcept;
    static std::size_t payload_offset(std::size_t world) noexcept;

    // A barrier in two halves, so that a caller with the GIL gives it up only when it has to wait.
    // `arrive` returns true when every peer was there already; otherwise `wait` must follow.
    bool arrive();
    void wait();

    // Copies `bytes` (at most `payload_bytes()`, the same on every rank) to the ranks' slots. Returns the address of rank
    // 0's part; rank r's is r × payload_bytes() further. Valid until this rank's next operation.
    std::byte* all_gather(const std::byte* source, std::size_t bytes);
    // In-place sum over ranks of `count` elements of any size; equal bits on every rank.
    void all_reduce(std::byte* data, std::size_t count, DType dtype);
    void broadcast(std::byte* data, std::size_t bytes, std::uint32_t root);

    // Marks the epoch aborted if it is still live, and so releases every waiter of the domain.
    void abort() noexcept;
    // True when no operation was running (one that was is aborted), and so nothing points into the region any more.
    bool close() noexcept;
    // Opens a new epoch of a parked communicator. Throws Broken, or Misuse while an operation runs.
    void reset(std::uint64_t epoch);

    CommState state() const noexcept { return state_.load(); }
    std::uint64_t epoch() const noexcept { return epoch_.load(std::memory_order_relaxed); }
    std::size_t payload_bytes() const noexcept { return payload_bytes_; }
    std::uint32_t world() const noexcept { return member_.world; }
    std::uint32_t rank() const noexcept { return member_.rank; }

private:
    class Inside;
    void claim_region(std::size_t size);
    void enter(Op op, std::uint32_t parameter);
    void leave() noexcept { inside_.store(false); }
    bool publish(std::size_t bytes);
    void await_everyone();
    void exchange(std::size_t bytes) {
        if (!publish(bytes)) await_everyone();
    }
    std::byte* next_slot(std::uint32_t rank) const noexcept;
    bool everyone_arrived(std::memory_order order) const noexcept;
    bool revoked() const noexcept;
    void check_tags();
    void wait_awhile();
    void sleep_once(std::int64_t deadline_ns);
    [[noreturn]] void fail(const std::string& what);
    void give_up() noexcept;
    std::string missing_ranks() const;

    RegionHeader* header_;
    RankLine* lines_;
    std::byte* data_;
    std::size_t payload_bytes_;
    DomainSlot* slot_;
    WorkerSlot* worker_;
    Membership member_;
    WaitPolicy policy_;
    std::vector<const std::byte*> sources_;  // all_reduce's operands, here to allocate once
    std::atomic<std::uint64_t> epoch_;       // `reset` may meet an `abort` from another thread
    std::uint64_t count_ = 0;
    std::uint64_t tag_ = 0;
    std::atomic<CommState> state_{CommState::fresh};
    std::atomic<bool> inside_{false};
};

}  // namespace dynamictp::shm
