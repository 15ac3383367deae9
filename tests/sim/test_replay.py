"""Replay: a recorded run, here one that the simulator itself made, comes out as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dynamictp.bench.record import Bench, ClientFacts, LayoutSample, Run, ServerFacts, Slo, write_json
from dynamictp.bench.result import Result
from dynamictp.bench.schedule import Request
from dynamictp.bench.watcher import changes_of
from dynamictp.control.values import StepSample
from dynamictp.cost.calibration import Calibration
from dynamictp.cost.steps import StepModel
from dynamictp.errors import ConfigError
from dynamictp.sim.pool import SimPool
from dynamictp.sim.replay import read_recording, replay, setup_of, switches
from dynamictp.sim.requests import SimRequest
from dynamictp.sim.speeds import calibrated, with_host
from dynamictp.sim.validate import Plan, compare, page
from tests.control.pools import config, cpu_facts, cpu_setup, traffic

ORIGIN_S, SECONDS = 100.0, 180.0


def record(folder: Path, slower: float = 1.5) -> tuple[Path, Path]:
    """(journal, record) of a pool whose steps take `slower` times what its facts say."""
    setup = cpu_setup(
        "tp1",
        config=config(shrink_after_s=20),
        facts=cpu_facts(slower=slower),
        believed=cpu_facts(),
        start_s=ORIGIN_S - 5,
    )
    pool = SimPool(setup)
    requests = traffic("steps:0=1,60=7,110=1", SECONDS)
    for request in requests:
        request.arrival_s += ORIGIN_S
        request.__post_init__()
    outcome = pool.run(requests, SECONDS + 60)
    assert not outcome.unfinished
    journal, file = folder / "journal.jsonl", folder / "record.json"
    journal.write_bytes(b"\n".join(pool.journal.lines()) + b"\n")
    run = Run(
        label="measured",
        started_at="2026-01-01T00:00:00+00:00",
        server=ServerFacts("http://server", "demo", "dynamictp", command=("serve", "--max-wait-s=0")),
        client=ClientFacts(0.0, "", ""),
        load_s=SECONDS,
        end_s=SECONDS + 30,
        results=tuple(map(result_of, requests)),
        samples=(),
        origin_s=ORIGIN_S,
    )
    changes = [(at_s - ORIGIN_S, layout) for at_s, layout in pool.timeline]
    stamps = [i * 0.5 for i in range(int(2 * run.end_s))]
    samples = [LayoutSample(t, [name for at, name in changes if at <= t][-1], 0, 0) for t in stamps]
    run = replace(run, samples=tuple(samples))
    bench = Bench({"arrivals": "steps", "scale": 1}, 0, "", "", "server", 0, 0, Slo(), (run,), "")
    write_json(bench, {}, file)
    return journal, file


def result_of(request: SimRequest) -> Result:
    first, end = request.first_token_s, request.finished_s
    assert first is not None
    assert end is not None
    gap = (end - first) / max(request.output - 1, 1)
    sent, prompt = request.arrival_s - ORIGIN_S, request.prompt
    return Result(
        Request(sent, "", request.output, name=request.id, traffic_class="chat", prompt_tokens=prompt),
        sent, sent, end - ORIGIN_S,
        tuple(first - ORIGIN_S + i * gap for i in range(request.output)),
        (1,) * request.output,
        prompt_tokens=request.prompt,
    )  # fmt: skip


def test_a_replay_predicts_what_was_recorded(tmp_path: Path) -> None:
    recording = read_recording(*record(tmp_path))
    both = replay(recording)
    counts = [switches(both.runs[1])]
    checks = {check.name: check for check in compare(both, counts)}
    assert all(check.holds for check in checks.values()), checks
    assert checks["switches"].measured == len(changes_of(both.runs[0])) >= 2
    assert checks["TPOT mean, ms"].error == pytest.approx(0, abs=0.1)
    text = page(both, tuple(checks.values()), counts, recording, "about")
    assert "| TTFT P95, ms |" in text
    assert "OFF" not in text


def test_the_recorded_plan_switches_often_enough_to_be_counted() -> None:
    plan = Plan(600, 0.4, 1.7, 0.5, 20)
    edges = [edge.split("=") for edge in plan.arrivals.removeprefix("steps:").split(",")]
    assert [rate for _, rate in edges] == ["0.4", "1.7"] * 6 + ["0.4"]
    times = [float(time) for time, _ in edges]
    assert times == sorted(times)
    assert all(
        high - low >= 1.5 * plan.shrink_after_s for low, high in zip(times[2::2], times[3::2], strict=False)
    )


def test_the_planner_begins_with_what_it_knew(tmp_path: Path) -> None:
    recording = read_recording(*record(tmp_path))
    setup = setup_of(recording)
    assert setup.start_s == ORIGIN_S
    assert setup.state.decisions == 9, "five seconds before the run"
    assert setup.max_wait_s == 0.0
    assert setup.believed == recording.head.facts
    assert setup.believed != setup.facts


def test_a_journal_of_several_servers_is_read_from_the_one_that_was_recorded(tmp_path: Path) -> None:
    journal, file = record(tmp_path)
    expected = read_recording(journal, file)
    lines = journal.read_bytes()
    other = msgspec.structs.replace(expected.head, config=config(shrink_after_s=77))
    stranger = msgspec.json.encode(other) + b"\n"
    early, late = (
        msgspec.json.encode(
            msgspec.structs.replace(entry, snapshot=msgspec.structs.replace(entry.snapshot, time_s=time_s))
        )
        + b"\n"
        for entry, time_s in ((expected.entries[0], 3.0), (expected.entries[-1], 9000.0))
    )
    journal.write_bytes(stranger + early + lines + stranger + late)
    assert read_recording(journal, file) == expected
    middle = lines.splitlines(keepends=True)
    journal.write_bytes(b"".join((*middle[:50], stranger, *middle[50:])))
    with pytest.raises(ConfigError, match="changed during the run"):
        read_recording(journal, file)


def test_steps_are_calibrated_by_degree_and_size() -> None:
    facts = cpu_facts()
    steps = [
        StepSample(tp, factor * seconds(tp, rows, tokens), rows, 100.0, tokens, 0.0)
        for tp, rows, tokens, factor in ((1, 4, 0, 2.0), (1, 0, 256, 3.0), (2, 16, 0, 0.5))
        for _ in range(5)
    ]
    # A stall of a shared machine.
    steps.append(StepSample(1, 100 * seconds(1, 4, 0), 4, 100.0))
    found = calibrated(facts, steps)
    for op, tp, size, ratio in (("base", 1, 4, 2.0), ("attention", 1, 4, 2.0), ("base", 1, 256, 3.0),
                                ("prompt_attention", 1, 256, 3.0), ("base", 2, 16, 0.5)):  # fmt: skip
        correction = found.correction(op, tp, size)  # type: ignore[arg-type]
        assert correction is not None
        assert correction.ratio == pytest.approx(ratio, rel=1e-6)
    with pytest.raises(ConfigError, match="too few"):
        calibrated(facts, [])


def seconds(tp: int, rows: int, tokens: int) -> float:
    model = StepModel(cpu_facts().domain(tp, tp, None))
    total = model.base(rows + tokens, rows + bool(tokens)).total_s
    total += model.decode_attention_s(rows, 100.0) if rows else 0.0
    return total + (model.prompt_attention_s(tokens) if tokens else 0.0)


def test_the_time_between_steps_is_the_servers_own_count() -> None:
    base = Calibration("m", "d", "s", calibrated(cpu_facts(), [
        StepSample(1, seconds(1, 4, 0), 4, 100.0) for _ in range(3)
    ]).points)  # fmt: skip
    name = "dtp_step_seconds_total{{part={}}}{{phase=decode}}{{tp=1}}"
    server = ServerFacts(
        "u", "m",
        metrics_before={name.format("weights"): 1.0, name.format("host"): 1.0},
        metrics_after={name.format("weights"): 8.0, name.format("wait"): 1.0, name.format("host"): 3.0},
    )  # fmt: skip
    run = Run("r", "", server, ClientFacts(0, "", ""), 1.0, 1.0, ())
    before, after = base.correction("base", 1, 4), with_host(base, run).correction("base", 1, 4)
    assert before is not None
    assert after is not None
    assert after.ratio == pytest.approx(before.ratio * 1.25)


def test_files_that_are_no_recording_are_refused(tmp_path: Path) -> None:
    journal, file = record(tmp_path)
    with pytest.raises(ConfigError, match="no line of a journal"):
        read_recording(file, file)
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(ConfigError, match="holds no decision"):
        read_recording(empty, file)
    bench = msgspec.json.decode(file.read_bytes())
    bench["runs"][0]["users"] = 3
    file.write_bytes(msgspec.json.encode(bench))
    with pytest.raises(ConfigError, match="open loop"):
        read_recording(journal, file)
