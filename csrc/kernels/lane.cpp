#include "kernels/lane.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "shm/futex.hpp"

namespace dynamictp::kernels {

namespace {

// Rows of QKV projected at a time: their fp32 heads stay in the second-level cache until they are stored.
constexpr std::size_t head_rows = 64;
// Rows of activations turned into integers at a time: as many as the linear kernels take at once.
constexpr std::size_t digit_rows = 128;

// Rows of a power-of-two stride would all fall into the same cache sets; a line of padding spreads them.
std::size_t padded_stride(std::size_t elements) noexcept { return elements + 32; }

std::size_t round_up(std::size_t value, std::size_t unit) noexcept { return (value + unit - 1) / unit * unit; }

Range part_of(const Range& range, std::size_t index, std::size_t parts) noexcept {
    const auto cut = [&](std::size_t i) { return range.start + (i * range.size() + parts - 1) / parts; };
    return {cut(index), cut(index + 1)};
}

// Adds the time from here to the end of the block.
class Timed {
public:
    explicit Timed(std::int64_t& sum_ns) noexcept : sum_ns_(sum_ns), began_ns_(shm::now_ns()) {}
    ~Timed() { sum_ns_ += shm::now_ns() - began_ns_; }
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;

private:
    std::int64_t& sum_ns_;
    std::int64_t began_ns_;
};

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

RankCut RankCut::part(std::size_t index, std::size_t parts) const noexcept {
    return {part_of(qkv, index, parts), part_of(hidden, index, parts), part_of(mlp, index, parts),
            part_of(vocab, index, parts)};
}

Weights Weights::part(const ModelShape& shape, const RankCut& whole, const RankCut& part) const {
    const auto panels = [&](const Panels& matrix, const Range& from, const Range& to, std::size_t unit) {
        const std::size_t first = (to.start - from.start) * unit;
        const auto* const data = static_cast<const std::byte*>(matrix.data);
        return Panels{data + first * panel_bytes(matrix.columns, shape.dtype, shape.weights), to.size() * unit,
                      matrix.columns, matrix.bias == nullptr ? nullptr : matrix.bias + first * panel_rows};
    };
    Weights result{embed, {}, final_norm, panels(head, whole.vocab, part.vocab, 1)};
    for (const LayerWeights& layer : layers) {
        result.layers.push_back({layer.attn_norm, layer.q_norm, layer.k_norm, layer.mlp_norm,
                                 panels(layer.qkv, whole.qkv, part.qkv, shape.head_dim / panel_rows),
                                 panels(layer.o, whole.hidden, part.hidden, 1), panels(layer.gate, whole.mlp, part.mlp, 1),
                                 panels(layer.up, whole.mlp, part.mlp, 1),
                                 panels(layer.down, whole.hidden, part.hidden, 1)});
    }
    return result;
}

std::vector<WeightSpan> Weights::spans(const ModelShape& shape) const {
    std::vector<WeightSpan> result;
    const auto vector = [&](const float* data, std::size_t elements) {
        if (data != nullptr) result.push_back({data, elements * sizeof(float)});
    };
    const auto panels = [&](const Panels& matrix, WeightType type) {
        result.push_back({matrix.data, matrix.count * panel_bytes(matrix.columns, shape.dtype, type)});
        vector(matrix.bias, matrix.count * panel_rows);
    };
    const std::size_t vocabulary = (shape.vocab + panel_rows - 1) / panel_rows;
    panels({embed, vocabulary, shape.hidden, nullptr}, WeightType::plain);
    for (const LayerWeights& layer : layers) {
        vector(layer.attn_norm, shape.hidden);
        vector(layer.q_norm, shape.head_dim);
        vector(layer.k_norm, shape.head_dim);
        vector(layer.mlp_norm, shape.hidden);
        for (const Panels* matrix : {&layer.qkv, &layer.o, &layer.gate, &layer.up, &layer.down}) {
            panels(*matrix, shape.weights);
        }
    }
    vector(final_norm, shape.hidden);
    panels(head, shape.weights);
    return result;
}

Lane::Lane(const Common& common, const RankCut& cut, Weights weights, Place place, Meeting& meeting)
    : common_(common),
      cut_(cut),
      weights_(std::move(weights)),
      place_(place),
      meeting_(meeting),
      norm_stride_(padded_stride(common.shape.hidden)),
      row_(common.shape.hidden),
      best_(common.limits.rows) {
    const ModelShape& shape = common.shape;
    const std::size_t rows = std::max(common.limits.tokens, common.limits.rows);
    residual_ = allocate(rows * shape.hidden * sizeof(float));
    normed_ = allocate(common.bytes(rows * norm_stride_));
    heads_ = allocate(head_rows * cut.qkv.size() * shape.head_dim * sizeof(float));
    if (shape.weights == WeightType::int8) {
        const std::size_t widest = std::max({shape.hidden, shape.intermediate, shape.query_heads * shape.head_dim});
        digit_stride_ = padded_stride(int8_columns(widest));
        factor_stride_ = padded_stride(int8_columns(widest) / int8_group);
        digits_ = allocate(digit_rows * digit_stride_ * sizeof(std::int16_t));
        factors_ = allocate(digit_rows * factor_stride_ * sizeof(float));
    }
}

void Lane::prepare(const Batch& batch, std::size_t longest) {
    if (longest > attention_length_) {
        attention_length_ = round_up(longest, 1024);
        attention_ = allocate(attention_scratch(attention_length_));
    }
    const ModelShape& shape = common_.shape;
    segments_ = divide_attention(batch.spans.data(), batch.spans.size(), shape.kv_heads, shape.query_heads / shape.kv_heads,
                                 place_.part, place_.parts);
}

void Lane::run(const Batch& batch) {
    const Exchange& exchange = common_.exchange;
    embed(batch);
    for (std::size_t number = 0; number < common_.shape.layers; ++number) {
        meeting_.begin_layer(place_.thread, number);
        const LayerWeights& layer = weights_.layers[number];
        float* const hidden = common_.hidden_row(0) + cut_.hidden.start * panel_rows;
        norm_all(layer.attn_norm, number > 0, batch.count);
        project(layer, number, batch);
        meet();
        attend(number, batch);
        meet();
        multiply(layer.o, common_.row(exchange.attn, 0, 0), exchange.attn.stride, batch.count, hidden,
                 exchange.hidden.stride);
        meet();
        norm_all(layer.mlp_norm, true, batch.count);
        gate(layer, batch.count);
        meet();
        multiply(layer.down, common_.row(exchange.mlp, 0, 0), exchange.mlp.stride, batch.count, hidden,
                 exchange.hidden.stride);
        meet();
    }
}

// Calls call(digits, first row) for blocks of rows turned into integers.
template <typename Call>
void Lane::for_digits(const std::byte* x, std::size_t x_stride, std::size_t count, std::size_t columns, const Call& call) {
    auto* const values = reinterpret_cast<std::int16_t*>(digits_.get());
    auto* const factors = reinterpret_cast<float*>(factors_.get());
    for (std::size_t first = 0; first < count; first += digit_rows) {
        const Digits digits{values, factors, digit_stride_, factor_stride_, std::min(digit_rows, count - first)};
        common_.kernels.quantise({x + common_.bytes(first * x_stride), x_stride, digits.count}, columns, digits);
        call(digits, first);
    }
}

void Lane::multiply(const Panels& weights, const std::byte* x, std::size_t x_stride, std::size_t count, float* y,
                    std::size_t y_stride) {
    const Timed timed(weights_ns_);
    if (common_.shape.weights == WeightType::plain) {
        return common_.kernels.linear(weights, {x, x_stride, count}, y, y_stride);
    }
    for_digits(x, x_stride, count, weights.columns, [&](const Digits& digits, std::size_t first) {
        common_.kernels.linear_int8(weights, digits, y + first * y_stride, y_stride);
    });
}

void Lane::gate(const LayerWeights& layer, std::size_t count) {
    const Timed timed(weights_ns_);
    const Exchange::Buffer& mlp = common_.exchange.mlp;
    const std::size_t column = cut_.mlp.start * panel_rows;
    if (common_.shape.weights == WeightType::plain) {
        return common_.kernels.gated(layer.gate, layer.up, {normed_.get(), norm_stride_, count}, common_.row(mlp, 0, column),
                                     mlp.stride);
    }
    for_digits(normed_.get(), norm_stride_, count, layer.gate.columns, [&](const Digits& digits, std::size_t first) {
        common_.kernels.gated_int8(layer.gate, layer.up, digits, common_.row(mlp, first, column), mlp.stride);
    });
}

void Lane::embed(const Batch& batch) {
    for (std::size_t t = 0; t < batch.count; ++t) {
        common_.kernels.unpack_row(weights_.embed, common_.shape.hidden, static_cast<std::size_t>(batch.tokens[t]), residual(t));
    }
}

// Adds the last projection to the residual (except before the first layer) and norms every row.
void Lane::norm_all(const float* weight, bool add_hidden, std::size_t count) {
    for (std::size_t t = 0; t < count; ++t) {
        common_.kernels.add_norm(residual(t), add_hidden ? common_.hidden_row(t) : nullptr, weight, common_.shape.epsilon,
                                 common_.shape.hidden, normed_.get() + common_.bytes(t * norm_stride_));
    }
}

PagePlanes Lane::planes(std::size_t layer) const noexcept {
    const Arena& arena = common_.arena;
    const std::size_t page_elements = arena.page_tokens * common_.shape.head_dim;
    const std::size_t plane_bytes = common_.bytes(arena.pages * page_elements);
    const std::byte* const k = arena.memory + 2 * layer * plane_bytes;
    return {k, k + plane_bytes, page_elements, arena.page_tokens, common_.shape.head_dim};
}

// Queries of the lane's heads to the exchange, its keys and values to the pages.
void Lane::project(const LayerWeights& layer, std::size_t number, const Batch& batch) {
    auto* const heads = reinterpret_cast<float*>(heads_.get());
    const std::size_t stride = cut_.qkv.size() * common_.shape.head_dim;
    for (std::size_t first = 0; first < batch.count; first += head_rows) {
        const std::size_t count = std::min(head_rows, batch.count - first);
        multiply(layer.qkv, normed_.get() + common_.bytes(first * norm_stride_), norm_stride_, count, heads, stride);
        store_heads(layer, number, batch, first, count);
    }
}

void Lane::store_heads(const LayerWeights& layer, std::size_t number, const Batch& batch, std::size_t first,
                       std::size_t count) {
    const ModelShape& shape = common_.shape;
    const Kernels& kernels = common_.kernels;
    const PagePlanes pages = planes(number);
    const std::size_t half = shape.head_dim / 2, stride = cut_.qkv.size() * shape.head_dim;
    std::size_t sequence = 0;
    while (batch.offsets[sequence] + batch.spans[sequence].count <= first) ++sequence;
    for (std::size_t t = first; t < first + count; ++t) {
        while (batch.offsets[sequence] + batch.spans[sequence].count <= t) ++sequence;
        float* head = reinterpret_cast<float*>(heads_.get()) + (t - first) * stride;
        const std::size_t position = common_.token_positions[t], slot = position % pages.page_tokens;
        const std::int32_t* const table = batch.tables[sequence] + position / pages.page_tokens * shape.kv_heads;
        const auto page = [&](const void* plane, std::size_t kv_head) {
            // The planes are this rank's to write: the arena is shared memory, const only to those who read.
            auto* const start = static_cast<std::byte*>(const_cast<void*>(plane));
            return start + common_.bytes(static_cast<std::size_t>(table[kv_head]) * pages.page_elements);
        };
        for (std::size_t unit = cut_.qkv.start; unit < cut_.qkv.stop; ++unit, head += shape.head_dim) {
            const bool query = unit < shape.query_heads;
            const std::size_t kv_head = (unit - shape.query_heads) % shape.kv_heads;
            if (unit >= shape.query_heads + shape.kv_heads) {
                kernels.store_value(head, pages, slot, page(pages.v, kv_head));
                continue;
            }
            const float* const norm = query ? layer.q_norm : layer.k_norm;
            if (norm != nullptr) kernels.head_norm(head, norm, shape.epsilon, shape.head_dim);
            kernels.rotate(head, common_.cosine + position * half, common_.sine + position * half, half);
            if (query) {
                kernels.round(head, shape.head_dim, common_.row(common_.exchange.q, t, unit * shape.head_dim));
            } else {
                kernels.store_key(head, pages, slot, page(pages.k, kv_head));
            }
        }
    }
}

void Lane::attend(std::size_t number, const Batch& batch) {
    const Timed timed(attention_ns_);
    const PagePlanes pages = planes(number);
    for (std::size_t i = 0; i < segments_.size(); ++i) {
        attend_segment(pages, segments_[i], i + 1 < segments_.size() ? &segments_[i + 1] : nullptr, batch);
    }
}

// `next` is the segment after this one, or null.
void Lane::attend_segment(const PagePlanes& pages, const Segment& segment, const Segment* next, const Batch& batch) {
    const std::size_t group = common_.shape.query_heads / common_.shape.kv_heads;
    AttentionTile tile{};
    tile.pages = batch.tables[segment.sequence] + segment.kv_head;
    tile.page_step = common_.shape.kv_heads;
    for (std::size_t row = segment.first; row < segment.last;) {
        // Tiles of equal height: a single row left over would cost as much as several.
        const std::size_t left = segment.last - row, tiles = (left + max_attention_rows - 1) / max_attention_rows;
        tile.rows = (left + tiles - 1) / tiles;
        for (std::size_t r = 0; r < tile.rows; ++r, ++row) {
            const std::size_t token = row / group, head = segment.kv_head * group + row % group;
            const std::size_t at = batch.offsets[segment.sequence] + token;
            tile.query[r] = common_.row(common_.exchange.q, at, head * common_.shape.head_dim);
            tile.out[r] = common_.row(common_.exchange.attn, at, head * common_.shape.head_dim);
            tile.length[r] = batch.spans[segment.sequence].start + token + 1;
        }
        // Further tiles of this segment find K in the cache.
        if (row == segment.last && next != nullptr) {
            const Span& span = batch.spans[next->sequence];
            tile.next_pages = batch.tables[next->sequence] + next->kv_head;
            tile.next_count = (span.start + span.count + pages.page_tokens - 1) / pages.page_tokens;
        }
        common_.kernels.attention(pages, tile, attention_.get());
    }
}

void Lane::logits(const std::int64_t* tokens, std::size_t count) {
    // The residual stays as it is, for further calls.
    for (std::size_t r = 0; r < count; ++r) {
        const auto token = static_cast<std::size_t>(tokens[r]);
        std::memcpy(row_.data(), residual(token), common_.shape.hidden * sizeof(float));
        common_.kernels.add_norm(row_.data(), common_.hidden_row(token), weights_.final_norm, common_.shape.epsilon,
                                 common_.shape.hidden, normed_.get() + common_.bytes(r * norm_stride_));
    }
    constexpr float lowest = -std::numeric_limits<float>::infinity();
    const std::size_t stride = common_.exchange.logits.stride, first = cut_.vocab.start * panel_rows;
    const std::size_t size = cut_.vocab.size() * panel_rows;
    multiply(weights_.head, normed_.get(), norm_stride_, count, common_.logits() + first, stride);
    for (std::size_t r = 0; r < count; ++r) {
        best_[r] = {lowest, static_cast<std::uint32_t>(first)};
        if (size == 0) continue;
        float* const mine = common_.logits() + r * stride + first;
        std::fill(mine + std::min(size, common_.shape.vocab - first), mine + size, lowest);
        const std::size_t index = common_.kernels.arg_max(mine, size);
        best_[r] = {mine[index], static_cast<std::uint32_t>(first + index)};
    }
}

}  // namespace dynamictp::kernels
