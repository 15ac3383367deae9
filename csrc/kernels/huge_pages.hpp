#pragma once

#include <cstddef>

namespace dynamictp::kernels {

// Asks the kernel to put the whole huge pages of a mapping into huge pages now (Linux ≥ 6.1). Best effort: returns how
// many bytes it agreed to. One core reads fragmented small pages about a fifth slower.
std::size_t collapse_pages(void* address, std::size_t size) noexcept;

}  // namespace dynamictp::kernels
