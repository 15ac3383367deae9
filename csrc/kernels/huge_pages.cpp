#include "kernels/huge_pages.hpp"

#include <sys/mman.h>

#include <cstdint>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace dynamictp::kernels {

namespace {
constexpr std::uintptr_t huge = std::uintptr_t{2} << 20;

std::uintptr_t round_up(std::uintptr_t value) noexcept { return (value + huge - 1) / huge * huge; }
}  // namespace

void* map_aligned(int descriptor, std::size_t size, bool writable) noexcept {
    // Reserve enough to hold an aligned range, map over it, and give the ends back.
    const std::size_t reserved = size + huge;
    void* const reservation = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reservation == MAP_FAILED) return nullptr;
    const auto begin = reinterpret_cast<std::uintptr_t>(reservation), first = round_up(begin);
    const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
    void* const mapped =
        mmap(reinterpret_cast<void*>(first), size, protection, MAP_SHARED | MAP_FIXED, descriptor, 0);
    if (mapped == MAP_FAILED) {
        munmap(reservation, reserved);
        return nullptr;
    }
    constexpr std::uintptr_t page = 4096;
    const std::uintptr_t end = (first + size + page - 1) / page * page;
    if (first > begin) munmap(reservation, first - begin);
    if (end < begin + reserved) munmap(reinterpret_cast<void*>(end), begin + reserved - end);
    return mapped;
}

void unmap(void* address, std::size_t size) noexcept { munmap(address, size); }

std::size_t collapse_pages(void* address, std::size_t size) noexcept {
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    const std::uintptr_t last = (begin + size) / huge * huge;
    std::size_t collapsed = 0;
    // One at a time: a single range that can't be collapsed would end the call for all that follow it.
    for (std::uintptr_t page = round_up(begin); page < last; page += huge) {
        int result = -1;
        // Another process may be at the same page; when it is done, this one only maps what that made.
        for (int attempt = 0; attempt < 3 && result != 0; ++attempt) {
            result = madvise(reinterpret_cast<void*>(page), huge, MADV_COLLAPSE);
        }
        if (result == 0) collapsed += huge;
    }
    return collapsed;
}

}  // namespace dynamictp::kernels
