// Linear layers over packed panels. Included by each level after its vector type.

namespace {

using dynamictp::kernels::Panels;
using dynamictp::kernels::Rows;

// How a dtype is multiplied. `Step` columns at a time give one chain of fused products per lane.
struct Bf16 {
    using Element = std::uint16_t;
    using Weights = Pairs;
    static constexpr std::size_t step = 2;
    static Weights load_weights(const Element* from) { return load_pairs(from); }
    static Weights broadcast(const Element* from) { return set1_pair(from); }
    static F16 multiply_add(F16 sum, Weights a, Weights b) { return dot(sum, a, b); }
    static void store_rounded(Element* to, F16 value) { store_bf16(to, value); }
    static float widen(Element value) {
        const std::uint32_t bits = std::uint32_t{value} << 16;
        float wide;
        __builtin_memcpy(&wide, &bits, sizeof wide);
        return wide;
    }
    static Element narrow(float value) {
        std::uint32_t bits;
        __builtin_memcpy(&bits, &value, sizeof bits);
        return static_cast<Element>((bits + ((bits >> 16 & 1) + 0x7fff)) >> 16);
    }
};

struct Fp32 {
    using Element = float;
    using Weights = F16;
    static constexpr std::size_t step = 1;
    static Weights load_weights(const Element* from) { return load(from); }
    static Weights broadcast(const Element* from) { return set1(*from); }
    static F16 multiply_add(F16 sum, Weights a, Weights b) { return fma(a, b, sum); }
    static void store_rounded(Element* to, F16 value) { store(to, value); }
    static float widen(Element value) { return value; }
    static Element narrow(float value) { return value; }
};

constexpr std::size_t lanes = 16;
constexpr float log2_e = 1.44269504088896341f;

// 2^x for x in [-126, 126], relative error below 3e-7 (minimax polynomial of 2^f on [-0.5, 0.5]).
inline F16 power_of_two(F16 x) {
    x = max(min(x, set1(126.0f)), set1(-126.0f));
    const F16 whole = round_even(x);
    const F16 f = sub(x, whole);
    F16 p = set1(1.5403530e-4f);
    p = fma(p, f, set1(1.3333558e-3f));
    p = fma(p, f, set1(9.6181291e-3f));
    p = fma(p, f, set1(5.5504109e-2f));
    p = fma(p, f, set1(2.4022651e-1f));
    p = fma(p, f, set1(6.9314718e-1f));
    p = fma(p, f, set1(1.0f));
    return scale_by_power(p, whole);
}

inline F16 silu(F16 x) {
    return div(x, add(set1(1.0f), power_of_two(mul(x, set1(-log2_e)))));
}

// Accumulates R rows of x with P panels side by side: sums[p][r]. Each sum is one chain over K in order. Beside it, A of
// the panels are prefetched `ahead` elements further.
template <class D, int R, int P, int A>
inline __attribute__((always_inline)) void accumulate(const typename D::Element* const (&panel)[P],
                                                      std::size_t columns, std::size_t ahead,
                                                      const typename D::Element* x, std::size_t x_stride,
                                                      F16 (&sums)[P][R]) {
    for (int p = 0; p < P; ++p) {
        for (int r = 0; r < R; ++r) sums[p][r] = zero();
    }
// A loop of few chains is bound by its own overhead unless unrolled; one of many would only grow.
#pragma GCC unroll 4
    for (std::size_t k = 0; k < columns; k += D::step) {
        typename D::Weights weights[P];
        for (int p = 0; p < P; ++p) weights[p] = D::load_weights(panel[p] + k * lanes);
        for (int p = 0; p < A; ++p) __builtin_prefetch(panel[p] + k * lanes + ahead, 0, 2);
        for (int r = 0; r < R; ++r) {
            const typename D::Weights value = D::broadcast(x + r * x_stride + k);
            for (int p = 0; p < P; ++p) sums[p][r] = D::multiply_add(sums[p][r], weights[p], value);
        }
    }
}

template <class D, int R, int P, int A>
void linear_tile(const Panels& weights, std::size_t first, std::size_t ahead, const typename D::Element* x,
                 std::size_t x_stride, float* y, std::size_t y_stride) {
    const std::size_t panel_elements = weights.columns * lanes;
    const typename D::Element* panel[P];
    for (int p = 0; p < P; ++p) {
        panel[p] = static_cast<const typename D::Element*>(weights.data) + (first + p) * panel_elements;
    }
    F16 sums[P][R];
    accumulate<D, R, P, A>(panel, weights.columns, ahead * panel_elements, x, x_stride, sums);
    for (int p = 0; p < P; ++p) {
        const F16 bias = weights.bias == nullptr ? zero() : load(weights.bias + (first + p) * lanes);
        for (int r = 0; r < R; ++r) store(y + r * y_stride + (first + p) * lanes, add(sums[p][r], bias));
    }
}

template <class D, int R, int A>
void gated_tile(const Panels& gate, const Panels& up, std::size_t first, const typename D::Element* x,
                std::size_t x_stride, typename D::Element* y, std::size_t y_stride) {
    const std::size_t panel_elements = gate.columns * lanes, offset = first * panel_elements;
    const typename D::Element* const panel[2] = {static_cast<const typename D::Element*>(gate.data) + offset,
                                                 static_cast<const typename D::Element*>(up.data) + offset};
    F16 sums[2][R];
    accumulate<D, R, 2, A>(panel, gate.columns, panel_elements, x, x_stride, sums);
    const F16 gate_bias = gate.bias == nullptr ? zero() : load(gate.bias + first * lanes);
    const F16 up_bias = up.bias == nullptr ? zero() : load(up.bias + first * lanes);
    for (int r = 0; r < R; ++r) {
        const F16 value = mul(silu(add(sums[0][r], gate_bias)), add(sums[1][r], up_bias));
        D::store_rounded(y + r * y_stride + first * lanes, value);
    }
}

// Panels side by side that suit a tile of so many rows: few want one linear stream of weights, many want chains.
constexpr int panels_per_tile(int rows) {
    const int wanted = rows <= 4 ? 1 : rows <= 7 ? 2 : 3;
    const int fitting = max_accumulators / rows;
    return fitting < 1 ? 1 : wanted < fitting ? wanted : fitting;
}

template <class D, int R, bool Ahead>
void linear_rows(const Panels& weights, std::size_t first, std::size_t count, std::size_t ahead,
                 const typename D::Element* x, std::size_t x_stride, float* y, std::size_t y_stride) {
    constexpr int group = panels_per_tile(R);
    std::size_t done = 0;
    for (; done + group <= count; done += group) {
        linear_tile<D, R, group, Ahead ? group : 0>(weights, first + done, ahead, x, x_stride, y, y_stride);
    }
    for (; done < count; ++done) linear_tile<D, R, 1, 0>(weights, first + done, 0, x, x_stride, y, y_stride);
}

template <class D, int R, bool Ahead>
void gated_rows(const Panels& gate, const Panels& up, std::size_t first, std::size_t count,
                const typename D::Element* x, std::size_t x_stride, typename D::Element* y, std::size_t y_stride) {
    for (std::size_t p = first; p < first + count; ++p) {
        gated_tile<D, R, Ahead ? 2 : 0>(gate, up, p, x, x_stride, y, y_stride);
    }
}

// Calls tile(height, row, panel, panels, ahead) so that a group of panels meets a block of rows that stays in the
// second-level cache, and is read from memory once a block. Heights of the tiles differ by at most one.
//
// `ahead` is the distance in panels at which a tile prefetches weights, or 0. The first tile of a group waits for memory
// and the others only compute, so the last one prefetches the next group. A single tile prefetches its own next panels
// when it is high enough to be held up by several streams; a lower one is faster left to the hardware (measured).
template <class Tile>
inline void for_each_tile(std::size_t rows, std::size_t panels, std::size_t group, const Tile& tile) {
    constexpr std::size_t block = 128, high = 5;
    for (std::size_t start = 0; start < rows; start += block) {
        const std::size_t size = rows - start < block ? rows - start : block;
        const std::size_t tiles = (size + max_tile_rows - 1) / max_tile_rows;
        if (tiles == 1) {
            const std::size_t ahead = size < high ? 0 : static_cast<std::size_t>(panels_per_tile(static_cast<int>(size)));
            tile(size, start, std::size_t{0}, panels, ahead);
            continue;
        }
        for (std::size_t panel = 0; panel < panels; panel += group) {
            const std::size_t count = panels - panel < group ? panels - panel : group;
            for (std::size_t t = 0, row = start; t < tiles; ++t) {
                const std::size_t height = size / tiles + (t < size % tiles ? 1 : 0);
                tile(height, row, panel, count, t + 1 == tiles ? count : 0);
                row += height;
            }
        }
    }
}

// Runs `call` of a tile's height, which is a constant there.
#define FOR_HEIGHT(R)                                                                                        \
    case R:                                                                                                  \
        if constexpr (R <= max_tile_rows) {                                                                  \
            if (ahead > 0) {                                                                                 \
                call.template operator()<R, true>(row, panel, count, ahead);                                 \
            } else {                                                                                         \
                call.template operator()<R, false>(row, panel, count, ahead);                                \
            }                                                                                                \
        }                                                                                                    \
        break;
template <class Call>
inline void for_each_tile_of(std::size_t rows, std::size_t panels, std::size_t group, const Call& call) {
    for_each_tile(rows, panels, group,
                  [&](std::size_t height, std::size_t row, std::size_t panel, std::size_t count, std::size_t ahead) {
                      switch (height) {
                          FOR_HEIGHT(1)
                          FOR_HEIGHT(2)
                          FOR_HEIGHT(3)
                          FOR_HEIGHT(4)
                          FOR_HEIGHT(5)
                          FOR_HEIGHT(6)
                          FOR_HEIGHT(7)
                          FOR_HEIGHT(8)
                          default: __builtin_unreachable();
                      }
                  });
}
#undef FOR_HEIGHT

template <class D>
void linear(const Panels& weights, const Rows& rows, float* y, std::size_t y_stride) {
    const auto* const x = static_cast<const typename D::Element*>(rows.data);
    for_each_tile_of(rows.count, weights.count, 3,
                     [&]<int R, bool Ahead>(std::size_t row, std::size_t panel, std::size_t count, std::size_t ahead) {
                         linear_rows<D, R, Ahead>(weights, panel, count, ahead, x + row * rows.stride, rows.stride,
                                                  y + row * y_stride, y_stride);
                     });
}

template <class D>
void gated(const Panels& gate, const Panels& up, const Rows& rows, void* out, std::size_t y_stride) {
    const auto* const x = static_cast<const typename D::Element*>(rows.data);
    auto* const y = static_cast<typename D::Element*>(out);
    for_each_tile_of(rows.count, gate.count, 1,
                     [&]<int R, bool Ahead>(std::size_t row, std::size_t panel, std::size_t count, std::size_t) {
                         gated_rows<D, R, Ahead>(gate, up, panel, count, x + row * rows.stride, rows.stride,
                                                 y + row * y_stride, y_stride);
                     });
}

}  // namespace
