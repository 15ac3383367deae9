// Sixteen fp32 lanes by the compiler's vector extension, for any processor. Included by the portable level only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace {

using F16 = float __attribute__((vector_size(64)));
using I16 = std::int32_t __attribute__((vector_size(64)));
using Pairs = std::uint32_t __attribute__((vector_size(64)));  // sixteen pairs of bf16, the first in the low half

inline F16 zero() { return F16{}; }
inline F16 set1(float value) { return value - F16{}; }
inline F16 load(const float* from) {
    F16 value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}
inline void store(float* to, F16 value) { __builtin_memcpy(to, &value, sizeof value); }
inline F16 add(F16 a, F16 b) { return a + b; }
inline F16 sub(F16 a, F16 b) { return a - b; }
inline F16 mul(F16 a, F16 b) { return a * b; }
inline F16 div(F16 a, F16 b) { return a / b; }
// Two roundings: not every processor has a fused one, and the same bits everywhere are worth more here.
inline F16 fma(F16 a, F16 b, F16 c) { return a * b + c; }
inline F16 max(F16 a, F16 b) { return a > b ? a : b; }
inline F16 min(F16 a, F16 b) { return a < b ? a : b; }
// Adding 1.5 × 2^23 leaves no fraction bits; for |a| < 2^22.
inline F16 round_even(F16 a) {
    const F16 magic = set1(12582912.0f);
    return (a + magic) - magic;
}

// `value` × 2^`exponent` for integral exponents in [-126, 127].
inline F16 scale_by_power(F16 value, F16 exponent) {
    const I16 bits = (__builtin_convertvector(exponent, I16) + 127) << 23;
    return value * reinterpret_cast<F16>(bits);
}

// `value` in the first `count` lanes, `other` beyond.
inline F16 keep_first(F16 value, std::size_t count, F16 other) {
    const I16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const I16 kept = lane < static_cast<std::int32_t>(count < 16 ? count : 16);
    return kept ? value : other;
}

inline Pairs load_pairs(const std::uint16_t* from) {
    Pairs value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}
inline Pairs set1_pair(const std::uint16_t* from) {
    std::uint32_t pair;
    __builtin_memcpy(&pair, from, sizeof pair);
    return pair - Pairs{};
}
inline Pairs first_of_pairs(Pairs value) { return value & 0xffffu; }
inline F16 first_as_float(Pairs value) { return reinterpret_cast<F16>(value << 16); }
inline F16 second_as_float(Pairs value) { return reinterpret_cast<F16>(value & 0xffff0000u); }
inline F16 dot(F16 sum, Pairs a, Pairs b) {
    sum = fma(first_as_float(a), first_as_float(b), sum);
    return fma(second_as_float(a), second_as_float(b), sum);
}
// Rounds to nearest even; infinities and default NaNs stay.
inline void store_bf16(std::uint16_t* to, F16 value) {
    const Pairs bits = reinterpret_cast<Pairs>(value);
    const Pairs rounded = (bits + ((bits >> 16 & 1u) + 0x7fffu)) >> 16;
    for (int lane = 0; lane < 16; ++lane) to[lane] = static_cast<std::uint16_t>(rounded[lane]);
}

inline F16 load_bf16(const std::uint16_t* from) {
    Pairs bits;
    for (int lane = 0; lane < 16; ++lane) bits[lane] = from[lane];
    return reinterpret_cast<F16>(bits << 16);
}

using Ints = I16;  // sixteen 32-bit sums

inline Ints no_ints() { return Ints{}; }
// Sixteen pairs of 8-bit integers as pairs of 16 bits.
inline Pairs widen_pairs(const std::int8_t* from) {
    Pairs pairs;
    for (int lane = 0; lane < 16; ++lane) {
        pairs[lane] = static_cast<std::uint32_t>(from[2 * lane] & 0xffff) |
                      static_cast<std::uint32_t>(from[2 * lane + 1]) << 16;
    }
    return pairs;
}
inline Pairs set1_pair(const std::int16_t* from) {
    std::uint32_t pair;
    __builtin_memcpy(&pair, from, sizeof pair);
    return pair - Pairs{};
}
// Of pairs of 16-bit integers, with their sign.
inline I16 first_as_int(Pairs value) { return reinterpret_cast<I16>(value << 16) >> 16; }
inline I16 second_as_int(Pairs value) { return reinterpret_cast<I16>(value) >> 16; }
inline Ints dot_ints(Ints sum, Pairs a, Pairs b) {
    return sum + first_as_int(a) * first_as_int(b) + second_as_int(a) * second_as_int(b);
}
inline F16 to_float(Ints value) { return __builtin_convertvector(value, F16); }
// fp16 without infinities: exponent and mantissa in the places of fp32, then the difference of the two biases.
inline F16 load_half(const std::uint16_t* from) {
    Pairs bits;
    for (int lane = 0; lane < 16; ++lane) bits[lane] = from[lane];
    const F16 magnitude = reinterpret_cast<F16>((bits & 0x7fffu) << 13) * 0x1p112f;
    return reinterpret_cast<F16>(reinterpret_cast<Pairs>(magnitude) | (bits & 0x8000u) << 16);
}
// max |a|, |b| of all lanes; NaN when there is one, which compares as the largest integer.
inline float largest_magnitude(F16 a, F16 b) {
    const Pairs left = reinterpret_cast<Pairs>(a) & 0x7fffffffu, right = reinterpret_cast<Pairs>(b) & 0x7fffffffu;
    const Pairs both = left > right ? left : right;
    std::uint32_t bits = both[0];
    for (int lane = 1; lane < 16; ++lane) bits = both[lane] > bits ? both[lane] : bits;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
// Rounds to nearest even; values lie in the range of 16 bits.
inline void store_int16(std::int16_t* to, F16 value) {
    const I16 whole = __builtin_convertvector(round_even(value), I16);
    for (int lane = 0; lane < 16; ++lane) to[lane] = static_cast<std::int16_t>(whole[lane]);
}

// Two halves of the lanes, four times: a fixed tree.
inline float sum_lanes(F16 value) {
    float lanes[16];
    store(lanes, value);
    for (int half = 8; half > 0; half /= 2) {
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    return lanes[0];
}
inline float max_lanes(F16 value) {
    float best = value[0];
    for (int lane = 1; lane < 16; ++lane) best = value[lane] > best ? value[lane] : best;
    return best;
}

// Adds neighbours of the 32 values (a, b): lane i is value 2i + value 2i+1.
inline F16 add_neighbours(F16 a, F16 b) {
    F16 sums;
    for (int lane = 0; lane < 8; ++lane) {
        sums[lane] = a[2 * lane] + a[2 * lane + 1];
        sums[lane + 8] = b[2 * lane] + b[2 * lane + 1];
    }
    return sums;
}
inline F16 set1_pair(const float* from) {
    F16 value;
    for (int lane = 0; lane < 16; ++lane) value[lane] = from[lane % 2];
    return value;
}
inline F16 even_lanes(F16 value) {
    for (int lane = 1; lane < 16; lane += 2) value[lane] = 0.0f;
    return value;
}

constexpr int max_tile_rows = 2;
constexpr int max_accumulators = 2;
constexpr int max_int8_accumulators = 2;

}  // namespace
