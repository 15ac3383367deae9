"""Child processes: exit codes that nobody steals, signals that never reach a stranger."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from dynamictp.errors import ResourceError
from dynamictp.process import PARENT_ENV
from dynamictp.server.child import Child

pytestmark = pytest.mark.multi


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that runs what its first argument says."""
    (tmp_path / "played.py").write_text("import sys\nexec(sys.argv[1])\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "played"


async def test_exit_codes_and_signals(module: str) -> None:
    child = Child("one", [module, "sys.exit(7)"])
    assert await child.ended == 7
    assert not child.running
    child.signal(signal.SIGKILL)
    sleeper = Child("two", [module, "import signal; signal.pause()"])
    assert sleeper.running
    sleeper.signal(signal.SIGKILL)
    assert await sleeper.ended == -signal.SIGKILL


async def test_a_signal_to_a_child_that_is_dead_but_not_reaped(module: str) -> None:
    child = Child("one", [module, "sys.exit(3)"])
    # The loop does not run, so nobody reaps: the id is still the child's.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
    child.signal(signal.SIGTERM)
    assert await child.ended == 3


async def test_many_at_once_keep_their_own_codes(module: str) -> None:
    children = [Child(str(code), [module, f"sys.exit({code})"]) for code in range(8)]
    assert await asyncio.gather(*(child.ended for child in children)) == list(range(8))


async def test_what_a_child_is_given(module: str) -> None:
    read, write = os.pipe()
    text = f"import os; os.write({write}, (os.environ['{PARENT_ENV}'] + os.environ['MORE']).encode())"
    child = Child("one", [module, text], descriptors=(write,), environment={"MORE": "-more"})
    assert await child.ended == 0
    os.close(write)
    assert os.read(read, 100).decode() == f"{os.getpid()}-more"
    os.close(read)


async def test_an_interrupt_of_the_group_does_not_reach_a_child(module: str) -> None:
    child = Child("one", [module, "import os, signal; os.kill(os.getpid(), signal.SIGINT); sys.exit(5)"])
    assert await child.ended == 5
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


async def test_a_child_that_can_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ResourceError, match="can't start engine: No such file"):
        Child("engine", ["played"])
