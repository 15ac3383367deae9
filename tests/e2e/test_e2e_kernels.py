"""A server with int8 weights, with devices of several cores, and without the native extension."""

from __future__ import annotations

from typing import Any

import pytest

from dynamictp import native
from dynamictp.testing.server_process import ServerProcess
from tests.e2e.conftest import complaints
from tests.e2e.live import Api, run_cli

pytestmark = pytest.mark.e2e

PROMPT = "The most important thing about tensor parallelism is"


def complete(*flags: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """The first choice of a short completion by a server with these flags."""
    arguments = ("serve", "demo", "--kv-memory", "256MiB", *flags)
    with ServerProcess(*arguments, environment=environment) as server, Api(server.url) as api:
        answer: dict[str, Any] = api.complete(PROMPT, max_tokens=12, logprobs=1, return_token_ids=True)
        assert not complaints("\n".join(server.lines))
    choice: dict[str, Any] = answer["choices"][0]
    return choice


@pytest.mark.skipif(native.load() is None, reason="needs the native extension")
def test_int8_is_the_same_on_two_ranks_and_on_two_cores() -> None:
    ranks = complete("--weights", "int8", "--devices", "2", "--layout", "tp2")
    cores = complete("--weights", "int8", "--devices", "1", "--cores-per-device", "2")
    assert ranks["token_ids"] == cores["token_ids"]
    assert ranks["logprobs"] == cores["logprobs"]


def test_without_the_native_extension_tp1_serves() -> None:
    without = {native.NO_NATIVE_ENV: "1"}
    assert len(complete("--devices", "1", environment=without)["token_ids"]) == 12


def test_without_the_native_extension_tp2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.NO_NATIVE_ENV, "1")
    done = run_cli("serve", "demo", "--devices", "2", "--layout", "tp2", "--port", "0")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "tp2: this model on this node can be served at degree 1" in done.stderr
    assert "without the native extension only tp1 shapes are legal" in done.stderr
