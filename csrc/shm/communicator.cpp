#include "shm/communicator.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>

#include "shm/futex.hpp"

namespace dynamictp::shm {

namespace {
constexpr std::int64_t yield_ns = 1'000'000;   // a peer is this late only when it does not run: then sleep
constexpr std::uint32_t spin_limit = 1 << 16;  // polls look at no clock: a few milliseconds, far below any deadline
constexpr std::int64_t slice_ns = 10'000'000;  // of sleep, between looks at the control word and at signals

// A tag says what a rank does: Op << 56 | parameter << 40 | bytes.
constexpr int op_shift = 56;
constexpr int parameter_shift = 40;
constexpr std::uint64_t bytes_mask = (std::uint64_t{1} << parameter_shift) - 1;

static_assert(sizeof(RankLine) == 2 * cache_line && sizeof(RegionHeader) == 2 * cache_line);

std::int64_t deadline_after(double seconds) noexcept {
    constexpr double forever_s = 1e9;
    return now_ns() + static_cast<std::int64_t>(std::min(seconds, forever_s) * 1e9);
}

const char* name_of(Op op) noexcept {
    switch (op) {
        case Op::barrier: return "barrier";
        case Op::all_gather: return "all_gather";
        case Op::all_reduce: return "all_reduce";
        case Op::broadcast: return "broadcast";
    }
    return "an unknown operation";
}

const char* name_of(std::uint64_t tag) noexcept { return name_of(static_cast<Op>(tag >> op_shift)); }

std::string describe(std::uint64_t tag) {
    return std::string(name_of(tag)) + " of " + std::to_string(tag & bytes_mask) + " bytes (root or dtype " +
           std::to_string(tag >> parameter_shift & 0xffff) + ")";
}
}  // namespace

// Marks that an operation runs, so that `close` leaves its memory alone.
class Communicator::Inside {
public:
    Inside(Communicator& owner, Op op, std::uint32_t parameter) : owner_(owner) { owner.enter(op, parameter); }
    ~Inside() { owner_.leave(); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

private:
    Communicator& owner_;
};

Communicator::Communicator(std::byte* region, std::size_t size, const ControlBlock& control, Membership member,
                           WaitPolicy policy)
    : header_(reinterpret_cast<RegionHeader*>(region)),
      lines_(reinterpret_cast<RankLine*>(region + sizeof(RegionHeader))),
      data_(region + payload_offset(member.world)),
      payload_bytes_(0),
      slot_(&control.slot(member.slot)),
      worker_(&control.worker(member.progress_worker)),
      member_(member),
      policy_(policy),
      epoch_(member.epoch) {
    if (member.world == 0 || member.rank >= member.world) throw std::invalid_argument("expected 0 <= rank < world");
    if (member.world > 0xffff) throw std::invalid_argument("at most 65535 ranks");
    if (member.epoch >> 56 != 0) throw std::invalid_argument("an epoch has at most 56 bits");
    if (!(policy.deadline_s > 0)) throw std::invalid_argument("deadline_s must be positive");
    if (size < payload_offset(member.world)) {
        throw std::invalid_argument("the region has " + std::to_string(size) + " bytes, " +
                                    std::to_string(payload_offset(member.world)) + " are needed for its header");
    }
    const std::size_t share = (size - payload_offset(member.world)) / (2 * member.world);
    payload_bytes_ = share / cache_line * cache_line;
    policy_.spin = std::min(policy.spin, spin_limit);
    sources_.resize(member.world);
    claim_region(size);
    count_ = lines_[member.rank].arrived.load(std::memory_order_acquire);
}

std::size_t Communicator::payload_offset(std::size_t world) noexcept {
    return sizeof(RegionHeader) + world * sizeof(RankLine);
}

std::size_t Communicator::bytes_needed(std::size_t world, std::size_t payload_bytes) noexcept {
    const std::size_t rounded = (payload_bytes + cache_line - 1) / cache_line * cache_line;
    return payload_offset(world) + 2 * world * rounded;
}

void Communicator::claim_region(std::size_t size) {
    const std::uint64_t wanted = std::uint64_t{size} << 16 | member_.world;
    std::uint64_t found = 0;
    if (!header_->shape.compare_exchange_strong(found, wanted) && found != wanted) {
        throw std::invalid_argument("the region belongs to a communicator of " + std::to_string(found & 0xffff) +
                                    " ranks and " + std::to_string(found >> 16) + " bytes, not of " +
                                    std::to_string(member_.world) + " and " + std::to_string(size) +
                                    "; a new communicator needs zeroed memory");
    }
}

std::byte* Communicator::next_slot(std::uint32_t rank) const noexcept {
    return data_ + ((count_ + 1) % 2 * member_.world + rank) * payload_bytes_;
}

bool Communicator::everyone_arrived(std::memory_order order) const noexcept {
    for (std::uint32_t rank = 0; rank < member_.world; ++rank) {
        if (lines_[rank].arrived.load(order) < count_) return false;
    }
    return true;
}

bool Communicator::revoked() const noexcept {
    return slot_->word.load(std::memory_order_seq_cst) != pack({epoch(), DomainState::live});
}

void Communicator::enter(Op op, std::uint32_t parameter) {
    // `inside` before `state`, as `close` does the reverse: one of the two sees the other.
    if (inside_.exchange(true)) throw Misuse("another operation runs on this communicator");
    const CommState now = state();
    if (now == CommState::closed || now == CommState::broken) {
        leave();
        throw Broken(now == CommState::closed ? "the communicator is closed"
                                              : "the communicator is broken; it can't be used again");
    }
    tag_ = static_cast<std::uint64_t>(op) << op_shift | std::uint64_t{parameter} << parameter_shift;
}

// Publishes this rank's arrival, with all it wrote before. True when every peer was there already.
bool Communicator::publish(std::size_t bytes) {
    if (revoked()) fail("");
    tag_ = (tag_ & ~bytes_mask) | bytes;
    RankLine& mine = lines_[member_.rank];
    ++count_;
    mine.tag[count_ % 2].store(tag_, std::memory_order_relaxed);
    mine.arrived.store(count_, std::memory_order_seq_cst);
    slot_->wake();
    if (!everyone_arrived(std::memory_order_acquire)) return false;
    check_tags();
    return true;
}

void Communicator::await_everyone() {
    for (std::uint32_t poll = 0; poll < policy_.spin; ++poll) {
        if (everyone_arrived(std::memory_order_acquire)) return check_tags();
        if (revoked()) fail("");
        cpu_relax();
    }
    worker_->store_state(WorkerState::waiting);
    wait_awhile();
    worker_->store_state(WorkerState::computing);
    check_tags();
}

bool Communicator::arrive() {
    enter(Op::barrier, 0);
    if (!publish(0)) return false;
    leave();
    return true;
}

void Communicator::wait() {
    await_everyone();
    leave();
}

// Yields while a peer may be about to arrive, then sleeps. Returns when everyone arrived.
void Communicator::wait_awhile() {
    const std::int64_t deadline_ns = deadline_after(policy_.deadline_s);
    const std::int64_t yield_until_ns = std::min(now_ns() + yield_ns, deadline_ns);
    while (now_ns() < yield_until_ns) {
        if (everyone_arrived(std::memory_order_acquire)) return;
        if (revoked()) fail("");
        sched_yield();
    }
    while (true) {
        sleep_once(deadline_ns);
        if (everyone_arrived(std::memory_order_seq_cst)) return;
        if (revoked()) fail("");
        if (now_ns() >= deadline_ns) {
            fail("missed the deadline of " + std::to_string(policy_.deadline_s) + " s");
        }
    }
}

void Communicator::sleep_once(std::int64_t deadline_ns) {
    const std::uint32_t seen = slot_->sequence.load(std::memory_order_seq_cst);
    slot_->asleep.store(1, std::memory_order_seq_cst);
    // See DomainSlot: what became true before `asleep` was visible woke nobody, so look again before sleeping.
    if (everyone_arrived(std::memory_order_seq_cst) || revoked()) return;
    const std::int64_t left_ns = deadline_ns - now_ns();
    if (left_ns <= 0 || futex_wait(slot_->sequence, seen, std::min(left_ns, slice_ns))) return;
    if (policy_.signal_raised != nullptr && policy_.signal_raised()) {
        give_up();
        throw Interrupted{};
    }
}

// Everyone is here: they must have come for the same operation.
void Communicator::check_tags() {
    for (std::uint32_t rank = 0; rank < member_.world; ++rank) {
        const std::uint64_t theirs = lines_[rank].tag[count_ % 2].load(std::memory_order_relaxed);
        if (theirs != tag_) {
            fail("rank " + std::to_string(rank) + " is in " + describe(theirs) + " while rank " +
                 std::to_string(member_.rank) + " is in " + describe(tag_));
        }
    }
    CommState expected = CommState::fresh;
    if (state_.load(std::memory_order_relaxed) == expected) state_.compare_exchange_strong(expected, CommState::ready);
}

std::string Communicator::missing_ranks() const {
    std::string names;
    for (std::uint32_t rank = 0; rank < member_.world; ++rank) {
        if (lines_[rank].arrived.load(std::memory_order_acquire) >= count_) continue;
        names += (names.empty() ? "" : ", ") + std::to_string(rank);
    }
    return names.empty() ? "none" : names;
}

// Breaks this end, tells the peers and throws. An empty `what` means that the control word no longer names this epoch.
void Communicator::fail(const std::string& what) {
    std::string reason = what;
    if (reason.empty()) {
        const Control now = slot_->load();
        reason = now == Control{epoch(), DomainState::aborted}
                     ? "was aborted"
                     : "is not live (the control word says epoch " + std::to_string(now.epoch) + ", state " +
                           std::to_string(static_cast<int>(now.state)) + ")";
    }
    const std::string message = "epoch " + std::to_string(epoch()) + " " + reason + " in " + name_of(tag_) +
                                " of rank " + std::to_string(member_.rank) + " of " + std::to_string(member_.world) +
                                "; missing ranks: " + missing_ranks();
    give_up();
    throw Broken(message);
}

void Communicator::give_up() noexcept {
    if (worker_->load().state == WorkerState::waiting) worker_->store_state(WorkerState::computing);
    CommState expected = state();
    while (expected != CommState::closed && !state_.compare_exchange_weak(expected, CommState::broken)) {
    }
    abort();
    leave();
}

void Communicator::abort() noexcept {
    std::uint64_t live = pack({epoch(), DomainState::live});
    const std::uint64_t aborted = pack({epoch(), DomainState::aborted});
    if (slot_->word.compare_exchange_strong(live, aborted)) slot_->wake();
}

bool Communicator::close() noexcept {
    state_.store(CommState::closed);
    if (!inside_.load()) return true;
    abort();
    return false;
}

void Communicator::reset(std::uint64_t epoch) {
    const CommState now = state();
    if (now == CommState::closed || now == CommState::broken) {
        throw Broken("a broken or closed communicator can't be reused");
    }
    if (epoch >> 56 != 0) throw std::invalid_argument("an epoch has at most 56 bits");
    if (inside_.load()) throw Misuse("reset while an operation runs: quiesce the domain first");
    epoch_.store(epoch, std::memory_order_relaxed);
    state_.store(CommState::fresh);
}

std::byte* Communicator::all_gather(const std::byte* source, std::size_t bytes) {
    if (bytes > payload_bytes_) {
        throw std::invalid_argument("all_gather of " + std::to_string(bytes) + " bytes, the region holds " +
                                    std::to_string(payload_bytes_) + " per rank");
    }
    const Inside inside(*this, Op::all_gather, 0);
    std::memcpy(next_slot(member_.rank), source, bytes);
    std::byte* const parts = next_slot(0);
    exchange(bytes);
    return parts;
}

void Communicator::all_reduce(std::byte* data, std::size_t count, DType dtype) {
    const std::size_t chunk = payload_bytes_ / element_bytes(dtype);
    if (count > 0 && chunk == 0) throw std::invalid_argument("the region has no payload; give payload_bytes > 0");
    const Inside inside(*this, Op::all_reduce, static_cast<std::uint32_t>(dtype));
    for (std::size_t start = 0; start < count; start += chunk) {
        const std::size_t length = std::min(chunk, count - start);
        const std::size_t bytes = length * element_bytes(dtype);
        std::byte* const part = data + start * element_bytes(dtype);
        std::memcpy(next_slot(member_.rank), part, bytes);
        for (std::uint32_t rank = 0; rank < member_.world; ++rank) sources_[rank] = next_slot(rank);
        exchange(bytes);
        sum_in_order(sources_, part, length, dtype);
    }
}

void Communicator::broadcast(std::byte* data, std::size_t bytes, std::uint32_t root) {
    if (root >= member_.world) throw std::invalid_argument("broadcast: root must be a rank of this communicator");
    if (bytes > 0 && payload_bytes_ == 0) throw std::invalid_argument("the region has no payload; give payload_bytes > 0");
    const Inside inside(*this, Op::broadcast, root);
    for (std::size_t start = 0; start < bytes; start += payload_bytes_) {
        const std::size_t length = std::min(payload_bytes_, bytes - start);
        if (member_.rank == root) std::memcpy(next_slot(root), data + start, length);
        const std::byte* const from = next_slot(root);
        exchange(length);
        if (member_.rank != root) std::memcpy(data + start, from, length);
    }
}

}  // namespace dynamictp::shm
