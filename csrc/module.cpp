// Python bindings of dynamictp._native. Signatures and semantics are documented in dynamictp/_native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <tuple>

#include "kernels/bind.hpp"
#include "shm/buffer.hpp"
#include "shm/communicator.hpp"
#include "shm/control.hpp"
#include "shm/futex.hpp"

namespace nb = nanobind;
using namespace nb::literals;
namespace shm = dynamictp::shm;

namespace {

bool signal_raised() {
    const nb::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
}

// Runs `wait` without the GIL. The handler's exception is already set when a signal ended the wait.
template <typename Wait>
auto without_gil(Wait wait) {
    try {
        const nb::gil_scoped_release release;
        return wait();
    } catch (const shm::Interrupted&) {
        throw nb::python_error();
    }
}

template <typename Enum>
Enum checked(int value, int last, const char* what) {
    if (value < 0 || value > last) throw nb::value_error(what);
    return static_cast<Enum>(value);
}

class ControlBlock {
public:
    ControlBlock(nb::handle buffer, std::size_t slots, std::size_t workers)
        : buffer_(buffer.ptr()),
          block_(buffer_.at(0, shm::ControlBlock::bytes_needed(slots, workers)), slots, workers) {}

    void set_control(std::size_t slot, std::uint64_t epoch, int state) {
        block_.set_control(slot, epoch,
                           checked<shm::DomainState>(state, 2, "state must be 0 (free), 1 (live) or 2 (aborted)"));
    }
    nb::tuple control(std::size_t slot) const {
        const shm::Control found = block_.slot(slot).load();
        return nb::make_tuple(found.epoch, static_cast<int>(found.state));
    }
    void set_progress(std::size_t worker, std::uint64_t plan, std::uint32_t layer, int state) {
        block_.worker(worker).store(
            plan, layer, checked<shm::WorkerState>(state, 2, "state must be 0 (idle), 1 (computing) or 2 (waiting)"));
    }
    nb::tuple progress(std::size_t worker) const {
        const shm::Progress found = block_.worker(worker).load();
        const double age_s = found.changed_ns == 0 ? 0.0 : static_cast<double>(shm::now_ns() - found.changed_ns) * 1e-9;
        return nb::make_tuple(found.plan, found.layer, static_cast<int>(found.state), age_s);
    }
    const shm::ControlBlock& block() const { return block_; }
    // Address of a progress word, for native code that publishes progress itself; it keeps this object alive.
    std::uintptr_t progress_address(std::size_t worker) const {
        return reinterpret_cast<std::uintptr_t>(&block_.worker(worker));
    }

private:
    shm::Buffer buffer_;
    shm::ControlBlock block_;
};

class ShmCommunicator {
public:
    ShmCommunicator(nb::handle buffer, std::size_t offset, std::size_t size, std::uint32_t rank, std::uint32_t world,
                    nb::object control, std::size_t slot, std::uint64_t epoch, std::size_t progress_worker,
                    double deadline_s, std::uint32_t spin)
        : buffer_(buffer.ptr()),
          control_(std::move(control)),
          core_(buffer_.at(offset, size), size, nb::cast<ControlBlock&>(control_).block(),
                {rank, world, slot, epoch, progress_worker}, {deadline_s, spin, signal_raised}) {}

