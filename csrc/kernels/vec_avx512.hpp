// Sixteen fp32 lanes in one AVX-512 register. Included by the two AVX-512 levels only.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

namespace {

using F16 = __m512;
using Pairs = __m512i;  // sixteen pairs of bf16

inline F16 zero() { return _mm512_setzero_ps(); }
inline F16 set1(float value) { return _mm512_set1_ps(value); }
inline F16 load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, F16 value) { _mm512_storeu_ps(to, value); }
inline F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
inline F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
inline F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
inline F16 div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
inline F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
inline F16 max(F16 a, F16 b) { return _mm512_max_ps(a, b); }
inline F16 min(F16 a, F16 b) { return _mm512_min_ps(a, b); }
inline F16 round_even(F16 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// `value` × 2^`exponent` for integral exponents in [-126, 127].
inline F16 scale_by_power(F16 value, F16 exponent) { return _mm512_scalef_ps(value, exponent); }

// `value` in the first `count` lanes, `other` beyond.
inline F16 keep_first(F16 value, std::size_t count, F16 other) {
    const __mmask16 mask = count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1);
    return _mm512_mask_blend_ps(mask, other, value);
}

inline Pairs load_pairs(const std::uint16_t* from) { return _mm512_loadu_si512(from); }
inline Pairs set1_pair(const std::uint16_t* from) {
    int pair;
    __builtin_memcpy(&pair, from, sizeof pair);
    return _mm512_set1_epi32(pair);
}
inline Pairs first_of_pairs(Pairs value) { return _mm512_and_si512(value, _mm512_set1_epi32(0xffff)); }

#ifdef __AVX512BF16__
inline F16 dot(F16 sum, Pairs a, Pairs b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
inline void store_bf16(std::uint16_t* to, F16 value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)));
}
#else
inline F16 dot(F16 sum, Pairs a, Pairs b) {
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    sum = fma(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sum);
    return fma(_mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
}
// Rounds to nearest even; infinities and default NaNs stay.
inline void store_bf16(std::uint16_t* to, F16 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif

inline F16 load_bf16(const std::uint16_t* from) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

using Ints = __m512i;  // sixteen 32-bit sums

inline Ints no_ints() { return _mm512_setzero_si512(); }
// Sixteen pairs of 8-bit integers as pairs of 16 bits.
inline Pairs widen_pairs(const std::int8_t* from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Pairs set1_pair(const std::int16_t* from) {
    int pair;
    __builtin_memcpy(&pair, from, sizeof pair);
    return _mm512_set1_epi32(pair);
}
inline Ints dot_ints(Ints sum, Pairs a, Pairs b) {
#ifdef __AVX512VNNI__
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
inline F16 to_float(Ints value) { return _mm512_cvtepi32_ps(value); }
inline F16 load_half(const std::uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
// max |a|, |b| of all lanes; NaN when there is one, which compares as the largest integer.
inline float largest_magnitude(F16 a, F16 b) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i left = _mm512_and_si512(_mm512_castps_si512(a), magnitude);
    const __m512i right = _mm512_and_si512(_mm512_castps_si512(b), magnitude);
    const int bits = _mm512_reduce_max_epi32(_mm512_max_epi32(left, right));
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
// Rounds to nearest even; values lie in the range of 16 bits.
inline void store_int16(std::int16_t* to, F16 value) {
    const __m256i narrow = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(value));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow);
}

// Two halves of the lanes, four times: a fixed tree.
inline float sum_lanes(F16 value) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps(value, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
inline float max_lanes(F16 value) { return _mm512_reduce_max_ps(value); }

// Adds neighbours of the 32 values (a, b): lane i is value 2i + value 2i+1.
inline F16 add_neighbours(F16 a, F16 b) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    return add(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
}
inline F16 set1_pair(const float* from) {
    double pair;
    __builtin_memcpy(&pair, from, sizeof pair);
    return _mm512_castpd_ps(_mm512_set1_pd(pair));
}
inline F16 even_lanes(F16 value) { return _mm512_maskz_mov_ps(0x5555, value); }

constexpr int max_tile_rows = 8;
constexpr int max_accumulators = 24;
constexpr int max_int8_accumulators = 12;  // each an integer and an fp32 sum

}  // namespace
