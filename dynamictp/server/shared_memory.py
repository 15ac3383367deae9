"""Anonymous shared memory (memfd): no name that could leak, freed with the last process that maps it."""

from __future__ import annotations

import mmap
import os

from dynamictp.errors import ResourceError


class SharedMemory:
    """One memfd of a fixed size. Owned by the supervisor, which passes the descriptor to its children."""

    def __init__(self, name: str, size: int) -> None:
        """Raises `ResourceError`. Pages take memory only once touched."""
        self.size = size
        try:
            self.fd = os.memfd_create(f"dynamictp-{name}", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, max(size, mmap.PAGESIZE))
        except OSError as error:
            raise ResourceError(f"can't create {size} bytes of shared memory: {error.strerror}") from error

    def map(self) -> mmap.mmap:
        """A read-write mapping in this process."""
        return mmap.mmap(self.fd, max(self.size, mmap.PAGESIZE))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
