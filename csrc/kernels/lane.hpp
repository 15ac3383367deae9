// One thread's share of a rank's forward pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/kernels.hpp"
#include "kernels/memory.hpp"
#include "kernels/partition.hpp"

namespace dynamictp::kernels {

// Sizes of a model. Hidden, head_dim and intermediate are multiples of 16.
struct ModelShape {
    std::size_t layers, hidden, query_heads, kv_heads, head_dim, intermediate, vocab;
    float epsilon;
    DType dtype;
    WeightType weights;  // of all matrices but the embedding
};

struct Range {
    std::size_t start, stop;
    std::size_t size() const noexcept { return stop - start; }
};

// What one rank or one of its threads computes: head units of the fused QKV projection, panels of the others.
struct RankCut {
    Range qkv, hidden, mlp, vocab;

    // The share of part `index` of `parts`, which may be empty.
    RankCut part(std::size_t index, std::size_t parts) const noexcept;
};

// Memory that a step reads weights from.
struct WeightSpan {
    const void* data;
    std::size_t bytes;
};

// The weights of a cut: its panels, norms whole. `q_norm` and `k_norm` are null for models without.
struct LayerWeights {
    const float* attn_norm;
    const float* q_norm;
    const float* k_norm;
    const float* mlp_norm;
    Panels qkv, o, gate, up, down;
};

struct Weights {
    const void* embed;  // all panels
    std::vector<LayerWeights> layers;
    const float* final_norm;
    Panels head;

    // Of a part of the cut that these are the weights of.
    Weights part(const ModelShape& shape, const RankCut& whole, const RankCut& part) const;
    // Every byte of them, each once.
    std::vector<WeightSpan> spans(const ModelShape& shape) const;
};

// [layers][2 (K, V)][pages][page_tokens · D]
struct Arena {
    std::byte* memory;
    std::size_t pages;
    std::size_t page_tokens;
};

// The largest step: tokens of one forward pass, rows of logits at a time.
struct Limits {
    std::size_t tokens, rows;
};

// The shared buffers of a domain; every rank writes its own columns (or rows of attention), then all meet.
//
// A layer's five barriers and what stands between them:
//   write q, pages | 1 | read q, pages; write attn | 2 | read attn; write hidden | 3 | read hidden; write mlp | 4 |
//   read mlp; write hidden | 5 | read hidden
// Between the last read of a buffer and its next write lies at least one barrier, so one copy of each suffices; `hidden`
// serves both projections, since every rank has read the first before it arrives at barrier 4.
struct Exchange {
    struct Buffer {
        std::size_t offset;  // bytes
        std::size_t stride;  // elements from row to row
    };
    Buffer q, attn, hidden, mlp, logits, best, tokens;
    std::size_t bytes;

    static Exchange layout(const ModelShape& shape, const Limits& limits, std::size_t world) noexcept;
};

// A local arg-max, exchanged by the ranks.
struct Best {
    float value;
    std::uint32_t index;
};

// Sequences of one step: tokens of all spans one after another, and each sequence's page table [blocks][KV heads].
struct Batch {
    std::vector<Span> spans;
    std::vector<const std::int32_t*> tables;
    std::vector<std::size_t> offsets;  // of each span's first token in the batch
    const std::int64_t* tokens;
    std::size_t count;
};

// What the threads of a rank share. Written between steps only.
struct Common {
    ModelShape shape;
    Arena arena;
    Limits limits;
    Exchange exchange;
    std::byte* shared;  // the exchange's memory
    const Kernels& kernels;

    // cos and sin of positions 0 … positions-1, [positions][D/2].
    const float* cosine = nullptr;
    const float* sine = nullptr;
    std::size_t positions = 0;
    std::vector<std::size_t> token_positions{};  // of the batch

