"""`dynamictp bench` as typed: defaults, files of flags, and what is wrong with a flag."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dynamictp.cli.bench import COMMON, bench
from dynamictp.cli.bench_options import read_keys
from dynamictp.errors import ConfigError
from tests.bench import openai_server

URL = "http://127.0.0.1:9"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, arguments, catch_exceptions=True)


def test_an_address_may_come_without_the_command() -> None:
    for arguments in ((URL, "--dry-run"), ("run", URL, "--dry-run"), ("--dry-run", URL)):
        seen = run(*arguments, "--arrivals", "constant:2", "--duration", "10")
        assert seen.exit_code == 0, seen.output
        assert "20 requests over 10 s" in seen.output


def test_a_rate_is_short_for_random_arrivals() -> None:
    plan = ("--duration", "10", "--dry-run")
    assert run(URL, "--rate", "2", *plan).output == run(URL, "--arrivals", "poisson:2", *plan).output
    assert run(URL, *plan).output == run(URL, "--arrivals", "poisson:1", *plan).output
    both = run(URL, "--rate", "2", "--arrivals", "constant:2")
    assert isinstance(both.exception, ConfigError)
    assert "give one" in str(both.exception)


def test_the_help_of_the_group_names_options_that_exist() -> None:
    text = run("--help").output
    assert "bench run --help" in text
    named = set(re.findall(r"--[a-z-]+", " ".join(option for option, _ in COMMON)))
    known = {flag for option in bench.commands["run"].params for flag in option.opts}
    assert {"--rate", "--html"} <= named <= known
    assert all(flag in text for flag in named)


def test_a_file_of_flags_gives_defaults(tmp_path: Path) -> None:
    file = tmp_path / "b.yaml"
    file.write_text("arrivals: constant:3\nduration: 10\ntenant: ['a:1', 'b:1:5']\nslo_ttft_s: 3\n")
    assert "30 requests" in run(URL, "--config", str(file), "--dry-run").output
    assert "15 requests" in run(URL, "--config", str(file), "--duration", "5", "--dry-run").output
    file.write_text("arivals: constant:3\n")
    seen = run(URL, "--config", str(file), "--dry-run")
    assert isinstance(seen.exception, ConfigError)
    assert "arivals" in str(seen.exception)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((URL, "--arrivals", "sometimes"), "sometimes"),
        ((URL, "--mix", "nope"), "nope"),
        ((URL, "--tenant", "gold"), "gold"),
        ((URL, "--slo", "rag=1"), "rag=1"),
        ((URL, "--set-layout", "5=tpx"), "5=tpx"),
        ((URL, "--turns", "2", "--endpoint", "completions"), "chat endpoint"),
        (("compare", "--layouts", "dynamic"), "--devices"),
        (("compare", "--layouts", "tp2,tpx"), "tpx"),
    ],
)
def test_wrong_values_are_named(arguments: tuple[str, ...], named: str) -> None:
    seen = run(*arguments)
    assert isinstance(seen.exception, ConfigError), seen.output
    assert named in str(seen.exception)


def test_workloads_are_listed() -> None:
    text = run("workloads").output
    for words in ("chat-rag", "1500/4000", "replay:TRACE", "azure-conv", "servegen-day"):
        assert words in text


def test_keys_are_read_as_the_server_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# who\nk1 gold 10\nk2 free\n\nk3\n")
    assert read_keys(file) == ("k3", {"gold": "k1", "free": "k2"})
    file.write_text("k1 gold\n")
    assert read_keys(file) == ("k1", {"gold": "k1"})
    monkeypatch.setenv("OPENAI_API_KEY", "from-env")
    assert read_keys(None) == ("from-env", {})
    monkeypatch.setenv("DYNAMICTP_API_KEY", "ours")
    assert read_keys(None) == ("ours", {})
    assert read_keys(None, "given") == ("given", {})


@pytest.mark.multi
def test_a_run_writes_its_files_and_they_make_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", openai_server.KEY)
    record, html, again = tmp_path / "r.json", tmp_path / "r.html", tmp_path / "again.html"
    with openai_server.serving() as url:
        seen = run(url, "--mix", "a(50:8)", "--arrivals", "constant:20", "--duration", "0.5",
                   "--label", "mine",
                   "--json", str(record), "--html", str(html))  # fmt: skip
    assert seen.exit_code == 0, seen.output
    assert "mine" in seen.output
    plain = json.loads(record.read_text())
    assert plain["summary"][0]["total"]["finished"] == 10
    assert openai_server.KEY not in record.read_text()
    assert "mine" in html.read_text()
    merged = run("report", str(record), str(record), "--html", str(again))
    assert merged.exit_code == 0, merged.output
    assert "mine #2" in again.read_text()
