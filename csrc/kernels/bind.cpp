#include "kernels/bind.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/huge_pages.hpp"
#include "kernels/kernels.hpp"
#include "kernels/partition.hpp"
#include "kernels/step.hpp"
#include "shm/communicator.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace dynamictp::kernels {

namespace {

using Address = std::uintptr_t;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// Runs `call` without the GIL. The handler's exception is already set when a signal ended a wait.
template <typename Call>
void without_gil(Call call) {
    try {
        const nb::gil_scoped_release release;
        call();
    } catch (const shm::Interrupted&) {
        throw nb::python_error();
    }
}

Level level_from(const std::string& name) {
    for (const Level level : {Level::portable, Level::avx2, Level::avx512, Level::avx512_bf16}) {
        if (name == name_of(level)) return level;
    }
    throw std::invalid_argument("unknown kernel level '" + name + "'; levels: portable, avx2, avx512, avx512_bf16");
}

DType dtype_from(const std::string& name) {
    if (name == "bf16") return DType::bf16;
    if (name == "fp32") return DType::fp32;
    throw std::invalid_argument("unknown dtype '" + name + "'; expected bf16 or fp32");
}

using IndexRange = std::pair<std::size_t, std::size_t>;

Range range_from(IndexRange range, std::size_t limit, const char* what) {
    if (range.first >= range.second || range.second > limit) {
        throw std::invalid_argument(std::string("the range of ") + what + " must lie in [0, " + std::to_string(limit) +
                                    ") and not be empty");
    }
    return {range.first, range.second};
}

WeightType weight_type_from(const std::string& name) {
    if (name.empty()) return WeightType::plain;
    if (name == "int8") return WeightType::int8;
    throw std::invalid_argument("unknown weight type '" + name + "'; expected int8 or nothing");
}

// Finds the weights of one rank by their canonical names.
class WeightFinder {
public:
    WeightFinder(const nb::dict& addresses, const ModelShape& shape) : addresses_(addresses), shape_(shape) {}

    template <typename T>
    const T* need(const std::string& name) const {
        const T* const found = find<T>(name);
        if (found == nullptr) throw std::invalid_argument("weight " + name + " is missing");
        return found;
    }
    template <typename T>
    const T* find(const std::string& name) const {
        const nb::str key(name.c_str());
        return addresses_.contains(key) ? at<const T>(nb::cast<Address>(addresses_[key])) : nullptr;
    }
    // Panels [range) of matrix `name`, with its bias if it has one.
    Panels panels(const std::string& name, Range range, std::size_t columns) const {
        const std::size_t bytes = panel_bytes(columns, shape_.dtype, shape_.weights);
        const float* const bias = find<float>(name + "_bias");
        return {need<std::byte>(name) + range.start * bytes, range.size(), columns,
                bias == nullptr ? nullptr : bias + range.start * panel_rows};
    }

private:
    const nb::dict& addresses_;
    const ModelShape& shape_;
};

Weights find_weights(const nb::dict& addresses, const ModelShape& shape, const RankCut& cut) {
    const WeightFinder finder(addresses, shape);
    const std::size_t head_panels = shape.head_dim / panel_rows;
    const Range qkv{cut.qkv.start * head_panels, cut.qkv.stop * head_panels};
    Weights weights{};
    weights.embed = finder.need<void>("embed");
    weights.final_norm = finder.need<float>("final_norm");
    // The embedding is never quantised, so a quantised head stands by itself.
    const bool tied = shape.weights == WeightType::plain && finder.find<void>("head") == nullptr;
    weights.head = finder.panels(tied ? "embed" : "head", cut.vocab, shape.hidden);
    for (std::size_t i = 0; i < shape.layers; ++i) {
        const std::string prefix = "layers." + std::to_string(i) + ".";
        weights.layers.push_back({finder.need<float>(prefix + "attn_norm"), finder.find<float>(prefix + "q_norm"),
                                  finder.find<float>(prefix + "k_norm"), finder.need<float>(prefix + "mlp_norm"),
                                  finder.panels(prefix + "qkv", qkv, shape.hidden),
                                  finder.panels(prefix + "o", cut.hidden, shape.query_heads * shape.head_dim),
                                  finder.panels(prefix + "gate", cut.mlp, shape.hidden),
                                  finder.panels(prefix + "up", cut.mlp, shape.hidden),
                                  finder.panels(prefix + "down", cut.hidden, shape.intermediate)});
    }
    return weights;
}

std::size_t panels_of(std::size_t rows) { return (rows + panel_rows - 1) / panel_rows; }

// A step and the Python objects whose memory it reads.
class BoundStep {
public:
    BoundStep(const ModelShape& shape, const nb::dict& weights, IndexRange qkv, IndexRange hidden, IndexRange mlp,
              IndexRange vocab, Address arena, std::size_t pages, std::size_t page_tokens, Address exchange,
              std::size_t max_tokens, std::size_t max_rows, Address communicator, Address progress, Team* team,
              const std::string& level, nb::object keep)
        : keep_(std::move(keep)),
          cut_{range_from(qkv, shape.query_heads + 2 * shape.kv_heads, "qkv head units"),
               range_from(hidden, panels_of(shape.hidden), "hidden panels"),
               range_from(mlp, panels_of(shape.intermediate), "mlp panels"),
               range_from(vocab, panels_of(shape.vocab), "vocabulary panels")},
          step_(shape, cut_, find_weights(weights, shape, cut_), {at<std::byte>(arena), pages, page_tokens},
                at<std::byte>(exchange), {max_tokens, max_rows},
                {at<shm::Communicator>(communicator), team, at<shm::WorkerSlot>(progress)},
                kernels(level_from(level), shape.dtype)) {}

