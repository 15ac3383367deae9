// Sixteen fp32 lanes in two AVX2 registers. Included by the AVX2 level only.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace {

struct F16 {
    __m256 low, high;
};
struct Pairs {  // sixteen pairs of bf16
    __m256i low, high;
};

inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 set1(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline F16 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, F16 value) {
    _mm256_storeu_ps(to, value.low);
    _mm256_storeu_ps(to + 8, value.high);
}
inline F16 add(F16 a, F16 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline F16 sub(F16 a, F16 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline F16 mul(F16 a, F16 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline F16 div(F16 a, F16 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline F16 fma(F16 a, F16 b, F16 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline F16 round_even(F16 a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.low, mode), _mm256_round_ps(a.high, mode)};
}

inline __m256 power_of_two(__m256 exponent) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
// `value` × 2^`exponent` for integral exponents in [-126, 127].
inline F16 scale_by_power(F16 value, F16 exponent) {
    return mul(value, {power_of_two(exponent.low), power_of_two(exponent.high)});
}

// `value` in the first `count` lanes, `other` beyond.
inline F16 keep_first(F16 value, std::size_t count, F16 other) {
    const __m256i limit = _mm256_set1_epi32(static_cast<int>(count < 16 ? count : 16));
    const __m256i low = _mm256_cmpgt_epi32(limit, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i high = _mm256_cmpgt_epi32(limit, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
    return {_mm256_blendv_ps(other.low, value.low, _mm256_castsi256_ps(low)),
            _mm256_blendv_ps(other.high, value.high, _mm256_castsi256_ps(high))};
}

inline Pairs load_pairs(const std::uint16_t* from) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 16))};
}
inline Pairs set1_pair(const std::uint16_t* from) {
    int pair;
    __builtin_memcpy(&pair, from, sizeof pair);
    return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
inline Pairs first_of_pairs(Pairs value) {
    const __m256i mask = _mm256_set1_epi32(0xffff);
    return {_mm256_and_si256(value.low, mask), _mm256_and_si256(value.high, mask)};
}
inline __m256 first_as_float(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 second_as_float(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
inline F16 dot(F16 sum, Pairs a, Pairs b) {
    sum = fma({first_as_float(a.low), first_as_float(a.high)}, {first_as_float(b.low), first_as_float(b.high)}, sum);
    return fma({second_as_float(a.low), second_as_float(a.high)}, {second_as_float(b.low), second_as_float(b.high)},
               sum);
}

inline __m256i round_to_bf16(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}
// Rounds to nearest even; infinities and default NaNs stay.
inline void store_bf16(std::uint16_t* to, F16 value) {
    // The pack works on 128-bit halves: put the four quarters back in order.
    const __m256i packed = _mm256_packus_epi32(round_to_bf16(value.low), round_to_bf16(value.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
}

inline __m256 widen_bf16(__m128i values) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16));
}
inline F16 load_bf16(const std::uint16_t* from) {
    const auto* const halves = reinterpret_cast<const __m128i*>(from);
    return {widen_bf16(_mm_loadu_si128(halves)), widen_bf16(_mm_loadu_si128(halves + 1))};
}

using Ints = Pairs;  // sixteen 32-bit sums

inline Ints no_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
// Sixteen pairs of 8-bit integers as pairs of 16 bits.
inline Pairs widen_pairs(const std::int8_t* from) {
    const auto* const halves = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(halves)), _mm256_cvtepi8_epi16(_mm_loadu_si128(halves + 1))};
}
inline Pairs set1_pair(const std::int16_t* from) {
    int pair;
    __builtin_memcpy(&pair, from, sizeof pair);
    return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
inline Ints dot_ints(Ints sum, Pairs a, Pairs b) {
    return {_mm256_add_epi32(sum.low, _mm256_madd_epi16(a.low, b.low)),
            _mm256_add_epi32(sum.high, _mm256_madd_epi16(a.high, b.high))};
}
inline F16 to_float(Ints value) { return {_mm256_cvtepi32_ps(value.low), _mm256_cvtepi32_ps(value.high)}; }
// fp16 without infinities: exponent and mantissa in the places of fp32, then the difference of the two biases.
inline __m256 widen_half(__m128i values) {
    const __m256i wide = _mm256_cvtepu16_epi32(values);
    const __m256i magnitude = _mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(0x7fff)), 13);
    const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(wide, _mm256_set1_epi32(0x8000)), 16);
    const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1p112f));
    return _mm256_or_ps(value, _mm256_castsi256_ps(sign));
}
inline F16 load_half(const std::uint16_t* from) {
    const auto* const halves = reinterpret_cast<const __m128i*>(from);
    return {widen_half(_mm_loadu_si128(halves)), widen_half(_mm_loadu_si128(halves + 1))};
}
inline __m256i magnitude_bits(F16 value) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    return _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(value.low), mask),
                            _mm256_and_si256(_mm256_castps_si256(value.high), mask));
}
// max |a|, |b| of all lanes; NaN when there is one, which compares as the largest integer.
inline float largest_magnitude(F16 a, F16 b) {
    const __m256i eight = _mm256_max_epi32(magnitude_bits(a), magnitude_bits(b));
    const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    const int bits = _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
// Rounds to nearest even; values lie in the range of 16 bits.
inline void store_int16(std::int16_t* to, F16 value) {
    // The pack works on 128-bit halves: put the four quarters back in order.
    const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(value.low), _mm256_cvtps_epi32(value.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
}

// Two halves of the lanes, four times: a fixed tree.
inline float sum_lanes(F16 value) {
    const __m256 eight = _mm256_add_ps(value.low, value.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float max_lanes(F16 value) {
    const __m256 eight = _mm256_max_ps(value.low, value.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

inline __m256 add_neighbours(__m256 a, __m256 b) {
    const __m256 sums = _mm256_hadd_ps(a, b);  // a0 a1 b0 b1 | a2 a3 b2 b3
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums), 0xd8));
}
// Adds neighbours of the 32 values (a, b): lane i is value 2i + value 2i+1.
inline F16 add_neighbours(F16 a, F16 b) { return {add_neighbours(a.low, a.high), add_neighbours(b.low, b.high)}; }
inline F16 set1_pair(const float* from) {
    double pair;
    __builtin_memcpy(&pair, from, sizeof pair);
    const __m256 both = _mm256_castpd_ps(_mm256_set1_pd(pair));
    return {both, both};
}
inline F16 even_lanes(F16 value) {
    return {_mm256_blend_ps(value.low, _mm256_setzero_ps(), 0xaa), _mm256_blend_ps(value.high, _mm256_setzero_ps(), 0xaa)};
}

constexpr int max_tile_rows = 4;
constexpr int max_accumulators = 4;
constexpr int max_int8_accumulators = 2;

}  // namespace
