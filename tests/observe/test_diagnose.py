"""Diagnosis: five situations as recorded figures, and two of them from the real engine on virtual time."""

from __future__ import annotations

import json
import random
import re
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from dynamictp.bench.record import Bench, ClientFacts, LayoutSample, Run, ServerFacts, Slo, write_json
from dynamictp.cli import cli
from dynamictp.cli.diagnose import of_models
from dynamictp.messages import ArenaFacts, DomainStatus, Snapshot, StepTotals
from dynamictp.observe.diagnose import Diagnosis, diagnose
from dynamictp.observe.figures import Figures, figures_of
from dynamictp.observe.findings import HEADLINES, Verdict
from dynamictp.observe.samples import Samples, parse_samples
from dynamictp.server.metrics import Metrics
from tests.engine.engine_simulation import HEADS, PAGE, Simulation, engine_start

BASE = Figures(interval_s=10.0, rows_total=64, degree=2, busy_share=0.95, foreign_cores=0.02)
# One stream at tp2 on two quiet cores: 1,700 steps of 5.8 ms.
ONE_STREAM = replace(
    BASE,
    running=1,
    tokens=1700,
    decode_steps=1700,
    decode={"weights": 8.6, "attention": 0.2, "wait": 0.5, "other": 0.4, "host": 0.3},
)
# Two ranks beside a busy neighbour of equal priority, which its own figures do not show.
NEIGHBOURED = replace(
    ONE_STREAM, decode={"weights": 4.1, "attention": 0.1, "wait": 4.6, "other": 0.8, "host": 0.4}
)
# 64 slots in use, a queue of 40 behind them.
OVERLOADED = replace(
    BASE,
    running=63.5,
    waiting=40,
    tokens=12_000,
    decode_steps=150,
    prefill_steps=50,
    decode={"weights": 5.2, "attention": 1.2, "wait": 0.6, "other": 0.4, "host": 0.2},
    prefill={"weights": 1.8, "attention": 0.2, "wait": 0.1, "other": 0.1, "host": 0.1},
    ttft_s=4.0,
    queue_s=3.4,
)
# The torch path on a small model: steps are Python.
INTERPRETED = replace(
    BASE,
    running=4,
    tokens=1200,
    decode_steps=300,
    decode={"weights": 2.0, "attention": 0.5, "wait": 0.4, "other": 2.1, "host": 4.8},
)
# Long contexts in a small arena.
CRAMPED = replace(
    BASE,
    running=7,
    waiting=3,
    kv_usage=0.98,
    preemptions=12,
    tokens=2000,
    decode_steps=300,
    prefill_steps=40,
    decode={"weights": 4.0, "attention": 2.0, "wait": 0.4, "other": 0.3, "host": 0.2},
    prefill={"weights": 2.0, "attention": 0.5, "wait": 0.2, "other": 0.1, "host": 0.1},
)


@pytest.mark.parametrize(
    ("figures", "verdict", "said"),
    [
        (ONE_STREAM, Verdict.MEMORY, "1.0 tokens per step"),
        (NEIGHBOURED, Verdict.COMMUNICATION, "46 %"),
        (OVERLOADED, Verdict.QUEUEING, "85 % of a TTFT of 4.00 s"),
        (INTERPRETED, Verdict.HOST, "49 % of the time passed between steps"),
        (CRAMPED, Verdict.KV_FULL, "12 preemptions"),
    ],
    ids=["memory", "communication", "queueing", "host", "kv-full"],
)
def test_the_five_situations(figures: Figures, verdict: Verdict, said: str) -> None:
    diagnosis = diagnose(figures)
    assert diagnosis.verdict is verdict
    assert any(said in line for line in diagnosis.findings[0].evidence), diagnosis.findings[0].evidence
    assert diagnosis.findings[0].advice
    assert sum(diagnosis.split.values()) == pytest.approx(1)


def verdicts(diagnosis: Diagnosis) -> list[Verdict]:
    return [finding.verdict for finding in diagnosis.findings]


def test_causes_come_before_symptoms_and_both_are_said() -> None:
    behind_a_neighbour = replace(OVERLOADED, decode=NEIGHBOURED.decode, prefill={}, prefill_steps=0)
    assert verdicts(diagnose(behind_a_neighbour))[:2] == [Verdict.COMMUNICATION, Verdict.QUEUEING]
    seen = replace(behind_a_neighbour, foreign_cores=0.9)
    assert verdicts(diagnose(seen))[0] is Verdict.HOST
    assert "0.9 of the devices' cores" in diagnose(seen).findings[0].evidence[0]


