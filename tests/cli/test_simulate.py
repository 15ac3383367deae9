"""`dynamictp simulate`, as it is typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dynamictp.cli import cli
from dynamictp.errors import ConfigError

SCENARIO = """
name: small
model: llama-3.1-8b
device: a100-80g
devices: 2
arrivals: poisson:3
duration_s: 40
seeds: [0]
price_per_device_hour: 2
assumptions: [nothing is real]
configurations:
  - {name: narrow, layout: tp1}
  - {name: moving, layout: tp1, mode: dynamic, degrees: [1, 2]}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "scenario.yaml"
    file.write_text(SCENARIO)
    return file


def run(*arguments: object) -> str:
    done = CliRunner().invoke(cli, ["simulate", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_scenario_is_shown_and_written(scenario: Path, tmp_path: Path) -> None:
    out = {name: tmp_path / f"out.{name}" for name in ("json", "html", "markdown", "trace")}
    text = run(scenario, "--seeds", 2, *(part for name, file in out.items() for part in (f"--{name}", file)))
    for told in ("moving", "goodput", "device-hours", "load", "busy", "compute", "cost", "nothing is real"):
        assert told in text, told
    data = json.loads(out["json"].read_text())
    assert data["schema"] == "dynamictp-simulation/1"
    assert [(r["configuration"], r["seed"]) for r in data["results"]] == [
        ("narrow", 0), ("narrow", 1), ("moving", 0), ("moving", 1),
    ]  # fmt: skip
    assert 0 < data["results"][0]["use"]["busy"] <= 1
    page = out["html"].read_text()
    assert page.count("<svg") >= 4
    assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")
    assert "| device-hours |" in out["markdown"].read_text()
    events = json.loads(out["trace"].read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert any(event["name"] == "tp1 serving" for event in events)


def test_parts_of_a_scenario(scenario: Path) -> None:
    text = run(scenario, "--only", "narrow", "--duration", 10)
    assert "moving" not in text
    with pytest.raises(ConfigError, match="narrow, moving"):
        run(scenario, "--only", "other")


def test_what_does_not_go_together_is_a_usage_error(scenario: Path) -> None:
    for arguments in (
        (),
        (str(scenario), "--from-journal", str(scenario)),
        ("--from-journal", str(scenario)),
    ):
        done = CliRunner().invoke(cli, ["simulate", *arguments])
        assert done.exit_code == 2, arguments
        assert "Usage" in done.output


def test_a_replay_says_before_it_that_its_page_needs_a_library(
    scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it reads its files, of which these are none."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="--html needs matplotlib"):
        run("--from-journal", scenario, "--record", scenario, "--html", tmp_path / "page.html")
