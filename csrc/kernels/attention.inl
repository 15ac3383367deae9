// Paged attention of one tile of query rows. Included by each level after linear.inl.
//
// Scores of all keys, their maximum, the probabilities, then the values: each score and each output element is one
// chain over the pages in order. A row may be computed together with rows that see more keys: its probabilities
// beyond its own length are zero, and adding zero products changes no bit (but perhaps the sign of a zero, which the
// last step makes positive). So tiles, and with them chunks and ranks, are free.
//
// A page is a short piece of memory, over before the hardware has noticed the stream: while K is read, the same places
// of V are prefetched, and while V is read those of the next K (a fifth to a third of the time; measured).

namespace {

using dynamictp::kernels::AttentionTile;
using dynamictp::kernels::max_attention_rows;
using dynamictp::kernels::PagePlanes;

// How pairs of KV elements (neighbouring dimensions of K, neighbouring tokens of V) are multiplied.
struct Bf16Kv : Bf16 {
    using Sum = F16;
    using Block = Pairs;  // sixteen pairs
    static constexpr int blocks = max_accumulators >= 24 ? 4 : 1;
    static Sum empty() { return zero(); }
    static Block load_block(const Element* from) { return load_pairs(from); }
    static Block broadcast_pair(const Element* from) { return set1_pair(from); }
    static Block without_second(Block block) { return first_of_pairs(block); }
    static Sum add_products(Sum sum, Block a, Block b) { return dot(sum, a, b); }
    static F16 finish(Sum sum) { return sum; }
};

struct Fp32Kv : Fp32 {
    struct Sum {
        F16 low, high;  // 32 partial sums: of the first and second elements of sixteen pairs, alternating
    };
    using Block = Sum;
    static constexpr int blocks = max_accumulators >= 24 ? 2 : 1;
    static Sum empty() { return {zero(), zero()}; }
    static Block load_block(const Element* from) { return {load(from), load(from + 16)}; }
    static Block broadcast_pair(const Element* from) {
        const F16 pair = set1_pair(from);
        return {pair, pair};
    }
    static Block without_second(Block block) { return {even_lanes(block.low), even_lanes(block.high)}; }
    static Sum add_products(Sum sum, Block a, Block b) {
        return {fma(a.low, b.low, sum.low), fma(a.high, b.high, sum.high)};
    }
    static F16 finish(Sum sum) { return add_neighbours(sum.low, sum.high); }
};

// One tile's working memory. Scores and probabilities have a row stride of `stride` elements.
template <class D>
struct Work {
    const PagePlanes& planes;
    const AttentionTile& tile;
    std::size_t longest;
    std::size_t stride;
    float* scores;
    typename D::Element* probabilities;

