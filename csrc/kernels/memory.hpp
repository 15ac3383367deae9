// Scratch of a rank. Never the heap's: what a closed domain leaves must be the system's again, and the heap keeps pages.
#pragma once

#include <cstddef>
#include <memory>

namespace dynamictp::kernels {

struct Unmap {
    std::size_t size = 0;
    void operator()(std::byte* memory) const noexcept;
};
using Memory = std::unique_ptr<std::byte[], Unmap>;

// Whole pages that are there already: no step waits for the system to find one. Throws std::bad_alloc.
Memory allocate(std::size_t bytes);

}  // namespace dynamictp::kernels
