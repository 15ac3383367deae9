"""`/metrics`: names, labels and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamictp.bench.unmetered import OFF, ON, SwitchedMetrics, SwitchedRequests, set_counting
from dynamictp.control.values import Alarm, Decision, Reason
from dynamictp.messages import DeviceStatus, DomainStatus, SamplingParams, Snapshot, StepTotals, SwitchStatus
from dynamictp.observe.machine import MachineMetrics, MachineSources, Placed
from dynamictp.observe.requests import RequestMetrics
from dynamictp.server.metrics import Metrics
from dynamictp.testing.fake_engine import ScriptedError
from tests.server.server_stack import Stack, running_stack

FIRST_SET = {
    "dtp_prompt_tokens_waiting",
    "dtp_requests_refused",
    "dtp_num_requests_running",
    "dtp_num_requests_waiting",
    "dtp_rows_used",
    "dtp_kv_pages_used",
    "dtp_kv_pages_total",
    "dtp_request_success",
    "dtp_tp_degree",
    "dtp_request_tp_degree",
    "dtp_generation_tokens",
    "dtp_steps",
    "dtp_step_seconds",
    "dtp_engine_step_seconds",
    "dtp_tp_switches",
    "dtp_tp_switch_phase_seconds",
    "dtp_time_to_first_token_seconds",
    "dtp_inter_token_latency_seconds",
    "dtp_e2e_request_latency_seconds",
}
PLANE_SET = {
    "dtp_alarm",
    "dtp_calibration_ratio",
    "dtp_decisions",
    "dtp_devices",
    "dtp_planner_devices",
    "dtp_planner_figure",
}


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def snapshot(domain: DomainStatus, running: int = 0) -> Snapshot:
    devices = (DeviceStatus(0, "serving", (domain.id,), 12.5, 100.0),)
    return Snapshot(0.0, "x", 4, running, running, (domain,), devices, 1, 2, 3)


def test_ranks_that_share_a_core_are_counted_of_serving_domains() -> None:
    metrics = Metrics()
    metrics.machine = MachineMetrics(
        MachineSources(devices=lambda: {d: Placed(None, (d % 2,)) for d in range(4)})
    )
    name = ("dtp_ranks_per_core", ())

    def seen(*domains: DomainStatus) -> float:
        metrics.on_snapshot(Snapshot(0.0, "x", 0, 0, 0, domains, (), 1, 2, 3))
        return samples(metrics.render().decode())[name]

    wide = DomainStatus("d1", 1, "", 4, 1, (0, 1, 2, 3), "serving")
    assert seen() == 0
    assert seen(wide) == 2
    assert seen(DomainStatus("d2", 1, "", 2, 1, (0, 1), "serving")) == 1
    assert seen(msgspec.structs.replace(wide, state="draining")) == 0


def test_labels_are_of_bounded_sets() -> None:
    """A new label needs a thought, and a row here."""
    of_few_words = {
        "alarm", "class", "figure", "finish_reason", "kind", "outcome", "part", "phase", "pool", "process",
        "reason", "state",
    }  # fmt: skip
    of_the_pool = {"device", "domain", "from", "to", "tp"}
    capped = {"tenant"}  # tests/observe/test_requests.py
    found = {label for metric in Metrics().collect() for label in getattr(metric, "_labelnames", ())}
    assert found == of_few_words | of_the_pool | capped


def test_domains_that_come_and_go_leave_no_series_of_their_own() -> None:
    metrics = Metrics()
    for number in range(3000):
        domain = DomainStatus(f"d{number}", number, "", 1, 1, (number % 2,), "serving", running=1)
        metrics.on_snapshot(snapshot(domain, 1))
        metrics.on_token(domain.id, 0.01, first=False)
        metrics.on_switch(SwitchStatus(f"s{number}", "tp1@0", "tp1@1", "close", "closed"))
    names = [name for name in samples(metrics.render().decode()) if "domain" in dict(name[1])]
    tokens = {dict(labels)["domain"] for name, labels in names if name == "dtp_generation_tokens_total"}
    assert tokens == {"tp1@0", "tp1@1"}
    assert len(names) <= 4
    assert len(metrics._placed) <= 1024
    assert len(metrics._switch_seen) <= 256


@pytest.fixture
def counting_again() -> Iterator[None]:
    yield
    set_counting(ON)


@pytest.mark.usefixtures("counting_again")
def test_a_server_whose_metrics_are_off_counts_nothing() -> None:
    for mine, theirs in ((SwitchedRequests, RequestMetrics), (SwitchedMetrics, Metrics)):
        for hook in [name for name in vars(theirs) if name.startswith("on_")]:
            assert getattr(mine, hook) is not getattr(theirs, hook), hook
    metrics = SwitchedMetrics()

    def counted() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        values = samples(metrics.render().decode())
        return {name: value for name, value in values.items() if "dtp_node" not in name[0]}

    def happen() -> None:
        metrics.on_token("d1", 0.1, first=True)
        metrics.on_snapshot(snapshot(DomainStatus("d1", 1, "", 1, 1, (0,), "serving"), 3))
        metrics.on_switch(SwitchStatus("s1", "tp1", "tp2", "close", "closed"))
        metrics.requests.on_arrival()
        metrics.requests.on_queued(0.1)
        metrics.requests.on_first_token(20, 0.2)
        metrics.requests.on_failure("error")

    before = counted()
    set_counting(OFF)
    happen()
    assert counted() == before
    set_counting(ON)
    happen()
    names = ("dtp_time_to_first_token_seconds_count", "dtp_num_requests_running", "dtp_requests_total")
    assert [counted()[name, ()] for name in names] == [1, 3, 1]


async def test_the_first_set_is_there_with_its_names(stack: Stack) -> None:
    await stack.complete(max_tokens=5)
    await stack.http.put("/admin/layout", json={"layout": "tp2", "wait": "closed"})
    await stack.complete(max_tokens=3, n=2)
    response = await stack.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name for family in text_string_to_metric_families(response.text)}
    assert families >= FIRST_SET | PLANE_SET
    values = samples(response.text)
    assert values["dtp_request_success_total", (("finish_reason", "length"),)] == 3
    assert values["dtp_generation_tokens_total", (("domain", "tp1@0"),)] == 5
    assert values["dtp_generation_tokens_total", (("domain", "tp2@0,1"),)] == 6
    assert values["dtp_tp_degree", (("pool", "default"),)] == 2
    assert values["dtp_request_tp_degree_bucket", (("le", "1.0"),)] == 1
    assert values["dtp_request_tp_degree_bucket", (("le", "+Inf"),)] == 3
    switch = (("from", "tp1"), ("outcome", "committed"), ("reason", "admin"), ("to", "tp2"))
    assert values["dtp_tp_switches_total", switch] == 1
    assert values["dtp_tp_switch_phase_seconds_count", (("phase", "drain"),)] == 1
    assert values["dtp_time_to_first_token_seconds_count", ()] == 3
    assert values["dtp_inter_token_latency_seconds_count", ()] == 4 + 2 * 2
    assert values["dtp_e2e_request_latency_seconds_count", ()] == 3
    assert values["dtp_kv_pages_total", (("device", "1"),)] == 512
    assert values["dtp_prompt_tokens_total", ()] == 3 * 2
    assert values["dtp_request_generation_tokens_sum", ()] == 5 + 2 * 3
    assert values["dtp_tp_switches_in_flight", ()] == 0
    assert values["dtp_domains", (("state", "serving"),)] == 1


async def test_a_request_that_fails_counts_by_its_reason() -> None:
    def script(prompt: Sequence[int], sampling: SamplingParams, position: int) -> int:
        raise ScriptedError("bad luck")

    async with running_stack(script) as stack:
        assert (await stack.post("/v1/completions", prompt="hi")).status_code == 500
        text = (await stack.http.get("/metrics")).text
    values = samples(text)
    assert values["dtp_request_failures_total", (("reason", "error"),)] == 1
    assert values["dtp_request_failures_total", (("reason", "cancelled"),)] == 0


def test_batch_efficiency_falls_when_requests_wait_beside_free_slots() -> None:
    metrics = Metrics()
    full = snapshot(DomainStatus("d1", 1, "", 1, 1, (0,), "serving"), running=6)
    for limit, expected in ((6, 1.0), (8, 0.75), (64, 0.6)):
        metrics.on_snapshot(msgspec.structs.replace(full, rows_limit=limit))
        assert samples(metrics.render().decode())["dtp_batch_efficiency_ratio", ()] == pytest.approx(expected)
    metrics.on_snapshot(msgspec.structs.replace(full, running=0, waiting=0))
    assert samples(metrics.render().decode())["dtp_batch_efficiency_ratio", ()] == 1


def test_the_parts_of_steps_add_up() -> None:
    metrics = Metrics()
    domain = DomainStatus("d1", 1, "", 2, 1, (0, 1), "serving")
    totals = StepTotals(2, "decode", 100, 0.8, weights_s=0.6, attention_s=0.05, wait_s=0.1, host_s=0.03)
    steps = (totals, StepTotals(1, "prefill", 1, 0.5, 0.0, 0.0, 0.0, 0.0))
    metrics.on_snapshot(msgspec.structs.replace(snapshot(domain), steps=steps, step_engine_us=150.0))
    values = samples(metrics.render().decode())
    decode = {
        dict(labels)["part"]: value
        for (name, labels), value in values.items()
        if name == "dtp_step_seconds_total" and ("phase", "decode") in labels
    }
    assert decode == pytest.approx(
        {"weights": 0.6, "attention": 0.05, "wait": 0.1, "other": 0.05, "host": 0.03}
    )
    assert values["dtp_steps_total", (("phase", "decode"), ("tp", "2"))] == 100
    prefill = (("part", "other"), ("phase", "prefill"), ("tp", "1"))
    assert values["dtp_step_seconds_total", prefill] == 0.5
    assert values["dtp_engine_step_seconds", ()] == pytest.approx(150e-6)


def test_tokens_of_a_domain_count_once_it_is_known() -> None:
    metrics = Metrics()
    metrics.on_token("d9", 0.1, first=True)
    assert "tp3@0,1,2" not in metrics.render().decode()
    metrics.on_snapshot(snapshot(DomainStatus("d9", 9, "", 3, 1, (0, 1, 2), "serving"), running=2))
    metrics.on_token("d9", 0.02, first=False)
    values = samples(metrics.render().decode())
    assert values["dtp_generation_tokens_total", (("domain", "tp3@0,1,2"),)] == 2
    assert values["dtp_num_requests_running", ()] == 2
    assert values["dtp_num_requests_waiting", ()] == 4
    # After an engine restart the same id may be another domain.
    metrics.on_token("d9", 0.02, first=False)
    metrics.on_snapshot(snapshot(DomainStatus("d9", 9, "", 1, 1, (0,), "draining")))
    metrics.on_token("d9", 0.02, first=False)
    values = samples(metrics.render().decode())
    assert values["dtp_generation_tokens_total", (("domain", "tp3@0,1,2"),)] == 3
    assert values["dtp_generation_tokens_total", (("domain", "tp1@0"),)] == 1
    assert values["dtp_tp_degree", (("pool", "default"),)] == 0


def test_buckets_are_inclusive_and_a_switch_counts_once() -> None:
    metrics = Metrics()
    metrics.on_token("d1", 0.25, first=True)
    for status in (
        SwitchStatus("s1", "tp1", "tp2", "proof", "", {"proof": 10.0}),
        SwitchStatus("s1", "tp1", "tp2", "commit", "committed", {"proof": 10.0, "commit": 1.0}),
        SwitchStatus("s1", "tp1", "tp2", "close", "closed", {"proof": 10.0, "commit": 1.0}),
        SwitchStatus("s2", "tp2", "tp1", "prepare_views", "failed", reason="slo"),
    ):
        metrics.on_switch(status)
    values = samples(metrics.render().decode())
    assert values["dtp_time_to_first_token_seconds_bucket", (("le", "0.25"),)] == 1
    assert values["dtp_time_to_first_token_seconds_bucket", (("le", "0.1"),)] == 0
    assert values["dtp_tp_switch_phase_seconds_count", (("phase", "proof"),)] == 1
    outcomes = {
        dict(labels)["outcome"]: value
        for (name, labels), value in values.items()
        if name == "dtp_tp_switches_total"
    }
    assert outcomes == {"committed": 1, "failed": 1}


def test_the_planner_tells_its_figures_and_what_it_learnt() -> None:
    metrics = Metrics()
    decision = Decision(
        1.0, "tp2", Reason.GROW_PREDICTED, "tp2", Reason.GROW_PREDICTED, 2, reserve=2,
        figures={"load": 0.9}, alarms=(Alarm.FLAPPING,),
    )  # fmt: skip
    metrics.plane.on_decision(decision, ((2, "decode", 1.25),))
    values = samples(metrics.render().decode())
    assert values["dtp_planner_figure", (("figure", "load"),)] == 0.9
    assert values["dtp_calibration_ratio", (("phase", "decode"), ("tp", "2"))] == 1.25
    assert values["dtp_alarm", (("alarm", "flapping"),)] == 1
    assert values["dtp_decisions_total", (("reason", "grow_predicted"),)] == 1


def test_kv_usage_is_that_of_the_fullest_serving_domain() -> None:
    metrics = Metrics()
    full = DomainStatus("d1", 1, "", 1, 1, (0,), "serving", kv_pages_used=90, kv_pages_cap=100)
    empty = DomainStatus("d2", 2, "", 1, 1, (1,), "serving", kv_pages_used=0, kv_pages_cap=100)
    old = DomainStatus("d0", 0, "", 2, 1, (0, 1), "draining", kv_pages_used=200, kv_pages_cap=200)
    metrics.on_snapshot(msgspec.structs.replace(snapshot(full), domains=(old, full, empty)))
    assert samples(metrics.render().decode())["dtp_kv_cache_usage_ratio", ()] == 0.9
