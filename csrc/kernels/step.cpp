#include "kernels/step.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "shm/futex.hpp"

namespace dynamictp::kernels {

namespace {

// Rows of QKV projected at a time: their fp32 heads stay in the second-level cache until they are stored.
constexpr std::size_t head_rows = 64;

// Rows of a power-of-two stride would all fall into the same cache sets; a line of padding spreads them.
std::size_t padded_stride(std::size_t elements) noexcept { return elements + 32; }

std::size_t round_up(std::size_t value, std::size_t unit) noexcept { return (value + unit - 1) / unit * unit; }

Memory allocate(std::size_t bytes) { return Memory(new (std::align_val_t{64}) std::byte[std::max<std::size_t>(bytes, 64)]); }

}  // namespace

Exchange Exchange::layout(const ModelShape& shape, const Limits& limits, std::size_t world) noexcept {
    Exchange result{};
    std::size_t end = 0;
    const auto place = [&](std::size_t rows, std::size_t stride, std::size_t width) {
        const Buffer buffer{end, stride};
        end = round_up(end + rows * stride * width, 64);
        return buffer;
    };
    const std::size_t width = element_bytes(shape.dtype), attended = padded_stride(shape.query_heads * shape.head_dim);
    result.q = place(limits.tokens, attended, width);
    result.attn = place(limits.tokens, attended, width);
    result.hidden = place(limits.tokens, padded_stride(shape.hidden), sizeof(float));
    result.mlp = place(limits.tokens, padded_stride(shape.intermediate), width);
    result.logits = place(limits.rows, padded_stride(round_up(shape.vocab, panel_rows)), sizeof(float));
    result.best = place(world, limits.rows, sizeof(Best));
    result.tokens = place(limits.rows, 1, sizeof(std::int64_t));
    result.bytes = end;
    return result;
}

Step::Step(const ModelShape& shape, const RankCut& cut, Weights weights, const Arena& arena, std::byte* exchange,
           const Limits& limits, shm::Communicator* peers, const Kernels& kernels)
    : shape_(shape),
      cut_(cut),
      weights_(std::move(weights)),
      arena_(arena),
      limits_(limits),
      exchange_(Exchange::layout(shape, limits, peers == nullptr ? 1 : peers->world())),
      shared_(exchange),
      peers_(peers),
      kernels_(kernels),
      rank_(peers == nullptr ? 0 : peers->rank()),
      world_(peers == nullptr ? 1 : peers->world()),
      norm_stride_(padded_stride(shape.hidden)) {
    if (shape.hidden % 16 != 0 || shape.head_dim % 16 != 0 || shape.intermediate % 16 != 0) {
        throw std::invalid_argument("hidden, head_dim and intermediate must be multiples of 16");
    }
    if (arena.page_tokens == 0 || arena.page_tokens % 16 != 0) {
        throw std::invalid_argument("page_tokens must be a multiple of 16");
    }
    if (weights_.layers.size() != shape.layers) throw std::invalid_argument("weights for every layer are needed");
    residual_ = allocate(std::max(limits.tokens, limits.rows) * shape.hidden * sizeof(float));
    normed_ = allocate(bytes(std::max(limits.tokens, limits.rows) * norm_stride_));
    heads_ = allocate(head_rows * cut.qkv.size() * shape.head_dim * sizeof(float));
}

void Step::set_rotation(const float* cosine, const float* sine, std::size_t positions) noexcept {
    cosine_ = cosine;
    sine_ = sine;
    positions_ = positions;
}

std::int64_t Step::take_wait_ns() noexcept { return std::exchange(wait_ns_, 0); }
std::int64_t Step::take_weights_ns() noexcept { return std::exchange(weights_ns_, 0); }
std::int64_t Step::take_attention_ns() noexcept { return std::exchange(attention_ns_, 0); }

void Step::begin_part() noexcept { part_began_ns_ = shm::now_ns(); }
void Step::end_part(std::int64_t& part_ns) noexcept { part_ns += shm::now_ns() - part_began_ns_; }

void Step::meet() {
    if (peers_ == nullptr) return;
    begin_part();
    if (!peers_->arrive()) peers_->wait();
    end_part(wait_ns_);
}

void Step::check(const Batch& batch) const {
    if (batch.count > limits_.tokens) {
        throw std::invalid_argument("a step of " + std::to_string(batch.count) + " tokens; at most " +
                                    std::to_string(limits_.tokens) + " fit");
    }
    for (std::size_t t = 0; t < batch.count; ++t) {
        if (batch.tokens[t] < 0 || static_cast<std::size_t>(batch.tokens[t]) >= shape_.vocab) {
            throw std::invalid_argument("token " + std::to_string(batch.tokens[t]) + " is not in the vocabulary");
        }
    }
    for (std::size_t s = 0; s < batch.spans.size(); ++s) {
        const std::size_t end = batch.spans[s].start + batch.spans[s].count;
        if (end > positions_) throw std::invalid_argument("no rotation for position " + std::to_string(end - 1));
        const std::size_t entries = (end + arena_.page_tokens - 1) / arena_.page_tokens * shape_.kv_heads;
        for (std::size_t i = 0; i < entries; ++i) {
            const std::int32_t page = batch.tables[s][i];
            if (page < 0 || static_cast<std::size_t>(page) >= arena_.pages) {
                throw std::invalid_argument("page " + std::to_string(page) + " is not in the arena");
            }
        }
    }
}

void Step::run(const Batch& batch) {
    check(batch);
    std::size_t longest = 0;
    token_positions_.resize(batch.count);
    for (std::size_t s = 0; s < batch.spans.size(); ++s) {
        const Span& span = batch.spans[s];
        for (std::size_t i = 0; i < span.count; ++i) token_positions_[batch.offsets[s] + i] = span.start + i;
        longest = std::max(longest, span.start + span.count);
    }
    if (longest > attention_length_) {
        attention_length_ = round_up(longest, 1024);
        attention_ = allocate(attention_scratch(attention_length_));
    }
    const std::size_t group = shape_.query_heads / shape_.kv_heads;
    segments_ = divide_attention(batch.spans.data(), batch.spans.size(), shape_.kv_heads, group, rank_, world_);
    batch_count_ = batch.count;

    embed(batch);
    for (std::size_t number = 0; number < shape_.layers; ++number) {
        const LayerWeights& layer = weights_.layers[number];
        norm_all(layer.attn_norm, number > 0, batch.count);
        project(layer, number, batch);
        meet();
        begin_part();
        attend(number, batch);
        end_part(attention_ns_);
        meet();
        const std::size_t hidden_column = cut_.hidden.start * panel_rows;
        begin_part();
        kernels_.linear(layer.o, {shared_row(exchange_.attn, 0, 0), exchange_.attn.stride, batch.count},
                        hidden_row(0) + hidden_column, exchange_.hidden.stride);
        end_part(weights_ns_);
        meet();
        norm_all(layer.mlp_norm, true, batch.count);
        begin_part();
        kernels_.gated(layer.gate, layer.up, {normed_.get(), norm_stride_, batch.count},
                       shared_row(exchange_.mlp, 0, cut_.mlp.start * panel_rows), exchange_.mlp.stride);
        end_part(weights_ns_);
        meet();
        begin_part();
        kernels_.linear(layer.down, {shared_row(exchange_.mlp, 0, 0), exchange_.mlp.stride, batch.count},
                        hidden_row(0) + hidden_column, exchange_.hidden.stride);
        end_part(weights_ns_);
        meet();
    }
}

void Step::embed(const Batch& batch) {
    auto* const residual = reinterpret_cast<float*>(residual_.get());
    for (std::size_t t = 0; t < batch.count; ++t) {
        kernels_.unpack_row(weights_.embed, shape_.hidden, static_cast<std::size_t>(batch.tokens[t]),
                            residual + t * shape_.hidden);
    }
}

// Adds the last projection to the residual (except before the first layer) and norms every row.
void Step::norm_all(const float* weight, bool add_hidden, std::size_t count) {
    auto* const residual = reinterpret_cast<float*>(residual_.get());
    for (std::size_t t = 0; t < count; ++t) {
        kernels_.add_norm(residual + t * shape_.hidden, add_hidden ? hidden_row(t) : nullptr, weight, shape_.epsilon,
                          shape_.hidden, normed_.get() + bytes(t * norm_stride_));
    }
}

PagePlanes Step::planes(std::size_t layer) const noexcept {
    const std::size_t page_elements = arena_.page_tokens * shape_.head_dim;
    const std::size_t plane_bytes = bytes(arena_.pages * page_elements);
    const std::byte* const k = arena_.memory + 2 * layer * plane_bytes;
    return {k, k + plane_bytes, page_elements, arena_.page_tokens, shape_.head_dim};
}

// Queries of the rank's heads to the exchange, its keys and values to the pages.
void Step::project(const LayerWeights& layer, std::size_t number, const Batch& batch) {
    auto* const heads = reinterpret_cast<float*>(heads_.get());
    const std::size_t stride = cut_.qkv.size() * shape_.head_dim;
    for (std::size_t first = 0; first < batch.count; first += head_rows) {
        const std::size_t count = std::min(head_rows, batch.count - first);
        begin_part();
        kernels_.linear(layer.qkv, {normed_.get() + bytes(first * norm_stride_), norm_stride_, count}, heads, stride);
        end_part(weights_ns_);
        store_heads(layer, number, batch, first, count);
    }
}

void Step::store_heads(const LayerWeights& layer, std::size_t number, const Batch& batch, std::size_t first,
                       std::size_t count) {
    const PagePlanes pages = planes(number);
    const std::size_t half = shape_.head_dim / 2, stride = cut_.qkv.size() * shape_.head_dim;
    std::size_t sequence = 0;
    while (batch.offsets[sequence] + batch.spans[sequence].count <= first) ++sequence;
    for (std::size_t t = first; t < first + count; ++t) {
        while (batch.offsets[sequence] + batch.spans[sequence].count <= t) ++sequence;
        float* head = reinterpret_cast<float*>(heads_.get()) + (t - first) * stride;
        const std::size_t position = token_positions_[t], slot = position % pages.page_tokens;
        const std::int32_t* const table = batch.tables[sequence] + position / pages.page_tokens * shape_.kv_heads;
        const auto page = [&](const void* plane, std::size_t kv_head) {
            // The planes are this rank's to write: the arena is shared memory, const only to those who read.
            auto* const start = static_cast<std::byte*>(const_cast<void*>(plane));
            return start + bytes(static_cast<std::size_t>(table[kv_head]) * pages.page_elements);
        };
        for (std::size_t unit = cut_.qkv.start; unit < cut_.qkv.stop; ++unit, head += shape_.head_dim) {
            const bool query = unit < shape_.query_heads;
            const std::size_t kv_head = (unit - shape_.query_heads) % shape_.kv_heads;
            if (unit >= shape_.query_heads + shape_.kv_heads) {
                kernels_.store_value(head, pages, slot, page(pages.v, kv_head));
                continue;
            }
            const float* const norm = query ? layer.q_norm : layer.k_norm;
            if (norm != nullptr) kernels_.head_norm(head, norm, shape_.epsilon, shape_.head_dim);
            kernels_.rotate(head, cosine_ + position * half, sine_ + position * half, half);
            if (query) {
                kernels_.round(head, shape_.head_dim, shared_row(exchange_.q, t, unit * shape_.head_dim));
            } else {
                kernels_.store_key(head, pages, slot, page(pages.k, kv_head));
            }
        }
    }
}

void Step::attend(std::size_t number, const Batch& batch) {
    const PagePlanes pages = planes(number);
    for (std::size_t i = 0; i < segments_.size(); ++i) {
        attend_segment(pages, segments_[i], i + 1 < segments_.size() ? &segments_[i + 1] : nullptr, batch);
    }
}

// `next` is the segment after this one, or null.
void Step::attend_segment(const PagePlanes& pages, const Segment& segment, const Segment* next, const Batch& batch) {
    const std::size_t group = shape_.query_heads / shape_.kv_heads;
    AttentionTile tile{};
    tile.pages = batch.tables[segment.sequence] + segment.kv_head;
    tile.page_step = shape_.kv_heads;
    for (std::size_t row = segment.first; row < segment.last;) {
        // Tiles of equal height: a single row left over would cost as much as several.
        const std::size_t left = segment.last - row, tiles = (left + max_attention_rows - 1) / max_attention_rows;
        tile.rows = (left + tiles - 1) / tiles;
        for (std::size_t r = 0; r < tile.rows; ++r, ++row) {
            const std::size_t token = row / group, head = segment.kv_head * group + row % group;
            const std::size_t at = batch.offsets[segment.sequence] + token;
            tile.query[r] = shared_row(exchange_.q, at, head * shape_.head_dim);
            tile.out[r] = shared_row(exchange_.attn, at, head * shape_.head_dim);
            tile.length[r] = batch.spans[segment.sequence].start + token + 1;
        }
        // Further tiles of this segment find K in the cache.
        if (row == segment.last && next != nullptr) {
            const Span& span = batch.spans[next->sequence];
            tile.next_pages = batch.tables[next->sequence] + next->kv_head;
            tile.next_count = (span.start + span.count + pages.page_tokens - 1) / pages.page_tokens;
        }
        kernels_.attention(pages, tile, attention_.get());
    }
}

void Step::logits(const std::int64_t* tokens, std::size_t count, std::int64_t* arg_max) {
    if (count > limits_.rows) {
        throw std::invalid_argument("logits of " + std::to_string(count) + " rows; at most " +
                                    std::to_string(limits_.rows) + " fit");
    }
    const auto* const residual = reinterpret_cast<const float*>(residual_.get());
    // The residual stays as it is, for further calls.
    std::vector<float> row(shape_.hidden);
    for (std::size_t r = 0; r < count; ++r) {
        const auto token = static_cast<std::size_t>(tokens[r]);
        if (tokens[r] < 0 || token >= batch_count_) throw std::invalid_argument("logits of a token outside the batch");
        std::memcpy(row.data(), residual + token * shape_.hidden, shape_.hidden * sizeof(float));
        kernels_.add_norm(row.data(), hidden_row(token), weights_.final_norm, shape_.epsilon, shape_.hidden,
                          normed_.get() + bytes(r * norm_stride_));
    }
    auto* const out = reinterpret_cast<float*>(shared_ + exchange_.logits.offset);
    const std::size_t stride = exchange_.logits.stride, first = cut_.vocab.start * panel_rows;
    begin_part();
    kernels_.linear(weights_.head, {normed_.get(), norm_stride_, count}, out + first, stride);
    end_part(weights_ns_);
    auto* const best = reinterpret_cast<Best*>(shared_ + exchange_.best.offset);
    for (std::size_t r = 0; r < count; ++r) {
        float* const mine = out + r * stride + first;
        const std::size_t size = cut_.vocab.size() * panel_rows;
        const std::size_t real = std::min(size, shape_.vocab - first);
        std::fill(mine + real, mine + size, -std::numeric_limits<float>::infinity());
        const std::size_t index = kernels_.arg_max(mine, size);
        best[rank_ * limits_.rows + r] = {mine[index], static_cast<std::uint32_t>(first + index)};
    }
    meet();
    for (std::size_t r = 0; r < count; ++r) {
        Best found = best[r];
        for (std::size_t rank = 1; rank < world_; ++rank) {
            const Best& other = best[rank * limits_.rows + r];
            if (other.value > found.value) found = other;
        }
        arg_max[r] = found.index;
    }
}

}  // namespace dynamictp::kernels
