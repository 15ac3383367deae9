#include "shm/reduce.hpp"

#include <algorithm>
#include <array>
#include <bit>

namespace dynamictp::shm {

namespace {
constexpr std::size_t block = 1024;  // elements: the fp32 accumulators stay in the first-level cache

float widen(std::uint16_t value) noexcept { return std::bit_cast<float>(std::uint32_t{value} << 16); }

// Round to nearest even; a NaN stays a NaN (its payload may sit only in the bits that are cut off).
std::uint16_t narrow(float value) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>(bits >> 16 | 0x40U);
    return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

void sum_fp32(std::span<const std::byte* const> sources, float* out, std::size_t start, std::size_t count) noexcept {
    const float* first = reinterpret_cast<const float*>(sources[0]) + start;
    std::copy_n(first, count, out);
    for (const std::byte* source : sources.subspan(1)) {
        const float* addend = reinterpret_cast<const float*>(source) + start;
        for (std::size_t i = 0; i < count; ++i) out[i] += addend[i];
    }
}

void sum_bf16(std::span<const std::byte* const> sources, std::uint16_t* out, std::size_t start,
              std::size_t count) noexcept {
    std::array<float, block> sum;
    const auto* first = reinterpret_cast<const std::uint16_t*>(sources[0]) + start;
    for (std::size_t i = 0; i < count; ++i) sum[i] = widen(first[i]);
    for (const std::byte* source : sources.subspan(1)) {
        const auto* addend = reinterpret_cast<const std::uint16_t*>(source) + start;
        for (std::size_t i = 0; i < count; ++i) sum[i] += widen(addend[i]);
    }
    for (std::size_t i = 0; i < count; ++i) out[i] = narrow(sum[i]);
}
}  // namespace

std::size_t element_bytes(DType dtype) noexcept { return dtype == DType::fp32 ? 4 : 2; }

void sum_in_order(std::span<const std::byte* const> sources, std::byte* out, std::size_t count, DType dtype) noexcept {
    for (std::size_t start = 0; start < count; start += block) {
        const std::size_t length = std::min(block, count - start);
        if (dtype == DType::fp32) {
            sum_fp32(sources, reinterpret_cast<float*>(out) + start, start, length);
        } else {
            sum_bf16(sources, reinterpret_cast<std::uint16_t*>(out) + start, start, length);
        }
    }
}

}  // namespace dynamictp::shm