def test_many_rows_or_long_prompts_are_bound_by_arithmetic() -> None:
    many = replace(ONE_STREAM, running=32, tokens=32 * 380, decode_steps=380)
    assert verdicts(diagnose(many)) == [Verdict.COMPUTE]
    prompts = replace(ONE_STREAM, prefill_steps=10, prefill={"weights": 30.0})
    assert verdicts(diagnose(prompts)) == [Verdict.COMPUTE]
    contexts = replace(ONE_STREAM, decode={"weights": 3.0, "attention": 6.0})
    assert "long contexts" in diagnose(contexts).findings[0].evidence[0]


def test_a_server_with_room_is_healthy_and_one_without_work_idle() -> None:
    relaxed = diagnose(replace(ONE_STREAM, busy_share=0.2))
    assert verdicts(relaxed) == [Verdict.HEALTHY]
    assert "memory bound" in relaxed.findings[0].evidence[1]
    assert diagnose(Figures(10.0)).verdict is Verdict.IDLE
    assert diagnose(Figures(10.0, waiting=3)).verdict is Verdict.STALLED


def test_waiting_beside_free_slots_with_full_pages_is_a_matter_of_memory() -> None:
    held = replace(CRAMPED, preemptions=0)
    assert diagnose(held).verdict is Verdict.KV_FULL
    assert diagnose(replace(held, running=64)).verdict is Verdict.QUEUEING


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"server_cores": 0.97}, "server process used 0.97"),
        ({"engine_cores": 1.0}, "engine process used 1.00"),
        ({"steal_cores": 0.4, "decode": NEIGHBOURED.decode}, "hypervisor took 0.4"),
        ({"foreign_cores": 0.6, "decode": NEIGHBOURED.decode}, "other processes used 0.6"),
        ({"decode": {"weights": 3.0, "other": 5.0, "host": 1.0}}, "67 % of the time is neither"),
    ],
)
def test_what_is_around_the_model_is_named(changes: dict[str, object], said: str) -> None:
    finding = diagnose(replace(ONE_STREAM, **changes)).findings[0]  # type: ignore[arg-type]
    assert finding.verdict is Verdict.HOST
    assert said in finding.evidence[0]


def test_a_neighbour_that_nobody_waits_for_is_only_mentioned() -> None:
    beside = diagnose(replace(ONE_STREAM, foreign_cores=1.0))
    assert verdicts(beside) == [Verdict.MEMORY]
    assert "other processes used 1.0" in beside.findings[0].evidence[-1]


def test_a_single_preemption_is_no_want_of_memory() -> None:
    assert diagnose(replace(OVERLOADED, preemptions=1, kv_usage=0.6)).verdict is Verdict.QUEUEING
    assert diagnose(replace(OVERLOADED, preemptions=1, kv_usage=0.95)).verdict is Verdict.KV_FULL
    assert diagnose(replace(OVERLOADED, preemptions=5, kv_usage=0.6)).verdict is Verdict.KV_FULL


def test_refused_requests_are_a_queue_that_is_not_seen() -> None:
    refusing = replace(OVERLOADED, waiting=0.2, refused=30)
    assert diagnose(refusing).verdict is Verdict.QUEUEING
    assert "30 requests refused" in diagnose(refusing).findings[0].evidence[1]
    assert diagnose(replace(refusing, running=2, kv_usage=1.0)).verdict is Verdict.KV_FULL


def test_ranks_that_share_a_core_wait_for_each_other_whoever_else_is_there() -> None:
    shared = replace(NEIGHBOURED, foreign_cores=1.4, ranks_per_core=2)
    first, *others = diagnose(shared).findings
    assert first.verdict is Verdict.COMMUNICATION
    assert "2 ranks share a core" in first.evidence[1]
    assert "other processes used 1.4" in first.evidence[2]
    assert "one device per core" in first.advice[0].text
    assert Verdict.HOST not in [finding.verdict for finding in others]
    assert diagnose(replace(shared, degree=1)).verdict is Verdict.HOST