    const typename D::Element* page(const void* plane, std::size_t block) const {
        return static_cast<const typename D::Element*>(plane) +
               static_cast<std::size_t>(tile.pages[block * tile.page_step]) * planes.page_elements;
    }
    // Bytes from a page to the page of K that is wanted next; 0 when there is none.
    std::ptrdiff_t to_next_keys(const typename D::Element* from, std::size_t block) const {
        if (block >= tile.next_count) return 0;
        const auto* const next = static_cast<const typename D::Element*>(planes.k) +
                                 static_cast<std::size_t>(tile.next_pages[block * tile.page_step]) * planes.page_elements;
        return reinterpret_cast<const char*>(next) - reinterpret_cast<const char*>(from);
    }
};

inline void prefetch(const void* near, std::ptrdiff_t distance) {
    __builtin_prefetch(static_cast<const char*>(near) + distance, 0, 2);
}

// Scores of B blocks of sixteen keys of one page, from key `start` of the sequence.
template <class D, int R, int B>
inline void score_blocks(const Work<D>& work, const typename D::Element* k, std::size_t start) {
    const std::size_t row_elements = 2 * work.planes.page_tokens;
    const typename D::Element* query[R];
    for (int r = 0; r < R; ++r) query[r] = static_cast<const typename D::Element*>(work.tile.query[r]);
    typename D::Sum sums[R][B];
    for (int r = 0; r < R; ++r) {
        for (int b = 0; b < B; ++b) sums[r][b] = D::empty();
    }
    const std::ptrdiff_t to_values = static_cast<const char*>(work.planes.v) - static_cast<const char*>(work.planes.k);
    for (std::size_t d = 0; d < work.planes.head_dim; d += 2) {
        typename D::Block keys[B];
        for (int b = 0; b < B; ++b) {
            const typename D::Element* const from = k + d / 2 * row_elements + 2 * lanes * b;
            keys[b] = D::load_block(from);
            prefetch(from, to_values);
        }
        for (int r = 0; r < R; ++r) {
            const typename D::Block value = D::broadcast_pair(query[r] + d);
            for (int b = 0; b < B; ++b) sums[r][b] = D::add_products(sums[r][b], keys[b], value);
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int b = 0; b < B; ++b) store(work.scores + r * work.stride + start + lanes * b, D::finish(sums[r][b]));
    }
}

template <class D, int R>
void scores(const Work<D>& work) {
    const std::size_t page_tokens = work.planes.page_tokens;
    for (std::size_t start = 0, block = 0; start < work.longest; start += page_tokens, ++block) {
        const typename D::Element* const k = work.page(work.planes.k, block);
        const std::size_t left = work.longest - start;
        const std::size_t tokens = left < page_tokens ? (left + lanes - 1) / lanes * lanes : page_tokens;
        std::size_t at = 0;
        for (; at + D::blocks * lanes <= tokens; at += D::blocks * lanes) {
            score_blocks<D, R, D::blocks>(work, k + 2 * at, start + at);
        }
        for (; at < tokens; at += lanes) score_blocks<D, R, 1>(work, k + 2 * at, start + at);
    }
}

// Turns a row of scores into rounded probabilities (not divided by their sum) and returns 1 / their sum.
template <class D>
float probabilities(const Work<D>& work, std::size_t row) {
    const std::size_t length = work.tile.length[row];
    const std::size_t padded = (work.longest + lanes - 1) / lanes * lanes;
    const float* const s = work.scores + row * work.stride;
    typename D::Element* const p = work.probabilities + row * work.stride;
    const F16 lowest = set1(-__builtin_huge_valf());
    F16 best = lowest;
    std::size_t i = 0;
    for (; i + lanes <= length; i += lanes) best = max(best, load(s + i));
    if (i < length) best = max(best, keep_first(load(s + i), length - i, lowest));
    const F16 scale = set1(log2_e / __builtin_sqrtf(static_cast<float>(work.planes.head_dim)));
    const F16 shift = mul(set1(max_lanes(best)), scale);
    F16 sums = zero();
    for (i = 0; i < length; i += lanes) {
        F16 term = power_of_two(sub(mul(load(s + i), scale), shift));
        term = keep_first(term, length - i, zero());
        sums = add(sums, term);
        D::store_rounded(p + i, term);
    }
    for (; i < padded; i += lanes) D::store_rounded(p + i, zero());
    return 1.0f / sum_lanes(sums);
}

// Output dimensions [dim, dim + 16·B) of all rows.
template <class D, int R, int B>
inline void value_blocks(const Work<D>& work, std::size_t dim, const float* inverse_sums) {
    const std::size_t page_tokens = work.planes.page_tokens;
    const std::size_t pair_elements = 2 * work.planes.head_dim;
    typename D::Sum sums[R][B];
    for (int r = 0; r < R; ++r) {
        for (int b = 0; b < B; ++b) sums[r][b] = D::empty();
    }
    std::ptrdiff_t to_next = 0;
    const auto add_pair = [&](const typename D::Element* v, const typename D::Element* p, bool whole)
        __attribute__((always_inline)) {
        typename D::Block values[B];
        for (int b = 0; b < B; ++b) {
            values[b] = D::load_block(v + 2 * lanes * b);
            prefetch(v + 2 * lanes * b, to_next);
            if (!whole) values[b] = D::without_second(values[b]);
        }
        for (int r = 0; r < R; ++r) {
            const typename D::Block weight = D::broadcast_pair(p + r * work.stride);
            for (int b = 0; b < B; ++b) sums[r][b] = D::add_products(sums[r][b], values[b], weight);
        }
    };
    for (std::size_t start = 0, block = 0; start < work.longest; start += page_tokens, ++block) {
        const typename D::Element* const page = work.page(work.planes.v, block);
        const typename D::Element* const v = page + 2 * dim;
        to_next = work.to_next_keys(page, block);
        const std::size_t left = work.longest - start;
        const std::size_t tokens = left < page_tokens ? left : page_tokens;
        std::size_t t = 0;
        for (; t + 2 <= tokens; t += 2) add_pair(v + t / 2 * pair_elements, work.probabilities + start + t, true);
        // What lies beyond the longest row may be anything, NaN too.
        if (t < tokens) add_pair(v + t / 2 * pair_elements, work.probabilities + start + t, false);
    }
    for (int r = 0; r < R; ++r) {
        auto* const out = static_cast<typename D::Element*>(work.tile.out[r]) + dim;
        const F16 inverse = set1(inverse_sums[r]);
        for (int b = 0; b < B; ++b) {
            D::store_rounded(out + lanes * b, add(mul(D::finish(sums[r][b]), inverse), zero()));
        }
    }
}

template <class D, int R>
void attend(const Work<D>& work) {
    scores<D, R>(work);
    float inverse_sums[R];
    for (int r = 0; r < R; ++r) inverse_sums[r] = probabilities<D>(work, static_cast<std::size_t>(r));
    std::size_t dim = 0;
    for (; dim + D::blocks * lanes <= work.planes.head_dim; dim += D::blocks * lanes) {
        value_blocks<D, R, D::blocks>(work, dim, inverse_sums);
    }
    for (; dim < work.planes.head_dim; dim += lanes) value_blocks<D, R, 1>(work, dim, inverse_sums);
}

template <class D>
void attention(const PagePlanes& planes, const AttentionTile& tile, void* scratch) {
    std::size_t longest = 0;
    for (std::size_t r = 0; r < tile.rows; ++r) longest = tile.length[r] > longest ? tile.length[r] : longest;
    const std::size_t stride = (longest + lanes - 1) / lanes * lanes;
    auto* const scores = static_cast<float*>(scratch);
    const Work<D> work{planes, tile, longest, stride, scores,
                       reinterpret_cast<typename D::Element*>(scores + max_attention_rows * stride)};
    switch (tile.rows) {
        case 1: return attend<D, 1>(work);
        case 2: return attend<D, 2>(work);
        case 3: return attend<D, 3>(work);
        case 4: return attend<D, 4>(work);
        case 5: return attend<D, 5>(work);
        case 6: return attend<D, 6>(work);
        default: __builtin_unreachable();
    }
}

}  // namespace
