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
    static F16 load_wide(const Element* from) { return load_bf16(from); }
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
    static F16 load_wide(const Element* from) { return load(from); }
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

// Activations in the weights' dtype, read row by row.
template <class D>
struct PlainRows {
    const typename D::Element* values;
    std::size_t stride;

    PlainRows from(std::size_t row) const { return {values + row * stride, stride}; }
};

// Weights in the activations' dtype.
template <class D>
struct Plain {
    using Operand = PlainRows<D>;
    static constexpr std::size_t group = 3;             // panels that meet a block of rows before the next are read
    static constexpr std::size_t prefetching_rows = 5;  // a single tile of so many prefetches its own next panels

    static constexpr std::size_t panel_bytes(std::size_t columns) { return columns * lanes * sizeof(typename D::Element); }
    // Panels side by side that suit a tile of so many rows: few want one linear stream of weights, many want chains.
    static constexpr int panels_per_tile(int rows) {
        const int wanted = rows <= 4 ? 1 : rows <= 7 ? 2 : 3;
        const int fitting = max_accumulators / rows;
        return fitting < 1 ? 1 : wanted < fitting ? wanted : fitting;
    }

    // Accumulates R rows of x with P panels side by side: sums[p][r]. Each sum is one chain over K in order. Beside it, A
    // of the panels are prefetched `ahead` bytes further.
    template <int R, int P, int A>
    static inline __attribute__((always_inline)) void accumulate(const char* const (&panel)[P], std::size_t columns,
                                                                 std::size_t ahead, Operand x, F16 (&sums)[P][R]) {
        const typename D::Element* elements[P];
        for (int p = 0; p < P; ++p) {
            elements[p] = reinterpret_cast<const typename D::Element*>(panel[p]);
            for (int r = 0; r < R; ++r) sums[p][r] = zero();
        }
// A loop of few chains is bound by its own overhead unless unrolled; one of many would only grow.
#pragma GCC unroll 4
        for (std::size_t k = 0; k < columns; k += D::step) {
            typename D::Weights weights[P];
            for (int p = 0; p < P; ++p) weights[p] = D::load_weights(elements[p] + k * lanes);
            for (int p = 0; p < A; ++p) {
                __builtin_prefetch(reinterpret_cast<const char*>(elements[p] + k * lanes) + ahead, 0, 2);
            }
            for (int r = 0; r < R; ++r) {
                const typename D::Weights value = D::broadcast(x.values + r * x.stride + k);
                for (int p = 0; p < P; ++p) sums[p][r] = D::multiply_add(sums[p][r], weights[p], value);
            }
        }
    }
};

template <class W, int R, int P, int A>
void linear_tile(const Panels& weights, std::size_t first, std::size_t ahead, typename W::Operand x, float* y,
                 std::size_t y_stride) {
    const std::size_t bytes = W::panel_bytes(weights.columns);
    const char* panel[P];
    for (int p = 0; p < P; ++p) panel[p] = static_cast<const char*>(weights.data) + (first + p) * bytes;
    F16 sums[P][R];
    W::template accumulate<R, P, A>(panel, weights.columns, ahead * bytes, x, sums);
    for (int p = 0; p < P; ++p) {
        const F16 bias = weights.bias == nullptr ? zero() : load(weights.bias + (first + p) * lanes);
        for (int r = 0; r < R; ++r) store(y + r * y_stride + (first + p) * lanes, add(sums[p][r], bias));
    }
}

template <class W, class D, int R, int A>
void gated_tile(const Panels& gate, const Panels& up, std::size_t first, typename W::Operand x, typename D::Element* y,
                std::size_t y_stride) {
    const std::size_t bytes = W::panel_bytes(gate.columns);
    const char* const panel[2] = {static_cast<const char*>(gate.data) + first * bytes,
                                  static_cast<const char*>(up.data) + first * bytes};
    F16 sums[2][R];
    W::template accumulate<R, 2, A>(panel, gate.columns, bytes, x, sums);
    const F16 gate_bias = gate.bias == nullptr ? zero() : load(gate.bias + first * lanes);
    const F16 up_bias = up.bias == nullptr ? zero() : load(up.bias + first * lanes);
    for (int r = 0; r < R; ++r) {
        const F16 value = mul(silu(add(sums[0][r], gate_bias)), add(sums[1][r], up_bias));
        D::store_rounded(y + r * y_stride + first * lanes, value);
    }
}

