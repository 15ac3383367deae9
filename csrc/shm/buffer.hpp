// A Python object's writable memory, held for as long as native code points into it.
#pragma once

#include <Python.h>

#include <cstddef>

namespace dynamictp::shm {

// Holds the buffer export of `object`, so that an mmap can't be closed under a native view.
// Construction, release and destruction need the GIL.
class Buffer {
public:
    // Throws std::invalid_argument unless `object` exports writable contiguous memory.
    explicit Buffer(PyObject* object);
    ~Buffer() { release(); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    // `bytes` of memory from `offset`, aligned to a cache line; throws std::invalid_argument otherwise.
    std::byte* at(std::size_t offset, std::size_t bytes) const;
    void release() noexcept;

private:
    Py_buffer view_{};
};

}  // namespace dynamictp::shm