    std::size_t bytes(std::size_t elements) const noexcept { return elements * element_bytes(shape.dtype); }
    std::byte* row(const Exchange::Buffer& buffer, std::size_t row, std::size_t column) const noexcept {
        return shared + buffer.offset + bytes(row * buffer.stride + column);
    }
    float* hidden_row(std::size_t row) const noexcept {
        return reinterpret_cast<float*>(shared + exchange.hidden.offset) + row * exchange.hidden.stride;
    }
    float* logits() const noexcept { return reinterpret_cast<float*>(shared + exchange.logits.offset); }
};

// Called by a lane between the parts of a step; returns when every lane of every rank has called it.
struct Meeting {
    virtual void meet(std::size_t thread) = 0;
    virtual void begin_layer(std::size_t thread, std::size_t layer) = 0;

protected:
    ~Meeting() = default;
};

// One thread's computation: its own residual, and its own panels and attention rows, as if it were a rank. Several lanes
// run at once, each in one thread. Throws nothing but what `meet` throws.
class Lane {
public:
    // Lane `thread` of a rank, `part` of `parts` of the domain's attention.
    struct Place {
        std::size_t thread, part, parts;
    };

    Lane(const Common& common, const RankCut& cut, Weights weights, Place place, Meeting& meeting);

    // Before `run`, by one thread for all: allocates what the batch needs and divides its attention.
    void prepare(const Batch& batch, std::size_t longest);
    void run(const Batch& batch);
    // Logits of the given tokens of the last batch, by this lane's rows of the vocabulary, and the best of each.
    void logits(const std::int64_t* tokens, std::size_t count);
    const Best& best(std::size_t row) const noexcept { return best_[row]; }
    const Weights& weights() const noexcept { return weights_; }
    // Time since the last call of the same function.
    std::int64_t take_weights_ns() noexcept { return std::exchange(weights_ns_, 0); }
    std::int64_t take_attention_ns() noexcept { return std::exchange(attention_ns_, 0); }

private:
    void embed(const Batch& batch);
    void project(const LayerWeights& layer, std::size_t number, const Batch& batch);
    void store_heads(const LayerWeights& layer, std::size_t number, const Batch& batch, std::size_t first, std::size_t count);
    void attend(std::size_t number, const Batch& batch);
    void attend_segment(const PagePlanes& planes, const Segment& segment, const Segment* next, const Batch& batch);
    void norm_all(const float* weight, bool add_hidden, std::size_t count);
    void multiply(const Panels& weights, const std::byte* x, std::size_t x_stride, std::size_t count, float* y,
                  std::size_t y_stride);
    void gate(const LayerWeights& layer, std::size_t count);
    template <typename Call>
    void for_digits(const std::byte* x, std::size_t x_stride, std::size_t count, std::size_t columns, const Call& call);
    void meet() { meeting_.meet(place_.thread); }
    PagePlanes planes(std::size_t layer) const noexcept;
    float* residual(std::size_t token) const noexcept {
        return reinterpret_cast<float*>(residual_.get()) + token * common_.shape.hidden;
    }

    const Common& common_;
    RankCut cut_;
    Weights weights_;
    Place place_;
    Meeting& meeting_;

    std::size_t norm_stride_;                           // elements of a row of normed_
    std::size_t digit_stride_ = 0, factor_stride_ = 0;  // elements of a row of digits_ and factors_
    Memory residual_;                                   // fp32 [tokens][hidden]
    Memory normed_;                                     // dtype [tokens][norm_stride_]
    Memory heads_;                                      // fp32 [head_rows][qkv units · D]
    Memory digits_;                                     // int16 [digit_rows][digit_stride_]
    Memory factors_;                                    // fp32 [digit_rows][factor_stride_]
    Memory attention_;                                  // scratch of one attention tile
    std::size_t attention_length_ = 0;
    std::vector<Segment> segments_;
    std::vector<float> row_;  // [hidden]
    std::vector<Best> best_;  // [rows]
    std::int64_t weights_ns_ = 0, attention_ns_ = 0;
};

}  // namespace dynamictp::kernels
