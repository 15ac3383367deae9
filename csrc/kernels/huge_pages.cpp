#include "kernels/huge_pages.hpp"

#include <sys/mman.h>

#include <cstdint>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace dynamictp::kernels {

std::size_t collapse_pages(void* address, std::size_t size) noexcept {
    constexpr std::uintptr_t huge = std::uintptr_t{2} << 20;
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    const std::uintptr_t first = (begin + huge - 1) / huge * huge, last = (begin + size) / huge * huge;
    std::size_t collapsed = 0;
    // One at a time: a single range that can't be collapsed ends the call for all that follow it.
    for (std::uintptr_t page = first; page < last; page += huge) {
        if (madvise(reinterpret_cast<void*>(page), huge, MADV_COLLAPSE) == 0) collapsed += huge;
    }
    return collapsed;
}

}  // namespace dynamictp::kernels
