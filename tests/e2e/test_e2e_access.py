"""A server with keys and an admin port of its own, as its operator and its clients see it."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from dynamictp.testing.server_process import ServerProcess
from tests.e2e.conftest import complaints
from tests.e2e.live import run_cli, until

pytestmark = pytest.mark.e2e

ALICE = {"authorization": "Bearer sk-alice"}


@dataclass
class Guarded:
    server: ServerProcess
    keys: Path
    admin: str

    def post(self, headers: dict[str, str] = ALICE, **body: object) -> httpx.Response:
        whole = {"prompt": "One two", "max_tokens": 2, **body}
        return httpx.post(f"{self.server.url}/v1/completions", json=whole, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "api").write_text("sk-alice alice\n")
    (folder / "admin").write_text("root\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ("--api-key-file", str(folder / "api"), "--admin-key-file", str(folder / "admin"))
    with ServerProcess(
        "serve", "demo", "--devices", "1", "--kv-memory", "256MiB", "--admin-port", str(port), *flags
    ) as server:
        yield Guarded(server, folder / "api", f"http://127.0.0.1:{port}")
        server.send_signal(signal.SIGTERM)
        assert server.wait_exit(15.0) == 0
        assert not complaints(server.wait_output_end())


def test_keys_and_their_reload(guarded: Guarded) -> None:
    assert guarded.post({}).status_code == 401
    assert guarded.post().status_code == 200
    assert httpx.get(f"{guarded.server.url}/ready").status_code == 200
    assert httpx.get(f"{guarded.server.url}/metrics", headers=ALICE).status_code in (401, 404)
    guarded.keys.write_text("sk-alice alice\nsk-bob bob\n")
    guarded.server.send_signal(signal.SIGHUP)
    until(lambda: guarded.post({"authorization": "Bearer sk-bob"}).status_code == 200, "the new key")


def test_the_command_finds_the_admin_port_with_its_key(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = run_cli("layout", "show", "--url", guarded.admin)
    assert (refused.returncode, "admin key" in refused.stderr) == (1, True)
    monkeypatch.setenv("DYNAMICTP_ADMIN_KEY", "root")
    shown = run_cli("layout", "show", "--url", guarded.admin)
    assert shown.returncode == 0
    assert "tp1" in shown.stdout


def test_a_deadline_ends_a_stream_with_an_event_and_an_answer_with_a_504(guarded: Guarded) -> None:
    began = time.monotonic()
    body = {"prompt": "Count:", "max_tokens": 5000, "ignore_eos": True, "timeout": 2}
    streamed = guarded.post(**body, stream=True)
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "deadline_exceeded"
    assert len(events) > 3
    whole = guarded.post(**body)
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert time.monotonic() - began >= 4