template <class W, int R, bool Ahead>
void linear_rows(const Panels& weights, std::size_t first, std::size_t count, std::size_t ahead, typename W::Operand x,
                 float* y, std::size_t y_stride) {
    constexpr int group = W::panels_per_tile(R);
    std::size_t done = 0;
    for (; done + group <= count; done += group) {
        linear_tile<W, R, group, Ahead ? group : 0>(weights, first + done, ahead, x, y, y_stride);
    }
    for (; done < count; ++done) linear_tile<W, R, 1, 0>(weights, first + done, 0, x, y, y_stride);
}

template <class W, class D, int R, bool Ahead>
void gated_rows(const Panels& gate, const Panels& up, std::size_t first, std::size_t count, typename W::Operand x,
                typename D::Element* y, std::size_t y_stride) {
    for (std::size_t p = first; p < first + count; ++p) {
        gated_tile<W, D, R, Ahead ? 2 : 0>(gate, up, p, x, y, y_stride);
    }
}

// Calls tile(height, row, panel, panels, ahead) so that a group of panels meets a block of rows that stays in the
// second-level cache, and is read from memory once a block. Heights of the tiles differ by at most one.
//
// `ahead` is the distance in panels at which a tile prefetches weights, or 0. The first tile of a group waits for memory
// and the others only compute, so the last one prefetches the next group. A single tile prefetches its own next panels
// when it is high enough to be held up by several streams; a lower one is faster left to the hardware (measured).
template <class W, class Tile>
inline void for_each_tile(std::size_t rows, std::size_t panels, std::size_t group, const Tile& tile) {
    constexpr std::size_t block = 128;
    for (std::size_t start = 0; start < rows; start += block) {
        const std::size_t size = rows - start < block ? rows - start : block;
        const std::size_t tiles = (size + max_tile_rows - 1) / max_tile_rows;
        if (tiles == 1) {
            const std::size_t ahead = size < W::prefetching_rows ? 0 : static_cast<std::size_t>(W::panels_per_tile(static_cast<int>(size)));
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
template <class W, class Call>
inline void for_each_tile_of(std::size_t rows, std::size_t panels, std::size_t group, const Call& call) {
    for_each_tile<W>(rows, panels, group,
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

template <class W>
void linear_panels(const Panels& weights, std::size_t rows, typename W::Operand x, float* y, std::size_t y_stride) {
    for_each_tile_of<W>(rows, weights.count, W::group,
                        [&]<int R, bool Ahead>(std::size_t row, std::size_t panel, std::size_t count, std::size_t ahead) {
                            linear_rows<W, R, Ahead>(weights, panel, count, ahead, x.from(row), y + row * y_stride,
                                                     y_stride);
                        });
}

template <class W, class D>
void gated_panels(const Panels& gate, const Panels& up, std::size_t rows, typename W::Operand x, void* out,
                  std::size_t y_stride) {
    auto* const y = static_cast<typename D::Element*>(out);
    for_each_tile_of<W>(rows, gate.count, 1,
                        [&]<int R, bool Ahead>(std::size_t row, std::size_t panel, std::size_t count, std::size_t) {
                            gated_rows<W, D, R, Ahead>(gate, up, panel, count, x.from(row), y + row * y_stride, y_stride);
                        });
}

template <class D>
PlainRows<D> operand(const Rows& rows) {
    return {static_cast<const typename D::Element*>(rows.data), rows.stride};
}

template <class D>
void linear(const Panels& weights, const Rows& x, float* y, std::size_t y_stride) {
    linear_panels<Plain<D>>(weights, x.count, operand<D>(x), y, y_stride);
}

template <class D>
void gated(const Panels& gate, const Panels& up, const Rows& x, void* y, std::size_t y_stride) {
    gated_panels<Plain<D>, D>(gate, up, x.count, operand<D>(x), y, y_stride);
}

}  // namespace