    void barrier() {
        if (!core_.arrive()) without_gil([&] { core_.wait(); });
    }
    std::uintptr_t all_gather(std::uintptr_t address, std::size_t bytes) {
        return without_gil([&] {
            return reinterpret_cast<std::uintptr_t>(core_.all_gather(reinterpret_cast<std::byte*>(address), bytes));
        });
    }
    void all_reduce(std::uintptr_t address, std::size_t count, int dtype) {
        const auto kind = checked<shm::DType>(dtype, 1, "dtype must be 0 (fp32) or 1 (bf16)");
        without_gil([&] { core_.all_reduce(reinterpret_cast<std::byte*>(address), count, kind); });
    }
    void broadcast(std::uintptr_t address, std::size_t bytes, std::uint32_t root) {
        without_gil([&] { core_.broadcast(reinterpret_cast<std::byte*>(address), bytes, root); });
    }
    void abort() { core_.abort(); }
    void close() {
        if (core_.close()) buffer_.release();
    }
    void reset(std::uint64_t epoch) { core_.reset(epoch); }
    const char* state() const {
        switch (core_.state()) {
            case shm::CommState::fresh: return "new";
            case shm::CommState::ready: return "ready";
            case shm::CommState::broken: return "broken";
            case shm::CommState::closed: break;
        }
        return "closed";
    }
    const shm::Communicator& core() const { return core_; }
    // For native code that meets the peers itself; it keeps this object alive.
    std::uintptr_t core_address() { return reinterpret_cast<std::uintptr_t>(&core_); }

private:
    shm::Buffer buffer_;
    nb::object control_;
    shm::Communicator core_;
};

void translate(const std::exception_ptr& pending, void*) {
    try {
        std::rethrow_exception(pending);
    } catch (const shm::Broken& error) {
        const nb::object type = nb::module_::import_("dynamictp.errors").attr("CommunicatorBroken");
        PyErr_SetString(type.ptr(), error.what());
    }
}

}  // namespace

NB_MODULE(_native, module) {
    nb::register_exception_translator(translate);

    nb::class_<ControlBlock>(module, "ControlBlock")
        .def(nb::init<nb::handle, std::size_t, std::size_t>(), "buffer"_a, "slot_count"_a, "workers"_a)
        .def_static("bytes_needed", &shm::ControlBlock::bytes_needed, "slots"_a, "workers"_a)
        .def("set_control", &ControlBlock::set_control, "slot"_a, "epoch"_a, "state"_a)
        .def("control", &ControlBlock::control, "slot"_a)
        .def("set_progress", &ControlBlock::set_progress, "worker"_a, "plan"_a, "layer"_a, "state"_a)
        .def("progress", &ControlBlock::progress, "worker"_a)
        .def("progress_address", &ControlBlock::progress_address, "worker"_a);

    nb::class_<ShmCommunicator>(module, "ShmCommunicator")
        .def(nb::init<nb::handle, std::size_t, std::size_t, std::uint32_t, std::uint32_t, nb::object, std::size_t,
                      std::uint64_t, std::size_t, double, std::uint32_t>(),
             "buffer"_a, "offset"_a, "size"_a, "rank"_a, "world"_a, nb::kw_only(), "control"_a, "slot"_a, "epoch"_a,
             "progress_worker"_a, "deadline_s"_a, "spin"_a)
        .def_static("bytes_needed", &shm::Communicator::bytes_needed, "world_max"_a, "payload_bytes"_a)
        .def_static("payload_offset", &shm::Communicator::payload_offset, "world"_a)
        .def("barrier", &ShmCommunicator::barrier)
        .def("all_gather", &ShmCommunicator::all_gather, "address"_a, "nbytes"_a)
        .def("all_reduce", &ShmCommunicator::all_reduce, "address"_a, "count"_a, "dtype"_a)
        .def("broadcast", &ShmCommunicator::broadcast, "address"_a, "nbytes"_a, "root"_a)
        .def("abort", &ShmCommunicator::abort)
        .def("close", &ShmCommunicator::close)
        .def("reset", &ShmCommunicator::reset, "epoch"_a)
        .def_prop_ro("state", &ShmCommunicator::state)
        .def_prop_ro("epoch", [](const ShmCommunicator& self) { return self.core().epoch(); })
        .def_prop_ro("rank", [](const ShmCommunicator& self) { return self.core().rank(); })
        .def_prop_ro("world", [](const ShmCommunicator& self) { return self.core().world(); })
        .def_prop_ro("core_address", &ShmCommunicator::core_address)
        .def_prop_ro("payload_bytes", [](const ShmCommunicator& self) { return self.core().payload_bytes(); });

    dynamictp::kernels::bind_kernels(module);
}
