"""The owner-only folder of a server's sockets, and the removal of folders that killed servers left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import zmq

from dynamictp.errors import ResourceError
from dynamictp.transport import worker_address

PREFIX = "dynamictp-"
_LOCK = "lock"
_LONGEST_NAME = 99_999
"""Incarnations in the longest socket name that must fit."""


class SocketFolder:
    """A new folder, removed by `close`. While its server lives it holds a lock in it, which the kernel drops
    however the server ends: so the next server knows which folders are nobody's.
    """

    def __init__(self, devices: int) -> None:
        """Raises `ResourceError` when there is no place for it."""
        _remove_stale(Path(tempfile.gettempdir()))
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._lock = _create_lock(self.path)
        except OSError as error:
            raise ResourceError(
                f"no folder for sockets: {error.strerror}; set TMPDIR to another place"
            ) from error
        longest = worker_address(self.path, devices, _LONGEST_NAME, _LONGEST_NAME).removeprefix("ipc://")
        if len(os.fsencode(longest)) > zmq.IPC_PATH_MAX_LEN:
            self.close()
            raise ResourceError(
                f"the path {self.path} is too long for sockets, whose paths have at most "
                f"{zmq.IPC_PATH_MAX_LEN} bytes; set TMPDIR to a shorter one"
            )

    def remove_of_engine(self, incarnation: int) -> None:
        """Files of an engine that has ended: it can't remove its sockets when it is killed."""
        for pattern in (f"engine-{incarnation}.*", f"worker-*-{incarnation}.sock"):
            for file in self.path.glob(pattern):
                file.unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _create_lock(folder: Path) -> int:
    """A locked file; it has its name only once it is locked."""
    unnamed = folder / f"{_LOCK}.new"
    descriptor = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    unnamed.rename(folder / _LOCK)
    return descriptor


def _remove_stale(parent: Path) -> None:
    """Remove this user's folders whose lock nobody holds."""
    for lock in parent.glob(f"{PREFIX}*/{_LOCK}"):
        with suppress(OSError):
            if lock.parent.is_symlink() or lock.parent.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
