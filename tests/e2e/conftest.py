"""One server of the embedded model for all tests of this folder that don't need a process of their own."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest

from dynamictp.testing.server_process import ServerProcess
from tests.e2e.live import Api, until

_COMPLAINT = re.compile(r"WARNING|ERROR|CRITICAL|Traceback|Exception|Unknown child")


def complaints(output: str) -> list[str]:
    """Lines of a server's output that nobody should ever see."""
    return [line for line in output.splitlines() if _COMPLAINT.search(line)]


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    with ServerProcess("serve", "demo", "--devices", "2", "--kv-memory", "1GiB") as server:
        yield server
        before_exit = complaints("\n".join(server.lines))
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit(15.0) == 0
        assert not before_exit
        assert not complaints(server.wait_output_end())


@pytest.fixture
def api(demo_server: ServerProcess) -> Iterator[Api]:
    """The server at rest with layout tp1; after the test nothing of its requests may be left."""
    with Api(demo_server.url) as client:
        if client.layout()["observed"] != "tp1":
            client.set_layout("tp1")
        # The domains that a test before this one left may still drain.
        until(lambda: {d["state"] for d in client.layout()["domains"]} == {"serving"}, "a layout at rest")
        yield client
        until(lambda: not client.in_use(), f"rows and pages free: {client.in_use()}")
        assert client.http.get("/ready").status_code == 200
