#include "shm/buffer.hpp"

#include <cstdint>
#include <stdexcept>
#include <string>

#include "shm/control.hpp"

namespace dynamictp::shm {

Buffer::Buffer(PyObject* object) {
    if (PyObject_GetBuffer(object, &view_, PyBUF_WRITABLE) != 0) {
        PyErr_Clear();
        throw std::invalid_argument("expected a writable contiguous buffer, such as a shared mmap");
    }
}

std::byte* Buffer::at(std::size_t offset, std::size_t bytes) const {
    const auto length = static_cast<std::size_t>(view_.len);
    if (offset > length || bytes > length - offset) {
        throw std::invalid_argument("the buffer has " + std::to_string(length) + " bytes, " + std::to_string(bytes) +
                                    " from offset " + std::to_string(offset) + " are needed");
    }
    std::byte* const start = static_cast<std::byte*>(view_.buf) + offset;
    if (reinterpret_cast<std::uintptr_t>(start) % cache_line != 0) {
        throw std::invalid_argument("shared memory must start on a 64-byte boundary");
    }
    return start;
}

void Buffer::release() noexcept {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
}

}  // namespace dynamictp::shm
