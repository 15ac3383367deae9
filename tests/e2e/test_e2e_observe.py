"""What a person on call sees of a real server: the live page in a browser, an alert of a real Prometheus."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from dynamictp.cli import cli
from tests.e2e.live import Api, run_cli, until

pytestmark = pytest.mark.e2e

BROWSER_S = 60


def browser() -> str:
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    return found


def dump_page(url: str, profile: Path) -> str:
    """The page after a few seconds of its own time, as text of its elements."""
    ran = subprocess.run(
        [
            browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1440,900",
            f"--user-data-dir={profile}", "--virtual-time-budget=4000", "--dump-dom", url,
        ],
        capture_output=True, text=True, timeout=BROWSER_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def text_of(page: str, element: str) -> str:
    """Everything that is written between the element with that id and the next one with an id."""
    match = re.search(rf'id="{element}"[^>]*>(.*?)(?=<[a-z0-9]+[^>]* id="|<script)', page, re.DOTALL)
    assert match is not None, f"no {element} in the page"
    return " ".join(re.sub(r"<[^>]+>", " ", match[1]).split())


def test_the_page_follows_a_switch(api: Api, tmp_path: Path) -> None:
    browser()
    api.complete("The sea", 8)
    before = dump_page(f"{api.url}/dashboard", tmp_path)
    assert text_of(before, "layout") == "tp1"
    assert "device 0" in text_of(before, "devices")
    assert "free" in text_of(before, "devices")
    api.set_layout("tp2")
    try:
        api.complete("The sea", 8)
        after = dump_page(f"{api.url}/dashboard", tmp_path)
        assert text_of(after, "layout") == "tp2"
        assert text_of(after, "badges").endswith("serving")
        assert "free" not in text_of(after, "devices")
        switches = text_of(after, "switches")
        assert switches.startswith("tp1 → tp2 done")
        assert "proof" in switches
        assert "tp2" in text_of(after, "chart-degree")
        assert after.count("<path") >= 4
        assert 'id="notice" class="card" style="display: none;"' in after
    finally:
        api.set_layout("tp1")


def test_the_commands_see_a_server_at_work(api: Api) -> None:
    # It outlasts both commands; the client closes it.
    with api.stream("Once upon a time", 4000, ignore_eos=True) as (stream, events):
        next(events)
        seen = run_cli("diagnose", api.url, "--seconds", "2")
        shown = run_cli("top", api.url, "--once")
        assert not stream.done
    assert seen.returncode == 0, seen.stderr
    assert "tokens per step" in seen.stdout or "of the time" in seen.stdout
    assert "idle" not in seen.stdout
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"tp1 +0 +serving +1", shown.stdout)
    assert "tokens/s" in shown.stdout


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the server every second, with the default alerts on a faster clock."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed: apt-get install prometheus")
    rules = CliRunner().invoke(cli, ["export", "alerts"]).output
    (folder / "alerts.yml").write_text(rules.replace("[10m]", "[15s]"))
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        "rule_files: [alerts.yml]\n"
        f"scrape_configs: [{{job_name: dynamictp, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
                yield http
        finally:
            process.terminate()
            process.wait(20)


def answer(http: httpx.Client, path: str, **query: str) -> Any:
    try:
        response = http.get(path, params=query)
    except httpx.HTTPError:
        return None
    return response.json()["data"] if response.status_code == 200 else None


def firing(http: httpx.Client) -> set[str]:
    alerts = (answer(http, "/api/v1/alerts") or {}).get("alerts", [])
    return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def scraped(http: httpx.Client) -> bool:
    found = answer(http, "/api/v1/query", query="count_over_time(dtp_tp_switch_outcomes_total[1m])")
    return bool(found and found["result"] and all(int(one["value"][1]) > 1 for one in found["result"]))


def test_an_alert_of_a_real_prometheus_fires_and_resolves(api: Api, tmp_path: Path) -> None:
    with prometheus(tmp_path, api.url.removeprefix("http://")) as http:
        until(lambda: scraped(http), "two scrapes of the server", 30)
        assert not firing(http)
        for layout in ("tp2", "tp1") * 5:
            api.set_layout(layout)
        until(lambda: "DynamicTPFlapping" in firing(http), "the alert fires", 30)
        until(lambda: not firing(http), "the alert resolves", 60)