def test_of_host_and_communication_the_larger_share_comes_first() -> None:
    waits = replace(ONE_STREAM, decode={"weights": 0.4, "wait": 5.0, "other": 1.3, "host": 3.0})
    assert verdicts(diagnose(waits)) == [Verdict.COMMUNICATION, Verdict.HOST]
    hosts = replace(ONE_STREAM, decode={"weights": 0.4, "wait": 3.0, "other": 1.3, "host": 5.0})
    assert verdicts(diagnose(hosts)) == [Verdict.HOST, Verdict.COMMUNICATION]
    assert verdicts(diagnose(replace(waits, engine_cores=0.95)))[0] is Verdict.HOST


def test_what_takes_less_than_half_of_the_time_is_not_called_a_limit_beside_a_trouble() -> None:
    waits = replace(ONE_STREAM, decode={"weights": 4.0, "wait": 6.0})
    assert verdicts(diagnose(waits)) == [Verdict.COMMUNICATION]
    assert verdicts(diagnose(replace(waits, decode={"weights": 6.0, "wait": 4.0}))) == [
        Verdict.COMMUNICATION,
        Verdict.MEMORY,
    ]


def test_steps_that_say_nothing_of_themselves_are_not_taken_for_host_code() -> None:
    torch = replace(ONE_STREAM, decode={"other": 9.9, "host": 0.1})
    diagnosis = diagnose(torch)
    assert verdicts(diagnosis) == [Verdict.MEMORY]
    assert "torch kernels" in diagnosis.findings[0].evidence[1]
    assert "native kernels" in diagnosis.findings[0].advice[0].text
    assert diagnose(replace(torch, running=32, tokens=32 * 1700)).verdict is Verdict.COMPUTE


def test_a_step_that_outlasts_the_watch_is_not_taken_for_a_hang() -> None:
    waiting = Figures(3.0, running=4, waiting=2, worker_cores=1.8, foreign_cores=1.2)
    (finding,) = diagnose(waiting).findings
    assert finding.verdict is Verdict.STALLED
    assert "workers used 1.8 cores" in finding.evidence[1]
    assert "other processes used 1.2" in finding.evidence[2]
    assert any("--seconds" in advice.text for advice in finding.advice)
    (hung,) = diagnose(replace(waiting, worker_cores=0.01, foreign_cores=0.0)).findings
    assert len(hung.evidence) == 1
    assert "/ready" in hung.advice[0].text


parts = st.fixed_dictionaries(
    {part: st.floats(0, 10) for part in ("weights", "attention", "wait", "other", "host")}
)
cores = st.none() | st.floats(0, 2)


@given(
    st.builds(
        Figures,
        interval_s=st.just(10.0),
        running=st.floats(0, 64),
        waiting=st.floats(0, 99),
        rows_total=st.just(64.0),
        kv_usage=st.floats(0, 1),
        preemptions=st.integers(0, 20),
        refused=st.integers(0, 20),
        decode_steps=st.integers(0, 500),
        prefill_steps=st.integers(0, 500),
        decode=parts,
        prefill=parts,
        tokens=st.integers(0, 30_000),
        degree=st.floats(1, 4),
        busy_share=st.none() | st.floats(0, 1),
        server_cores=cores,
        engine_cores=cores,
        worker_cores=cores,
        foreign_cores=cores,
        steal_cores=cores,
        ranks_per_core=st.integers(0, 4),
    )
)
def test_no_advice_contradicts_or_repeats_one_before_it(figures: Figures) -> None:
    found = diagnose(figures).findings
    assert all(finding.evidence for finding in found)
    assert found[0].advice
    assert len(verdicts(diagnose(figures))) == len({finding.verdict for finding in found})
    levers = [{advice.lever for advice in finding.advice} - {None} for finding in found]
    assert not any(mine & other for i, mine in enumerate(levers) for other in levers[:i])


def test_every_verdict_has_its_headline_and_its_row_in_the_documentation() -> None:
    assert set(HEADLINES) == set(Verdict)
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|(.*)\|(.*)\|$", page, re.MULTILINE)
    assert [row[0] for row in rows if row[0] in set(Verdict)] == list(Verdict)
    assert all(cell.strip() for row in rows for cell in row)


# ---------------------------------------------------------------- from the engine itself


