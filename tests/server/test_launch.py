"""Starting and stopping: what must not depend on anybody reading the output."""

from __future__ import annotations

import os
import sys

import pytest

from dynamictp.server.launch import say


def test_a_reader_that_is_gone_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose terminal or log pipe went away must still obey SIGTERM, whose handler speaks."""
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", stream)
    say("stopping")
    say("stopping again")
    with pytest.raises(BrokenPipeError):
        stream.close()
