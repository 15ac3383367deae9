#include "shm/control.hpp"

#include <sched.h>

#include <stdexcept>
#include <string>

#include "shm/futex.hpp"

namespace dynamictp::shm {

namespace {
constexpr std::uint64_t state_mask = 0xff;
constexpr std::uint64_t epoch_limit = std::uint64_t{1} << 56;
constexpr int quick_tries = 100;
constexpr int read_tries = 200;

[[noreturn]] void out_of_range(const char* what, std::size_t index, std::size_t count) {
    throw std::out_of_range(std::string("the control block has ") + std::to_string(count) + " " + what + ", index " +
                            std::to_string(index) + " does not exist");
}
}  // namespace

std::uint64_t pack(Control control) noexcept {
    return control.epoch << 8 | static_cast<std::uint64_t>(control.state);
}

Control DomainSlot::load() const noexcept {
    const std::uint64_t value = word.load(std::memory_order_seq_cst);
    return {value >> 8, static_cast<DomainState>(value & state_mask)};
}

void DomainSlot::wake_sleepers() noexcept {
    asleep.store(0, std::memory_order_seq_cst);
    sequence.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(sequence);
}

void WorkerSlot::store(std::uint64_t plan_number, std::uint32_t layer, WorkerState state) noexcept {
    // `| 1` also heals a version left odd by a writer that was killed inside.
    const std::uint64_t inside = version.load(std::memory_order_relaxed) | 1;
    version.store(inside, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    plan.store(plan_number, std::memory_order_relaxed);
    layer_state.store(std::uint64_t{layer} << 8 | static_cast<std::uint64_t>(state), std::memory_order_relaxed);
    changed_ns.store(now_ns(), std::memory_order_relaxed);
    version.store(inside + 1, std::memory_order_release);
}

void WorkerSlot::store_state(WorkerState state) noexcept {
    store(plan.load(std::memory_order_relaxed),
          static_cast<std::uint32_t>(layer_state.load(std::memory_order_relaxed) >> 8), state);
}

void WorkerSlot::store_layer(std::uint32_t layer) noexcept {
    store(plan.load(std::memory_order_relaxed), layer, WorkerState::computing);
}

Progress WorkerSlot::load() const noexcept {
    Progress found{};
    for (int attempt = 0; attempt < read_tries; ++attempt) {
        const std::uint64_t before = version.load(std::memory_order_acquire);
        const std::uint64_t packed = layer_state.load(std::memory_order_relaxed);
        found = {plan.load(std::memory_order_relaxed), static_cast<std::uint32_t>(packed >> 8),
                 static_cast<WorkerState>(packed & state_mask), changed_ns.load(std::memory_order_relaxed)};
        std::atomic_thread_fence(std::memory_order_acquire);
        if (before % 2 == 0 && version.load(std::memory_order_relaxed) == before) break;
        // A writer that lost its core inside needs one to get out.
        attempt < quick_tries ? cpu_relax() : static_cast<void>(sched_yield());
    }
    return found;
}

ControlBlock::ControlBlock(std::byte* memory, std::size_t slots, std::size_t workers) noexcept
    : slots_(reinterpret_cast<DomainSlot*>(memory)),
      workers_(reinterpret_cast<WorkerSlot*>(memory + slots * sizeof(DomainSlot))),
      slot_count_(slots),
      worker_count_(workers) {}

std::size_t ControlBlock::bytes_needed(std::size_t slots, std::size_t workers) noexcept {
    return slots * sizeof(DomainSlot) + workers * sizeof(WorkerSlot);
}

DomainSlot& ControlBlock::slot(std::size_t index) const {
    if (index >= slot_count_) out_of_range("domain slots", index, slot_count_);
    return slots_[index];
}

WorkerSlot& ControlBlock::worker(std::size_t index) const {
    if (index >= worker_count_) out_of_range("worker slots", index, worker_count_);
    return workers_[index];
}

void ControlBlock::set_control(std::size_t index, std::uint64_t epoch, DomainState state) const {
    if (epoch >= epoch_limit) throw std::invalid_argument("an epoch has at most 56 bits");
    DomainSlot& target = slot(index);
    target.word.store(pack({epoch, state}), std::memory_order_seq_cst);
    target.wake();
}

}  // namespace dynamictp::shm
