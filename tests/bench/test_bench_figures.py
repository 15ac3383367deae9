from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from dynamictp.bench.admin import Switch
from dynamictp.bench.blocks import Block, DecodePoint, PrefillPoint, Session, guarded, switch_figures
from dynamictp.bench.figures import FULL, QUICK, parse_options
from dynamictp.bench.figures_report import Figures, as_json, render, states
from dynamictp.bench.machine import Machine, MemoryState, busy_ticks, describe_machine, probe_memory
from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.schedule import Request
from dynamictp.bench.stats import quantiles
from dynamictp.errors import FatalError

A = MemoryState(30.0, 36.0)
B = MemoryState(30.0, 60.0)


def switch(start_s: float, end_s: float, **phases_ms: float) -> Switch:
    return Switch("tp1", "tp2", "closed", phases_ms, 1, 0, 0, start_s, end_s)


def stream(*chunk_s: float, failure: Failure | None = None) -> Result:
    return Result(
        Request(0.0, "x", 5),
        chunk_s[0],
        chunk_s[0],
        chunk_s[-1],
        chunk_s,
        (1,) * len(chunk_s),
        failure=failure,
    )


@pytest.mark.parametrize(
    ("states_seen", "repeated", "flipped"),
    [([A, A], False, False), ([A, B, B, B], True, False), ([A, B, B, A], True, True)],
)
def test_a_block_is_repeated_once_when_the_state_flips(
    states_seen: list[MemoryState], repeated: bool, flipped: bool
) -> None:
    left = list(states_seen)
    measured: list[int] = []

    def measure() -> int:
        measured.append(1)
        return len(measured)

    block = guarded("b", measure, lambda: left.pop(0))
    assert not left
    assert (block.repeated, block.flipped) == (repeated, flipped)
    assert block.figures == len(measured) == 1 + repeated


def test_states_by_what_two_processes_read() -> None:
    assert (A.name, B.name) == ("A", "B")
    assert str(A) == "state A: 30 GB/s one core, 36 GB/s two, 0.0 cores busy"
    busy = MemoryState(30.0, 38.0, busy_cores=1.5)
    assert states(Block("x", A, busy, False, None)) == "A 36/38 GB/s, 1.5 cores busy"
    assert states(Block("x", A, B, True, None)) == "A 36/60 GB/s (flipped to B)"


def test_busy_ticks_leave_out_idling_and_count_guests_once() -> None:
    assert busy_ticks("cpu  10 20 30 4000 500 6 7 8 9 9\ncpu0 1 1 1 1\n") == 10 + 20 + 30 + 6 + 7 + 8


@pytest.mark.multi
def test_the_memory_probe_reads_at_a_believable_rate() -> None:
    state = probe_memory(0.05)
    assert 0.5 < state.one_gbps < 1000
    assert 0.5 < state.two_gbps < 2000
    assert state.busy_cores >= 0
    assert describe_machine().usable_cores >= 1


def test_switch_figures_judge_each_switch_against_the_play_without() -> None:
    steady = stream(*(i * 0.02 for i in range(100)))  # 0 to 1.98 s
    stalled = stream(0.0, 0.02, 0.04, 0.06, 0.56, 0.58)
    switches = [switch(0.1, 0.3, commit=1.0, drain=4.0), switch(1.0, 1.1, commit=3.0)]
    figures = switch_figures([steady, stalled], switches, {"tp1": 0.1, "tp2": 0.4}, "tp1")
    assert figures.phases_ms["commit"].p50 == 2.0
    assert figures.phases_ms["drain"].count == 1
    assert figures.total_ms.max == pytest.approx(200.0)
    assert figures.gap_with_s == pytest.approx(0.5)
    assert [verdict.held for verdict in figures.verdicts] == [False, True]
    assert not figures.held
    assert switch_figures([steady, stalled], switches, {"tp1": 0.4}, "tp1").held
    broken = stream(0.0, 0.02, failure=Failure(FailureKind.STREAM, "lost"))
    assert not switch_figures([broken], switches, {"tp1": 0.4}, "tp1").held
    with pytest.raises(FatalError, match="no switch"):
        switch_figures([steady], [], {"tp1": 0.1}, "tp1")


def figures() -> Figures:
    steady = stream(*(i * 0.02 for i in range(100)))
    start, ttft = quantiles([3.0]), quantiles([1200.0, 1300.0])
    assert start is not None
    assert ttft is not None
    points = [DecodePoint("tp1", 4, 3, 10.0, 300.0), DecodePoint("tp2", 4, 3, 7.0, 450.0)]
    switching = switch_figures([steady], [switch(0.1, 0.3, commit=1.0)], {"tp1": 0.1}, "tp1")
    return Figures(
        machine=Machine("A CPU", 2, 24.0, "6.1"),
        start_s=Block("start", A, A, False, start),
        decode=(Block("4 streams", A, A, False, points),),
        prefill=Block("prefill", B, B, False, [PrefillPoint("tp1", ttft)]),
        switch=Block("switches", A, A, False, switching),
    )


def test_the_tables_show_every_block_and_its_state() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(render(figures()))
    output = console.file
    assert isinstance(output, io.StringIO)
    for words in ("A CPU, 2 usable cores", "1.50×", "A 36/36 GB/s", "B 60/60 GB/s", "1250", "commit",
                  "criterion held", "start to ready: 3.00 s"):  # fmt: skip
        assert words in output.getvalue()


def test_json_spells_out_verdict_and_states() -> None:
    plain = json.loads(msgspec.json.encode(as_json(figures())))
    assert plain["switch"]["figures"]["held"] is True
    assert plain["prefill"]["state_before"] == "B"
    assert plain["decode"][0]["figures"][1]["tokens_per_s"] == 450.0


def test_options() -> None:
    assert parse_options([]).plan == FULL
    quick = parse_options(["--quick", "--only", "decode,start", "--", "--kernels", "torch"])
    assert (quick.plan, quick.parts) == (QUICK, ("decode", "start"))
    assert quick.serve_flags == ("--kernels", "torch")
    with pytest.raises(SystemExit) as caught:
        parse_options(["--only", "everything"])
    assert caught.value.code == 2


def test_a_session_without_a_server_says_so() -> None:
    with pytest.raises(FatalError, match="no answer"):
        Session("http://127.0.0.1:9")