    void set_rotation(Address cosine, Address sine, std::size_t positions, nb::object keep) {
        step_.set_rotation(at<const float>(cosine), at<const float>(sine), positions);
        rotation_ = std::move(keep);
    }
    void run(Address tokens, const std::vector<std::size_t>& starts, const std::vector<std::size_t>& counts,
             const std::vector<Address>& tables) {
        if (starts.size() != counts.size() || starts.size() != tables.size()) {
            throw std::invalid_argument("starts, counts and tables must have one entry per sequence");
        }
        Batch batch{};
        batch.tokens = at<const std::int64_t>(tokens);
        for (std::size_t s = 0; s < starts.size(); ++s) {
            if (counts[s] == 0) throw std::invalid_argument("a sequence in a step has at least one token");
            batch.spans.push_back({starts[s], counts[s]});
            batch.tables.push_back(at<const std::int32_t>(tables[s]));
            batch.offsets.push_back(batch.count);
            batch.count += counts[s];
        }
        without_gil([&] { step_.run(batch); });
    }
    void logits(Address tokens, std::size_t count, Address arg_max) {
        without_gil([&] { step_.logits(at<const std::int64_t>(tokens), count, at<std::int64_t>(arg_max)); });
    }
    Step& step() { return step_; }

private:
    nb::object keep_;
    nb::object rotation_;
    RankCut cut_;
    Step step_;
};

// Activations as integers, with their memory.
class DigitRows {
public:
    DigitRows(const Kernels& kernels, const Rows& x, std::size_t columns)
        : stride_(int8_columns(columns)),
          count_(x.count),
          values_(x.count * stride_),
          factors_(x.count * stride_ / int8_group) {
        kernels.quantise(x, columns, get());
    }
    Digits get() const { return {values_.data(), factors_.data(), stride_, stride_ / int8_group, count_}; }

private:
    std::size_t stride_, count_;
    std::vector<std::int16_t> values_;
    std::vector<float> factors_;
};

// One level's kernels by themselves, for tests and benchmarks.
class Table {
public:
    Table(const std::string& level, const std::string& dtype) : kernels_(kernels(level_from(level), dtype_from(dtype))) {}

