// Element-wise sums over ranks, in rank order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace dynamictp::shm {

enum class DType : std::uint8_t { fp32 = 0, bf16 = 1 };

std::size_t element_bytes(DType dtype) noexcept;

// out[i] = ((source0[i] + source1[i]) + source2[i]) + …, accumulated in fp32 and rounded once. Every rank runs the same
// additions in the same order, so every rank gets the same bits. `sources` may not overlap `out`.
void sum_in_order(std::span<const std::byte* const> sources, std::byte* out, std::size_t count, DType dtype) noexcept;

}  // namespace dynamictp::shm