def engine_figures(prompts: list[list[int]], tokens: int, **start: object) -> Figures:
    """What the real engine's snapshots say, by way of the text of `/metrics`, until all have their tokens."""
    simulation = Simulation(
        random.Random(1), engine_start(devices=1, legal_degrees=(1,), **start), step_s=lambda plan: 0.01
    )
    metrics = Metrics()
    looks: list[dict[str, float]] = []

    def look() -> None:
        metrics.on_snapshot(simulation.core.snapshot())
        looks.append(parse_samples(metrics.render().decode()))

    simulation.run(lambda: simulation.ready is not None)
    look()
    began_s = simulation.clock.now()
    for prompt in prompts:
        simulation.submit(prompt, tokens)

    def done() -> bool:
        if len(looks) < 30 * (simulation.clock.now() - began_s):
            look()
        return not simulation.unfinished

    simulation.run(done)
    end_s = simulation.clock.now()
    look()
    figures = figures_of(looks[0], looks[-1], end_s - began_s, looks[1:-1])
    # Tokens are counted by the server; the fake workers do not say what their steps are made of.
    tokens_out = sum(len(stream.tokens) for stream in simulation.streams.values())
    return replace(
        figures, tokens=tokens_out, **{p: _as_weights(getattr(figures, p)) for p in ("decode", "prefill")}
    )


def _as_weights(parts: dict[str, float]) -> dict[str, float]:
    return {"weights": parts.get("other", 0.0), "host": parts.get("host", 0.0)}


def test_the_engine_short_of_pages_is_diagnosed_from_its_own_figures() -> None:
    arena = ArenaFacts(12 * HEADS, PAGE, "fp32")
    diagnosis = diagnose(engine_figures([[n] for n in range(3)], 30, arena=arena, max_model_len=40))
    assert diagnosis.verdict is Verdict.KV_FULL
    assert "preemptions" in diagnosis.findings[0].evidence[1]


def test_the_engine_short_of_slots_is_diagnosed_from_its_own_figures() -> None:
    diagnosis = diagnose(engine_figures([[n] for n in range(12)], 20, max_num_seqs=2))
    assert diagnosis.verdict is Verdict.QUEUEING
    assert "all slots in use" in diagnosis.findings[0].evidence[1]


def test_the_engine_with_one_stream_is_diagnosed_from_its_own_figures() -> None:
    figures = engine_figures([[1]], 60)
    assert figures.rows_per_step == pytest.approx(1, rel=0.1)
    assert diagnose(figures).verdict is Verdict.MEMORY


# ---------------------------------------------------------------- figures and the command


def test_counters_that_started_again_count_from_zero() -> None:
    delta = Samples({"a_total": 3.0, "b_total{x=1}": 7.0}).since(
        Samples({"a_total": 10.0, "b_total{x=1}": 2.0})
    )
    assert (delta.total("a_total"), delta.total("b_total", x="1")) == (3.0, 5.0)


def test_figures_come_from_the_difference_and_the_queue_from_between() -> None:
    before = {"dtp_steps_total{phase=decode}{tp=1}": 10.0, "dtp_num_requests_waiting": 0.0}
    after = {
        "dtp_steps_total{phase=decode}{tp=1}": 20.0,
        "dtp_steps_total{phase=decode}{tp=3}": 10.0,
        "dtp_step_seconds_total{part=wait}{phase=decode}{tp=1}": 2.0,
        "dtp_time_to_first_token_seconds_sum": 3.0,
        "dtp_time_to_first_token_seconds_count": 2.0,
        "dtp_process_cpu_seconds_total{device=}{process=server}": 5.0,
        "dtp_process_cpu_seconds_total{device=0}{process=worker}": 8.0,
        "dtp_pool_cores_busy_seconds_total": 18.0,
        "dtp_num_requests_waiting": 0.0,
    }
    between = [{"dtp_num_requests_waiting": 4.0}, {"dtp_num_requests_waiting": 6.0}]
    figures = figures_of(before, after, 10.0, between)
    assert (figures.steps, figures.degree, figures.waiting) == (20, 2, 5)
    assert (figures.ttft_s, figures.server_cores, figures.engine_cores) == (1.5, 0.5, None)
    assert figures.foreign_cores == pytest.approx(0.5)
    assert figures.share("wait") == 1


