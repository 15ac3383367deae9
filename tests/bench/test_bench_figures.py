from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from dynamictp.bench.admin import Switch
from dynamictp.bench.blocks import Block, DecodePoint, PrefillPoint, Session, guarded, switch_figures
from dynamictp.bench.decode_split import DecodeSplit, decode_split, engine_us
from dynamictp.bench.figures import FULL, QUICK, main, parse_options
from dynamictp.bench.figures_record import Figures, as_json, read_json
from dynamictp.bench.figures_report import markdown, render
from dynamictp.bench.figures_sheets import sheets, states
from dynamictp.bench.kernel_figures import KernelFigures
from dynamictp.bench.machine import (
    Build,
    Machine,
    MemoryState,
    busy_ticks,
    describe_machine,
    probe_memory,
)
from dynamictp.bench.metrics_cost import Side, cost_of
from dynamictp.bench.result import Failure, FailureKind, Result
from dynamictp.bench.rival import RivalFacts
from dynamictp.bench.roofline import DecodeBytes, decode_bytes, roofline_ms, served_bytes
from dynamictp.bench.schedule import Request
from dynamictp.bench.stats import quantiles
from dynamictp.errors import FatalError
from dynamictp.testing.harness import TINY

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
    split = DecodeSplit(64, weights_ms=6.0, attention_ms=0.5, wait_ms=1.0, other_ms=0.5, host_ms=0.25)
    points = [DecodePoint("tp1", 4, 3, 10.0, 300.0), DecodePoint("tp2", 4, 3, 7.0, 450.0)]
    single = [
        DecodePoint("tp1", 1, 3, 9.9, 100.0, split, 120.0, 104.4),
        DecodePoint("tp2", 1, 3, 9.0, 110.0, None),
        DecodePoint("other", 1, 3, 30.0, 33.0),
    ]
    switching = switch_figures([steady], [switch(0.1, 0.3, commit=1.0)], {"tp1": 0.1}, "tp1")
    return Figures(
        machine=Machine("A CPU", 2, 24.0, "6.1"),
        start_s=Block("start", A, A, False, start),
        decode=(Block("1 streams", A, A, True, single), Block("4 streams", A, A, False, points)),
        prefill=Block("prefill", B, B, False, [PrefillPoint("tp1", ttft)]),
        switch=Block("switches", A, A, False, switching),
        kernels=Block("kernels", A, A, False, KernelFigures(("tp1 batch 1: 8.80 ms",))),
        build=Build("2030-01-02", "0.1.0", "abcdef0123+"),
        bytes_read=DecodeBytes(weights=269_000_000, kv_per_token=20_000),
    )


def test_the_tables_show_every_block_and_its_state() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(render(figures()))
    output = console.file
    assert isinstance(output, io.StringIO)
    for words in ("A CPU, 2 usable cores", "1.50×", "A 36/36 GB/s", "B 60/60 GB/s", "1250", "commit",
                  "criterion held", "3.00", "2030-01-02", "abcdef0123+", "A and B; 1 repeated", "1.00 (12%)",
                  "0.25 (3%)", "batch 1: 8.80 ms"):  # fmt: skip
        assert words in output.getvalue()


def test_what_metrics_cost_is_judged_by_the_rounds_ratios() -> None:
    metered, silent = Side(counting=True), Side(counting=False)
    metered.tokens_per_s, metered.cpu_us, metered.scrape_s = [1, 500, 900, 594], [9, 30, 31, 32], [0.004]
    silent.tokens_per_s, silent.cpu_us = [1, 505, 1000, 600], [9, 20, 21, 22]
    cost = cost_of(metered, silent)
    assert cost.ratio.value == pytest.approx(0.99)
    assert (cost.rounds, cost.with_tokens_per_s, cost.without_cpu_us, cost.scrapes) == (3, 594, 21, 1)
    assert cost.held
    slow = replace(cost, ratio=replace(cost.ratio, value=0.97))
    assert not slow.held
    block = replace(figures(), metrics=Block("metrics", A, A, False, slow))
    assert json.loads(msgspec.json.encode(as_json(block)))["metrics"]["figures"]["held"] is False
    assert read_json(msgspec.json.encode(as_json(block))) == block
    (sheet,) = [sheet for sheet in sheets(block) if sheet.title.startswith("Metrics")]
    assert "at least 0.98: NOT held" in sheet.notes[0]
    with pytest.raises(FatalError, match="no round"):
        cost_of(*(replace(side, tokens_per_s=[1.0]) for side in (metered, silent)))


def test_json_spells_out_verdict_and_states() -> None:
    plain = json.loads(msgspec.json.encode(as_json(figures())))
    assert plain["switch"]["figures"]["held"] is True
    assert plain["prefill"]["state_before"] == "B"
    assert plain["decode"][1]["figures"][1]["tokens_per_s"] == 450.0
    assert plain["kernels"]["state_after"] == "A"


