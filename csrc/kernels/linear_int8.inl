// Linear layers over int8 panels with a scale for every 32 columns. Included by each level after linear.inl.
//
// Within a group the products are 16-bit integers summed in 32 bits: exact, so neither tile nor level changes them.
// Over the groups an output is one chain of fused products in order, like that of plain weights.

namespace {

using dynamictp::kernels::Digits;
using dynamictp::kernels::int8_block;
using dynamictp::kernels::int8_block_bytes;
using dynamictp::kernels::int8_group;
using dynamictp::kernels::int8_scale_bytes;

constexpr float largest_digit = 32767.0f;

struct DigitRows {
    const std::int16_t* values;
    const float* factors;
    std::size_t stride;
    std::size_t factor_stride;

    DigitRows from(std::size_t row) const {
        return {values + row * stride, factors + row * factor_stride, stride, factor_stride};
    }
};

struct Int8 {
    using Operand = DigitRows;
    static constexpr std::size_t group = 3, prefetching_rows = 3;

    static constexpr std::size_t panel_bytes(std::size_t columns) {
        return (columns + int8_block - 1) / int8_block * int8_block_bytes;
    }
    static constexpr int panels_per_tile(int rows) {
        const int wanted = rows <= 2 ? 1 : 2;
        const int fitting = max_int8_accumulators / rows;
        return fitting < 1 ? 1 : wanted < fitting ? wanted : fitting;
    }

    template <int R, int P, int A>
    static inline __attribute__((always_inline)) void accumulate(const char* const (&panel)[P], std::size_t columns,
                                                                 std::size_t ahead, Operand x, F16 (&sums)[P][R]) {
        for (int p = 0; p < P; ++p) {
            for (int r = 0; r < R; ++r) sums[p][r] = zero();
        }
        const std::size_t bytes = panel_bytes(columns);
        for (std::size_t block = 0, group = 0; block < bytes; block += int8_block_bytes) {
            for (int p = 0; p < A; ++p) __builtin_prefetch(panel[p] + block + ahead, 0, 2);
            for (std::size_t half = 0; half < int8_block / int8_group; ++half, ++group) {
                add_group<R, P, A>(panel, block, half, group, ahead, x, sums);
            }
        }
    }

private:
    // One group of the block that begins at byte `block` of the panels.
    template <int R, int P, int A>
    static inline __attribute__((always_inline)) void add_group(const char* const (&panel)[P], std::size_t block,
                                                                std::size_t half, std::size_t group, std::size_t ahead,
                                                                Operand x, F16 (&sums)[P][R]) {
        Ints products[P][R];
        for (int p = 0; p < P; ++p) {
            for (int r = 0; r < R; ++r) products[p][r] = no_ints();
        }
        const std::size_t first = block + int8_scale_bytes + half * int8_group * lanes;
#pragma GCC unroll 16
        for (std::size_t pair = 0; pair < int8_group / 2; ++pair) {
            Pairs weights[P];
            for (int p = 0; p < P; ++p) {
                const char* const from = panel[p] + first + pair * 2 * lanes;
                weights[p] = widen_pairs(reinterpret_cast<const std::int8_t*>(from));
                if (p < A && pair % 2 == 0) __builtin_prefetch(from + ahead, 0, 2);
            }
            for (int r = 0; r < R; ++r) {
                const Pairs value = set1_pair(x.values + r * x.stride + group * int8_group + 2 * pair);
                for (int p = 0; p < P; ++p) products[p][r] = dot_ints(products[p][r], weights[p], value);
            }
        }
        for (int p = 0; p < P; ++p) {
            const F16 scale = load_half(reinterpret_cast<const std::uint16_t*>(panel[p] + block) + half * lanes);
            for (int r = 0; r < R; ++r) {
                const F16 factor = mul(scale, set1(x.factors[r * x.factor_stride + group]));
                sums[p][r] = fma(to_float(products[p][r]), factor, sums[p][r]);
            }
        }
    }
};

// One group of activations: its integers, and the factor that gives the values back.
inline float quantise_group(F16 low, F16 high, std::int16_t* to) {
    // So small a group is nothing beside any other; its inverse could overflow. NaN goes on to the factor.
    constexpr float negligible = 1e-30f;
    const float largest = largest_magnitude(low, high);
    const float inverse = largest < negligible ? 0.0f : largest_digit / largest;
    const F16 scale = set1(inverse), limit = set1(largest_digit), lower = set1(-largest_digit);
    store_int16(to, max(min(mul(low, scale), limit), lower));
    store_int16(to + lanes, max(min(mul(high, scale), limit), lower));
    return largest < negligible ? 0.0f : largest / largest_digit;
}

template <class D>
void quantise(const Rows& x, std::size_t columns, const Digits& digits) {
    const std::size_t padded = (columns + int8_block - 1) / int8_block * int8_block;
    for (std::size_t row = 0; row < x.count; ++row) {
        const auto* const from = static_cast<const typename D::Element*>(x.data) + row * x.stride;
        auto* const values = const_cast<std::int16_t*>(digits.values) + row * digits.stride;
        auto* const factors = const_cast<float*>(digits.factors) + row * digits.factor_stride;
        for (std::size_t start = 0; start < padded; start += int8_group) {
            const F16 low = start < columns ? D::load_wide(from + start) : zero();
            const F16 high = start + lanes < columns ? D::load_wide(from + start + lanes) : zero();
            factors[start / int8_group] = quantise_group(low, high, values + start);
        }
    }
}

DigitRows operand(const Digits& digits) {
    return {digits.values, digits.factors, digits.stride, digits.factor_stride};
}

void linear_int8(const Panels& weights, const Digits& x, float* y, std::size_t y_stride) {
    linear_panels<Int8>(weights, x.count, operand(x), y, y_stride);
}

template <class D>
void gated_int8(const Panels& gate, const Panels& up, const Digits& x, void* y, std::size_t y_stride) {
    gated_panels<Int8, D>(gate, up, x.count, operand(x), y, y_stride);
}

}  // namespace
