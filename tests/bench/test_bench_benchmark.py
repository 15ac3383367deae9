"""Whole benchmarks against small servers, from the look at the server to the record."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dynamictp.bench import benchmark as module
from dynamictp.bench.admin import Admin, base_url
from dynamictp.bench.benchmark import Job, Servers, benchmark, compare, figures_of, merge
from dynamictp.bench.record import Bench, read_json, write_json
from dynamictp.bench.session import Options
from dynamictp.bench.workload.classes import Prefixes, Turns, Workload, parse_mix
from dynamictp.errors import ConfigError, FatalError
from tests.bench import fake_serve, openai_server

SHORT = Workload(
    classes=parse_mix("short(60:6)"), arrivals="constant:20", duration_s=0.8, turns=Turns(1.5, 0.05), seed=4
)
QUICK = Options(warmup=2, drain_s=5.0, timeout_s=10.0)


def console() -> Console:
    return Console(file=io.StringIO(), width=100)


@pytest.fixture(scope="module")
def other_server() -> Bench:
    """A benchmark of a server that isn't ours."""
    with openai_server.serving() as url:
        options = replace(QUICK, api_key=openai_server.KEY)
        return benchmark(url, "", Job(SHORT, options), console())


@pytest.mark.multi
def test_another_server_is_measured_as_it_is(other_server: Bench) -> None:
    (run,) = other_server.runs
    (seen,) = figures_of(other_server)
    assert (run.label, run.server.owned_by, run.server.layout) == ("other-model", "someone", None)
    assert other_server.exactness == "approximate"
    assert seen.total.failures == {}
    assert seen.total.finished == seen.total.due == len(run.results)
    assert len(run.results) >= 16
    assert all(result.chunk_tokens == (2, 2, 2) for result in run.results)
    assert all(result.output_tokens == 6 for result in run.results)
    # Its tokens are words, so what its usage says of two requests tells the length of all.
    assert all(abs((r.prompt_tokens or 0) - (r.request.prompt_tokens or 0)) <= 2 for r in run.results)
    assert openai_server.KEY not in repr(other_server)


@pytest.mark.multi
def test_records_read_back_and_merge_when_their_plans_are_equal(other_server: Bench, tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    write_json(other_server, figures_of(other_server), file)
    again = read_json(file)
    assert again == other_server
    both = merge([other_server, again])
    assert [run.label for run in both.runs] == ["other-model #1", "other-model #2"]
    with pytest.raises(ConfigError, match="don't compare"):
        merge([other_server, replace(again, plan_digest="x")])
    file.write_text('{"workload": 3}')
    with pytest.raises(ConfigError, match="no benchmark result"):
        read_json(file)


@pytest.mark.multi
def test_a_wrong_key_or_model_or_address_is_told_before_the_load() -> None:
    with openai_server.serving() as url:
        with pytest.raises(FatalError, match="every warm-up request failed; the first: refused"):
            benchmark(url, "", Job(SHORT, QUICK), console())
        with pytest.raises(FatalError, match="serves other-model, not 'x'"):
            benchmark(url, "", Job(SHORT, replace(QUICK, model="x")), console())
    with pytest.raises(FatalError, match="no answer from"):
        benchmark("http://127.0.0.1:9", "", Job(SHORT, QUICK), console())


@pytest.mark.multi
def test_layouts_in_turn_get_the_same_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, str(Path(fake_serve.__file__))]
    monkeypatch.setattr(module, "serve_command", lambda *_arguments: command)
    workload = replace(SHORT, arrivals="closed:users=4,requests=12", turns=Turns(1), prefixes=Prefixes(1, 20))
    seen = compare(Servers(("tp2", "2*tp1")), Job(workload, QUICK), console())
    assert [run.label for run in seen.runs] == ["tp2", "2*tp1"]
    names = [[result.request.name for result in run.results] for run in seen.runs]
    assert sorted(names[0]) == sorted(names[1])
    assert all(result.failure is None for run in seen.runs for result in run.results)
    assert seen.runs[0].samples
    assert seen.runs[0].users == 4
    assert all(figures.validity.valid for figures in figures_of(seen))


@pytest.mark.multi
def test_changes_of_layout_during_the_run_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, str(Path(fake_serve.__file__))]
    changes = ((0.2, "tp2"), (0.4, "tp1"))
    runs: list[Bench] = []

    def use(url: str) -> None:
        runs.append(benchmark(url, "", Job(SHORT, replace(QUICK, changes=changes)), console()))

    module.with_server(command, console(), use)
    (run,) = runs[0].runs
    assert [(switch.before, switch.after) for switch in run.switches] == [("tp1", "tp2"), ("tp2", "tp1")]
    assert 0.2 <= run.switches[0].started_s < 0.4


def test_dynamic_is_a_server_whose_planner_chooses() -> None:
    commands = Servers(("tp2", "dynamic", "tp2")).commands()
    assert list(commands) == ["tp2", "dynamic"]
    assert commands["dynamic"][-2:] == ["--mode", "dynamic"]
    assert "tp1" in commands["dynamic"]
    assert all(command[command.index("--devices") + 1] == "2" for command in commands.values())


def test_what_is_no_layout_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--devices"):
        Servers(("dynamic",)).commands()
    with pytest.raises(ConfigError, match="tpx"):
        Servers(("tpx",)).commands()
    with pytest.raises(ConfigError, match="--layouts"):
        Servers(()).commands()
    commands = Servers(("tp2", "2*tp1", "tp1"), "m.gguf", flags=("--kernels", "torch")).commands()
    assert list(commands) == ["tp2", "2*tp1", "tp1"]
    assert all("m.gguf" in command and command[-1] == "torch" for command in commands.values())
    assert commands["tp1"][commands["tp1"].index("--devices") + 1] == "2"


def test_addresses_lose_the_version() -> None:
    assert base_url("http://h:8000/v1/") == base_url("http://h:8000") == "http://h:8000"


async def test_addresses_of_admin_interfaces_need_no_scheme() -> None:
    """Port 0 answers nobody."""
    url, key = Options(admin_url="127.0.0.1:0/v1").admin_of("http://h:8000")
    assert (url, key) == ("http://127.0.0.1:0", None)
    async with Admin("127.0.0.1:0") as admin:
        with pytest.raises(FatalError, match=r"no answer from http://127\.0\.0\.1:0: .*connection"):
            await admin.served_model()