def test_the_json_reads_back_and_becomes_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = msgspec.json.encode(as_json(figures()))
    assert read_json(data) == figures()
    file = tmp_path / "figures.json"
    file.write_bytes(data)
    assert main(["--markdown", str(file)]) == 0
    text = capsys.readouterr().out
    assert text == markdown(figures())
    lines = text.splitlines()
    table = lines.index("### Decode, 64 tokens in, 64 out")
    assert lines[table + 2 : table + 5] == [
        "| streams | layout | TPOT ms | tokens/s | against tp1 | decoding | memory before/after |",
        "| --- | --: | --: | --: | --: | --: | --: |",
        "| 1 | tp1 | 9.9 | 100 | 1.00× | 104 | A 36/36 GB/s |",
    ]
    file.write_text('{"machine": 3}')
    assert main(["--markdown", str(file)]) == 1
    assert "not the JSON of scripts/bench" in capsys.readouterr().err


def test_the_roofline_is_bytes_over_the_bandwidth_of_the_same_state() -> None:
    (sheet,) = [sheet for sheet in sheets(figures()) if "roofline" in sheet.title]
    # 269 MB and 96 tokens of 20 kB, at 30 GB/s of one core and 36 of two.
    assert [row[:5] for row in sheet.rows] == [
        ("tp1", "9.03", "9.90", "1.10", "≤ 1.2"),
        ("tp2", "7.53", "9.00", "1.20", "≤ 1.3"),
    ]
    assert roofline_ms(60e6, (A, B), 2) == pytest.approx(1.25)


def test_a_tied_embedding_is_read_as_the_head_and_another_one_hardly() -> None:
    tied = msgspec.structs.replace(TINY, tied_head=True)
    untied = msgspec.structs.replace(TINY, tied_head=False)
    assert decode_bytes(untied, "bf16").weights == decode_bytes(tied, "bf16").weights
    assert decode_bytes(tied, "bf16").kv_per_token == 2 * TINY.layers * TINY.kv_heads * TINY.head_dim * 2
    wide = decode_bytes(tied, "fp32")
    assert wide.kv_per_token == 2 * decode_bytes(tied, "bf16").kv_per_token
    assert wide.step(10, streams=3) == wide.weights + 30 * wide.kv_per_token
    assert served_bytes("demo", ["--weights", "int8"]) is None


def test_the_split_of_decode_steps_is_what_the_counters_grew_by() -> None:
    def counters(steps: float, **seconds: float) -> dict[str, float]:
        labels = "{phase=decode}{tp=2}"
        parts = {f"dtp_step_seconds_total{{part={part}}}{labels}": value for part, value in seconds.items()}
        return {f"dtp_steps_total{labels}": steps, **parts}

    before = counters(10, weights=1.0, attention=1.0, wait=1.0, other=1.0, host=1.0)
    after = counters(30, weights=1.08, attention=1.01, wait=1.02, other=1.01, host=1.02)
    split = decode_split(before, after, 2)
    assert split is not None
    assert split.steps == 20
    assert (split.weights_ms, split.step_ms) == (pytest.approx(4.0), pytest.approx(6.0))
    assert split.wait_share == pytest.approx(1 / 6)
    assert split.host_share == pytest.approx(1 / 7)
    assert decode_split(before, after, 1) is None
    assert decode_split({}, {}, 2) is None
    assert engine_us({}) is None
    assert engine_us({"dtp_engine_step_seconds": 150e-6}) == pytest.approx(150.0)


def test_ratios_against_another_server() -> None:
    measured = figures()
    rival = RivalFacts("http://there", "other-model", "1.2", "prompts as text", short=True)
    ttft = quantiles([500.0])
    assert ttft is not None
    prefill = Block("prefill", A, A, False, [PrefillPoint(name, ttft) for name in ("tp1", "tp2", "other")])
    measured = replace(measured, decode=measured.decode[:1], prefill=prefill, rival=rival)
    (sheet,) = [sheet for sheet in sheets(measured) if sheet.title == "Against another server"]
    assert [row[:-1] for row in sheet.rows] == [
        ("TPOT ms, streams: 1", "30.0", "9.9", "0.33×", "9.0", "0.30×"),
        ("tokens/s, streams: 1", "33", "100", "3.03×", "110", "3.33×"),
        ("TTFT ms, prefill of 1,000", "500", "500", "1.00×", "500", "1.00×"),
    ]
    assert "other-model, version 1.2" in sheet.notes[0]
    assert sheet.notes[1] == "It ended some outputs early."


def test_options() -> None:
    assert parse_options([]).plan == FULL
    quick = parse_options(["--quick", "--only", "decode,start", "--", "--kernels", "torch"])
    assert (quick.plan, quick.parts) == (QUICK, ("decode", "start"))
    assert quick.serve_flags == ("--kernels", "torch")
    compared = parse_options(["--compare", "http://there/v1", "--compare-model", "m"])
    assert (compared.compare_url, compared.compare_model) == ("http://there/v1", "m")
    with pytest.raises(SystemExit) as caught:
        parse_options(["--only", "everything"])
    assert caught.value.code == 2


def test_a_session_without_a_server_says_so() -> None:
    with pytest.raises(FatalError, match="no answer"):
        Session("http://127.0.0.1:9")
