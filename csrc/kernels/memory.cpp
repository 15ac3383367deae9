#include "kernels/memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace dynamictp::kernels {

#ifdef __SANITIZE_ADDRESS__
// The heap is what it watches.
void Unmap::operator()(std::byte* memory) const noexcept { ::operator delete[](memory, std::align_val_t{64}); }

Memory allocate(std::size_t bytes) { return Memory(new (std::align_val_t{64}) std::byte[bytes], Unmap{bytes}); }
#else
void Unmap::operator()(std::byte* memory) const noexcept { munmap(memory, size); }

Memory allocate(std::size_t bytes) {
    const std::size_t size = std::max<std::size_t>(bytes, 64);
    void* const memory =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return Memory(static_cast<std::byte*>(memory), Unmap{size});
}
#endif

}  // namespace dynamictp::kernels
