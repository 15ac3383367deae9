// Shared mappings that can lie in huge pages. One core reads fragmented small pages about a fifth slower.
#pragma once

#include <cstddef>

namespace dynamictp::kernels {

// Maps the first `size` bytes of a descriptor, shared, where huge pages can be: the address is a multiple of 2 MiB.
// Returns null with errno set on failure.
void* map_aligned(int descriptor, std::size_t size, bool writable) noexcept;
void unmap(void* address, std::size_t size) noexcept;

// Asks for huge pages under the whole huge pages of a mapping now (Linux ≥ 6.1), whatever the system's default. Best
// effort: returns how many bytes have them. Other processes that map the same memory aligned get them too.
std::size_t collapse_pages(void* address, std::size_t size) noexcept;

}  // namespace dynamictp::kernels
