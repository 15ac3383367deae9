// One rank's forward pass: a whole step in one call, with its barriers.
//
// Every weight is cut on output rows only and nothing is summed over ranks; the residual is fp32 and whole on every
// rank. So the bits are the same at every degree, for any batch and any chunking (see kernels.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "kernels/kernels.hpp"
#include "kernels/partition.hpp"
#include "shm/communicator.hpp"

namespace dynamictp::kernels {

// Sizes of a model. Hidden, head_dim and intermediate are multiples of 16.
struct ModelShape {
    std::size_t layers, hidden, query_heads, kv_heads, head_dim, intermediate, vocab;
    float epsilon;
    DType dtype;
};

struct Range {
    std::size_t start, stop;
    std::size_t size() const noexcept { return stop - start; }
};

// What one rank computes: head units of the fused QKV projection, panels of the others.
struct RankCut {
    Range qkv, hidden, mlp, vocab;
};

// The rank's weights: panels of its range, norms whole. `q_norm` and `k_norm` are null for models without.
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

struct FreeAligned {
    void operator()(std::byte* memory) const noexcept { ::operator delete[](memory, std::align_val_t{64}); }
};
using Memory = std::unique_ptr<std::byte[], FreeAligned>;

// Not safe for use by several threads. Everything it points to must outlive it.
class Step {
public:
    // `peers` is null for a domain of one rank. `exchange` is `Exchange::layout(…).bytes` long, aligned to 64.
    Step(const ModelShape& shape, const RankCut& cut, Weights weights, const Arena& arena, std::byte* exchange,
         const Limits& limits, shm::Communicator* peers, const Kernels& kernels);

    // cos and sin of positions 0 … positions-1, [positions][D/2]; read until the next call.
    void set_rotation(const float* cosine, const float* sine, std::size_t positions) noexcept;

    // Computes all layers and writes the pages of the batch's tokens. Five barriers a layer; after the last every rank is
    // done with the pages. Throws std::invalid_argument for a batch beyond the limits, and what barriers throw.
    void run(const Batch& batch);

    // Logits of the given tokens of the last batch: fp32 [count][logits_stride] in the exchange, padding -inf, and the
    // index of each row's maximum. One barrier, before the call returns; the caller puts another one between its
    // reads and the next call.
    void logits(const std::int64_t* tokens, std::size_t count, std::int64_t* arg_max);

    const float* logits_data() const noexcept { return reinterpret_cast<const float*>(shared_ + exchange_.logits.offset); }
    // int64 [rows] that the step leaves alone: for the tokens that the ranks sample from the logits.
    const std::byte* tokens_data() const noexcept { return shared_ + exchange_.tokens.offset; }
    std::size_t logits_stride() const noexcept { return exchange_.logits.stride; }
    // Time spent since the last call of the same function: at barriers, in matrices, in attention. What is left of a
    // step is norms, rotary and page writes, and the embedding.
    std::int64_t take_wait_ns() noexcept;
    std::int64_t take_weights_ns() noexcept;
    std::int64_t take_attention_ns() noexcept;

private:
    void check(const Batch& batch) const;
    void embed(const Batch& batch);
    void project(const LayerWeights& layer, std::size_t number, const Batch& batch);
    void store_heads(const LayerWeights& layer, std::size_t number, const Batch& batch, std::size_t first, std::size_t count);
    void attend(std::size_t number, const Batch& batch);
    void attend_segment(const PagePlanes& planes, const Segment& segment, const Segment* next, const Batch& batch);
    void norm_all(const float* weight, bool add_hidden, std::size_t count);
    void meet();
    void begin_part() noexcept;
    void end_part(std::int64_t& part_ns) noexcept;

    PagePlanes planes(std::size_t layer) const noexcept;
    std::size_t bytes(std::size_t elements) const noexcept { return elements * element_bytes(shape_.dtype); }
    std::byte* shared_row(const Exchange::Buffer& buffer, std::size_t row, std::size_t column) const noexcept {
        return shared_ + buffer.offset + bytes(row * buffer.stride + column);
    }
    float* hidden_row(std::size_t row) const noexcept {
        return reinterpret_cast<float*>(shared_ + exchange_.hidden.offset) + row * exchange_.hidden.stride;
    }

    ModelShape shape_;
    RankCut cut_;
    Weights weights_;
    Arena arena_;
    Limits limits_;
    Exchange exchange_;
    std::byte* shared_;
    shm::Communicator* peers_;
    const Kernels& kernels_;
    std::size_t rank_, world_;

    const float* cosine_ = nullptr;
    const float* sine_ = nullptr;
    std::size_t positions_ = 0;

    std::size_t norm_stride_;   // elements of a row of normed_
    Memory residual_;           // fp32 [tokens][hidden]
    Memory normed_;             // dtype [tokens][norm_stride_]
    Memory heads_;              // fp32 [head_rows][qkv units · D]
    Memory attention_;          // scratch of one attention tile
    std::size_t attention_length_ = 0;
    std::vector<std::size_t> token_positions_;
    std::vector<Segment> segments_;
    std::size_t batch_count_ = 0;
    std::int64_t wait_ns_ = 0, weights_ns_ = 0, attention_ns_ = 0;
    std::int64_t part_began_ns_ = 0;
};

}  // namespace dynamictp::kernels
