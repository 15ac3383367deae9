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
    assert after["threads"] == before["threads"] + 1
    assert [name for name in after if name not in before] == ["mappings of /memfd:leak (deleted)"]
    assert after["descriptors"] > before["descriptors"]


def test_private_memory_is_counted_in_bytes() -> None:
    before = footprint_of(os.getpid())
    with mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE) as private:
        private.write(b"x" * (8 << 20))
        after = footprint_of(os.getpid())
    assert after["anonymous_bytes"] - before["anonymous_bytes"] >= 7 << 20
    assert _files(after) == _files(before)


def _files(footprint: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in footprint.items() if name.startswith("mappings of ")}