    void linear(Address weights, std::size_t panels, std::size_t columns, Address bias, Address x, std::size_t stride,
                std::size_t rows, Address y, std::size_t y_stride) const {
        kernels_.linear({at<void>(weights), panels, columns, at<const float>(bias)}, {at<void>(x), stride, rows},
                        at<float>(y), y_stride);
    }
    void gated(Address gate, Address up, std::size_t panels, std::size_t columns, Address x, std::size_t stride,
               std::size_t rows, Address y, std::size_t y_stride) const {
        kernels_.gated({at<void>(gate), panels, columns, nullptr}, {at<void>(up), panels, columns, nullptr},
                       {at<void>(x), stride, rows}, at<void>(y), y_stride);
    }
    // Both round the activations to integers first.
    void linear_int8(Address weights, std::size_t panels, std::size_t columns, Address bias, Address x, std::size_t stride,
                     std::size_t rows, Address y, std::size_t y_stride) const {
        const DigitRows digits(kernels_, {at<void>(x), stride, rows}, columns);
        kernels_.linear_int8({at<void>(weights), panels, columns, at<const float>(bias)}, digits.get(), at<float>(y),
                             y_stride);
    }
    void gated_int8(Address gate, Address up, std::size_t panels, std::size_t columns, Address x, std::size_t stride,
                    std::size_t rows, Address y, std::size_t y_stride) const {
        const DigitRows digits(kernels_, {at<void>(x), stride, rows}, columns);
        kernels_.gated_int8({at<void>(gate), panels, columns, nullptr}, {at<void>(up), panels, columns, nullptr},
                            digits.get(), at<void>(y), y_stride);
    }
    std::size_t arg_max(Address values, std::size_t size) const { return kernels_.arg_max(at<const float>(values), size); }

private:
    const Kernels& kernels_;
};

template <typename Element>
nb::object array_over(void* memory, std::size_t size) {
    struct Mapping {
        void* memory;
        std::size_t size;
    };
    auto mapping = std::make_unique<Mapping>(Mapping{memory, size});
    nb::capsule owner(mapping.get(), [](void* held) noexcept {
        const std::unique_ptr<Mapping> ended(static_cast<Mapping*>(held));
        unmap(ended->memory, ended->size);
    });
    mapping.release();
    return nb::cast(nb::ndarray<nb::numpy, Element, nb::ndim<1>>(memory, {size}, owner));
}

// A uint8 array over a shared mapping, unmapped with the array.
nb::object map_shared(int descriptor, std::size_t size, bool writable) {
    void* const memory = size == 0 ? nullptr : map_aligned(descriptor, size, writable);
    if (memory == nullptr) {
        if (size == 0) errno = EINVAL;
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
    return writable ? array_over<std::uint8_t>(memory, size) : array_over<const std::uint8_t>(memory, size);
}

using SegmentTuple = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>;

std::vector<SegmentTuple> divide(const std::vector<IndexRange>& spans, std::size_t kv_heads, std::size_t group,
                                 std::size_t rank, std::size_t world) {
    std::vector<Span> given;
    for (const auto& [start, count] : spans) given.push_back({start, count});
    std::vector<SegmentTuple> result;
    for (const Segment& segment : divide_attention(given.data(), given.size(), kv_heads, group, rank, world)) {
        result.emplace_back(segment.sequence, segment.kv_head, segment.first, segment.last);
    }
    return result;
}

}  // namespace

void bind_kernels(nb::module_& module) {
    module.def("kernel_level", [] { return std::string(name_of(detect_level())); });
    module.def("map_aligned", &map_shared, "descriptor"_a, "size"_a, "writable"_a);
    module.def("collapse_pages", [](Address address, std::size_t size) { return collapse_pages(at<void>(address), size); },
               "address"_a, "size"_a, nb::call_guard<nb::gil_scoped_release>());
    module.def("divide_attention", &divide, "spans"_a, "kv_heads"_a, "group"_a, "rank"_a, "world"_a);

    nb::class_<ModelShape>(module, "ModelShape")
        .def("__init__",
             [](ModelShape* self, std::size_t layers, std::size_t hidden, std::size_t query_heads, std::size_t kv_heads,
                std::size_t head_dim, std::size_t intermediate, std::size_t vocab, float epsilon, const std::string& dtype,
                const std::string& weights) {
                 new (self) ModelShape{layers,       hidden, query_heads, kv_heads,          head_dim,
                                       intermediate, vocab,  epsilon,     dtype_from(dtype), weight_type_from(weights)};
             },
             nb::kw_only(), "layers"_a, "hidden"_a, "query_heads"_a, "kv_heads"_a, "head_dim"_a, "intermediate"_a,
             "vocab"_a, "epsilon"_a, "dtype"_a, "weights"_a = "")
        .def("exchange_bytes",
             [](const ModelShape& shape, std::size_t max_tokens, std::size_t max_rows, std::size_t world) {
                 return Exchange::layout(shape, {max_tokens, max_rows}, world).bytes;
             },
             "max_tokens"_a, "max_rows"_a, "world"_a);

    nb::class_<Team>(module, "Team")
        .def(nb::init<std::size_t, const std::vector<int>&, std::uint32_t>(), "threads"_a, "cores"_a, "spin"_a)
        .def_prop_ro("size", &Team::size);

    nb::class_<BoundStep>(module, "Step")
        .def(nb::init<const ModelShape&, const nb::dict&, IndexRange, IndexRange, IndexRange, IndexRange, Address,
                      std::size_t, std::size_t, Address, std::size_t, std::size_t, Address, Address, Team*,
                      const std::string&, nb::object>(),
             "shape"_a, "weights"_a, nb::kw_only(), "qkv"_a, "hidden"_a, "mlp"_a, "vocab"_a, "arena"_a, "pages"_a,
             "page_tokens"_a, "exchange"_a, "max_tokens"_a, "max_rows"_a, "communicator"_a, "progress"_a, "team"_a.none(),
             "level"_a, "keep"_a.none())
        .def("set_rotation", &BoundStep::set_rotation, "cosine"_a, "sine"_a, "positions"_a, "keep"_a)
        .def("run", &BoundStep::run, "tokens"_a, "starts"_a, "counts"_a, "tables"_a)
        .def("logits", &BoundStep::logits, "tokens"_a, "count"_a, "arg_max"_a)
        .def("weight_spans",
             [](BoundStep& self) {
                 std::vector<std::pair<Address, std::size_t>> spans;
                 for (const WeightSpan& span : self.step().weight_spans()) {
                     spans.emplace_back(reinterpret_cast<Address>(span.data), span.bytes);
                 }
                 return spans;
             })
        .def("take_wait_ns", [](BoundStep& self) { return self.step().take_wait_ns(); })
        .def("take_weights_ns", [](BoundStep& self) { return self.step().take_weights_ns(); })
        .def("take_attention_ns", [](BoundStep& self) { return self.step().take_attention_ns(); })
        .def_prop_ro("logits_address",
                     [](BoundStep& self) { return reinterpret_cast<Address>(self.step().logits_data()); })
        .def_prop_ro("tokens_address",
                     [](BoundStep& self) { return reinterpret_cast<Address>(self.step().tokens_data()); })
        .def_prop_ro("logits_stride", [](BoundStep& self) { return self.step().logits_stride(); });

    nb::class_<Table>(module, "KernelTable")
        .def(nb::init<const std::string&, const std::string&>(), "level"_a, "dtype"_a)
        .def("linear", &Table::linear, "weights"_a, "panels"_a, "columns"_a, "bias"_a, "x"_a, "stride"_a, "rows"_a, "y"_a,
             "y_stride"_a)
        .def("gated", &Table::gated, "gate"_a, "up"_a, "panels"_a, "columns"_a, "x"_a, "stride"_a, "rows"_a, "y"_a,
             "y_stride"_a)
        .def("linear_int8", &Table::linear_int8, "weights"_a, "panels"_a, "columns"_a, "bias"_a, "x"_a, "stride"_a,
             "rows"_a, "y"_a, "y_stride"_a)
        .def("gated_int8", &Table::gated_int8, "gate"_a, "up"_a, "panels"_a, "columns"_a, "x"_a, "stride"_a, "rows"_a,
             "y"_a, "y_stride"_a)
        .def("arg_max", &Table::arg_max, "values"_a, "size"_a);
}

}  // namespace dynamictp::kernels