def test_each_of_several_models_is_diagnosed_by_its_own_figures() -> None:
    def look(at: float) -> dict[str, float]:
        return {
            "dtp_steps_total{model_name=big}{phase=decode}{tp=2}": 100 * at,
            "dtp_steps_total{model_name=small}{phase=decode}{tp=1}": 0.0,
            "dtp_step_seconds_total{model_name=big}{part=weights}{phase=decode}{tp=2}": 0.9 * at,
            "dtp_generation_tokens_total{domain=tp2@0,1}{model_name=big}": 100 * at,
            "dtp_kv_cache_usage_ratio{model_name=big}": 0.6,
            "dtp_kv_cache_usage_ratio{model_name=small}": 0.7,
            "dtp_num_requests_waiting{model_name=small}": 3.0,
            "dtp_process_cpu_seconds_total{device=0}{model_name=big}{process=worker}": 1.0 * at,
            "dtp_process_cpu_seconds_total{device=0}{model_name=small}{process=worker}": 0.8 * at,
            "dtp_process_cpu_seconds_total{device=}{process=server}": 0.1 * at,
            "dtp_pool_cores_busy_seconds_total": 2.0 * at,
        }

    (_, big), (label, small) = of_models("http://x", [look(0.0), look(1.0), look(2.0)], 2.0)
    assert (big.kv_usage, small.kv_usage) == (0.6, 0.7)
    assert (big.degree, big.worker_cores, big.server_cores) == (2, 1.0, pytest.approx(0.1))
    assert big.foreign_cores == small.foreign_cores == pytest.approx(0.1)
    assert diagnose(big).verdict is Verdict.MEMORY
    assert (label, diagnose(small).verdict) == ("http://x, model small", Verdict.STALLED)
    assert [name for name, _ in of_models("http://x", [{}, {}], 2.0)] == ["http://x"]
    alias = {"vllm:num_requests_running{model_name=demo}": 1.0}
    assert [name for name, _ in of_models("http://x", [alias, alias], 2.0)] == ["http://x"]


def metrics_text(tokens: int) -> str:
    metrics = Metrics()
    steps = StepTotals(2, "decode", 100 + tokens, 1.0 + tokens * 0.01, 0.9 + tokens * 0.009, 0.0, 0.0, 0.0)
    domain = DomainStatus("d1", 1, "", 2, 1, (0, 1), "serving", running=1)
    metrics.on_snapshot(
        Snapshot(0.0, "tp2", 0, 1, 1, (domain,), (), 10, 0, 10, steps=(steps,), rows_limit=64)
    )
    for _ in range(tokens):
        metrics.on_token("d1", 0.01, first=False)
    return metrics.render().decode()


def test_the_command_watches_a_server() -> None:
    looks = iter(range(0, 400, 100))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = metrics_text(next(looks)).encode() if self.path == "/metrics" else b""
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            result = CliRunner().invoke(cli, ["diagnose", url, "--seconds", "1"])
        finally:
            server.shutdown()
            thread.join()
    assert result.exit_code == 0, result.output
    assert "memory_bound" in result.output
    assert "1.0 tokens per step" in result.output


def test_the_command_reads_a_benchmark(tmp_path: Path) -> None:
    server = ServerFacts(
        "http://x", "demo", "dynamictp",
        metrics_before=parse_samples(metrics_text(0)), metrics_after=parse_samples(metrics_text(100)),
    )  # fmt: skip
    samples = (LayoutSample(0.5, "tp2", 1, 0), LayoutSample(1.0, "tp2", 1, 0))
    run = Run("mine", "now", server, ClientFacts(0.1, "m", "3"), 1.0, 1.0, (), samples=samples)
    other = replace(run, label="theirs", server=ServerFacts("http://y", "demo"))
    bench = Bench({}, 1, "", "", "exact", 0, 0, Slo(), (run, other), "0")
    write_json(bench, {}, tmp_path / "report.json")
    result = CliRunner().invoke(cli, ["diagnose", str(tmp_path / "report.json"), "--json"])
    assert result.exit_code == 0, result.output
    plain = json.loads(result.output)
    assert (plain["target"], plain["verdict"], plain["figures"]["tokens"]) == ("mine", "memory_bound", 100)
    write_json(replace(bench, runs=(other,)), {}, tmp_path / "other.json")
    refused = CliRunner().invoke(cli, ["diagnose", str(tmp_path / "other.json")])
    assert "no run with metrics" in str(refused.exception)
