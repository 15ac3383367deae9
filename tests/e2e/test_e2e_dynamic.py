"""The degree follows the traffic: one real server in dynamic mode, a burst, a quiet phase, a leased job."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from dynamictp.testing.server_process import ServerProcess
from tests.e2e.live import Api, until

pytestmark = pytest.mark.e2e

CONFIG = """
shrink_after_s: 4
min_interval_s: 1
slow_window_s: 3
ramp_observe_s: 0.3
ramp_settle_s: 0.3
reserve_ahead_s: 1
feedback_window_s: 5
slo: {ttft_p99_s: 2, ttft_per_token_ms: 2, tpot_p99_ms: 15}
"""


@pytest.fixture
def dynamic(tmp_path: Path) -> Iterator[Api]:
    file = tmp_path / "dynamic.yaml"
    file.write_text(CONFIG)
    arguments = ("serve", "demo", "--devices", "2", "--kv-memory", "1GiB", "--config", str(file))
    with ServerProcess(*arguments) as server, Api(server.url) as api:
        yield api


class Load:
    """Closed-loop clients in a thread each; every answer's place and every failure is kept."""

    def __init__(self, api: Api, clients: int, tokens: int) -> None:
        self.served: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self._api = api
        self._tokens = tokens
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        with httpx.Client(base_url=self._api.url, timeout=60) as http:
            while not self._stop.is_set():
                body = {
                    "prompt": f"{number} Once upon a time",
                    "max_tokens": self._tokens,
                    "ignore_eos": True,
                }
                response = http.post("/v1/completions", json=body)
                if response.status_code != 200:
                    self.failures.append(response.text)
                    continue
                self.served.append(response.json()["dynamictp"]["choices"][0])


def _decisions(api: Api, last: int) -> list[dict[str, Any]]:
    decisions: list[dict[str, Any]] = api.http.get(f"/admin/decisions?last={last}").json()["decisions"]
    return decisions


@pytest.mark.timeout(240)
def test_the_degree_follows_the_traffic_and_a_lease_uses_what_is_free(dynamic: Api, tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    job = subprocess.Popen(
        [
            sys.executable, "-m", "dynamictp", "lease", "--url", dynamic.url, "--notice", "3", "--grace", "2",
            "--", sys.executable, "-c",
            "import sys, time\nwhile True:\n    open(sys.argv[1], 'a').write('.')\n    time.sleep(0.02)",
            str(progress),
        ]
    )  # fmt: skip
    try:
        until(lambda: progress.exists() and progress.stat().st_size > 10, "the job works")
        state = dynamic.layout()
        assert [device["state"] for device in state["devices"]] == ["serving", "leased"]
        worker = psutil.Process(state["devices"][1]["pid"])
        until(lambda: worker.status() == psutil.STATUS_SLEEPING, "the worker sleeps")
        spent = [sum(worker.cpu_times()[:2])]

        def left() -> bool:
            """Looks at the worker before the job: it is that of a leased device as long as the job runs."""
            seen = sum(worker.cpu_times()[:2])
            if job.poll() is not None:
                return True
            spent.append(seen)
            return False

        with Load(dynamic, clients=32, tokens=48) as load:
            until(left, "the job was told to leave", 60)
            assert job.returncode == 76
            assert spent[-1] - spent[0] < 1.0
            until(lambda: dynamic.layout()["observed"] != "tp1", "growth", 60)
            grown = dynamic.layout()["observed"]
            assert grown in {"tp2", "tp1+tp1"}
        until(
            lambda: dynamic.layout()["observed"] == "tp1",
            "the layout shrinks after quiet",
            90,
            otherwise=lambda: _decisions(dynamic, last=3),
        )
    finally:
        job.kill()
        job.wait()
    assert not load.failures
    assert load.served
    switches = dynamic.http.get("/admin/switches").json()["switches"]
    assert [switch["to"] for switch in switches][-1] == grown
    assert {switch["outcome"] for switch in switches} <= {"closed", "committed"}
    reasons = [entry["reason"] for entry in _decisions(dynamic, last=1000)]
    assert "shrink" in reasons
    assert any(reason.startswith("grow") for reason in reasons)
