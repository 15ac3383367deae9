"""What the leak check of the gate counts."""

from __future__ import annotations

import mmap
import os
from threading import Event, Thread

from dynamictp.testing.server_process import footprint_of


def test_a_mapping_of_shared_memory_its_descriptor_and_a_thread_are_counted() -> None:
    before = footprint_of(os.getpid())
    descriptor = os.memfd_create("leak")
    os.ftruncate(descriptor, 4096)
    done = Event()
    thread = Thread(target=done.wait)
    thread.start()
    try:
        with mmap.mmap(descriptor, 4096):
            after = footprint_of(os.getpid())
    finally:
        done.set()
        thread.join()
        os.close(descriptor)
    for name, more in (("mappings", 1), ("threads", 1)):
        assert after[name] == before[name] + more
    assert after["descriptors"] > before["descriptors"]


def test_private_memory_is_counted_in_bytes() -> None:
    before = footprint_of(os.getpid())
    with mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE) as private:
        private.write(b"x" * (8 << 20))
        after = footprint_of(os.getpid())
    assert after["anonymous_bytes"] - before["anonymous_bytes"] >= 7 << 20
    assert after["mappings"] == before["mappings"]
