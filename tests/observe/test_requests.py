"""Figures of requests, the names of other servers, and what the system says."""

from __future__ import annotations

import os

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from dynamictp.observe.aliases import VLLM, vllm_aliases
from dynamictp.observe.families import Histogram, counters, gauge, histogram, quantile
from dynamictp.observe.machine import MachineMetrics, MachineSources, Placed
from dynamictp.observe.requests import MAX_TENANTS, OTHER, Finished, RequestMetrics, class_of, failure_of
from dynamictp.server.metrics import Metrics


def finished(**changes: object) -> Finished:
    values: dict[str, object] = {
        "reason": "length",
        "arrival_s": 10.0,
        "first_token_s": 10.2,
        "last_token_s": 11.2,
        "end_s": 11.3,
        "prompt_tokens": 20,
        "output_tokens": 11,
        "tp": 2,
    }
    return Finished(**{**values, **changes})  # type: ignore[arg-type]


def samples(families: list[Metric]) -> dict[str, float]:
    return {
        sample.name
        + "".join(f"{{{key}={value}}}" for key, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_request_counts_once_in_each_figure() -> None:
    metrics = RequestMetrics()
    metrics.on_queued(0.05)
    metrics.on_first_token(20, 0.2, "a")
    metrics.on_finish(finished(tenant="a", handovers=2, cached_tokens=16))
    metrics.on_failure(failure_of(503))
    seen = samples(list(metrics.collect()))
    assert seen["dtp_request_success_total{finish_reason=length}"] == 1
    assert seen["dtp_request_failures_total{reason=unavailable}"] == 1
    assert seen["dtp_request_moves_total{kind=handover}"] == 2
    assert seen["dtp_request_queue_time_seconds_sum"] == pytest.approx(0.05)
    assert seen["dtp_e2e_request_latency_seconds_sum"] == pytest.approx(1.3)
    assert seen["dtp_time_per_output_token_seconds_sum{class=short}"] == pytest.approx(0.1)
    assert seen["dtp_class_time_to_first_token_seconds_count{class=short}"] == 1
    assert seen["dtp_class_time_to_first_token_seconds_count{class=long}"] == 0
    assert seen["dtp_prompt_tokens_total"] == 20
    assert seen["dtp_prompt_tokens_cached_total"] == 16
    assert seen["dtp_tenant_generation_tokens_total{tenant=a}"] == 11
    assert seen["dtp_request_tp_degree_bucket{le=2.0}"] == 1


def test_one_token_has_no_time_per_token_and_long_prompts_a_class_of_their_own() -> None:
    metrics = RequestMetrics()
    metrics.on_finish(finished(output_tokens=1))
    metrics.on_first_token(512, 3.0)
    seen = samples(list(metrics.collect()))
    assert seen["dtp_time_per_output_token_seconds_count{class=short}"] == 0
    assert seen["dtp_class_time_to_first_token_seconds_count{class=long}"] == 1
    assert [class_of(511), class_of(512)] == ["short", "long"]


def test_crashes_are_counted_by_kind_and_the_last_one_is_dated() -> None:
    machine = MachineMetrics(wall=lambda: 1234.5)
    assert machine.last_crash is None
    machine.on_crash("worker")
    machine.on_crash("worker")
    seen = samples(list(machine.collect()))
    assert seen["dtp_process_crashes_total{process=worker}"] == 2
    assert seen["dtp_process_crashes_total{process=engine}"] == 0
    assert machine.last_crash == 1234.5


def test_tenants_beyond_the_limit_share_one_label() -> None:
    metrics = RequestMetrics()
    for index in range(3 * MAX_TENANTS):
        metrics.on_finish(finished(tenant=f"t{index}"))
    seen = samples(list(metrics.collect()))
    tenants = {name: value for name, value in seen.items() if name.startswith("dtp_tenant_requests_total")}
    assert len(tenants) == MAX_TENANTS + 1
    assert tenants[f"dtp_tenant_requests_total{{tenant={OTHER}}}"] == 2 * MAX_TENANTS


def test_quantiles_interpolate_within_a_bucket() -> None:
    values = Histogram((1, 2, 4))
    for value in (0.5, 1.5, 1.5, 3.0):
        values.observe(value)
    assert quantile(values.bounds, values.counts, 0.5) == pytest.approx(1.5)
    assert quantile(values.bounds, values.counts, 1.0) == 4
    assert quantile(values.bounds, (0, 0, 0, 0), 0.5) is None
    assert quantile(values.bounds, (0, 0, 0, 5), 0.5) == 4


def test_aliases_sum_over_labels_that_theirs_lack() -> None:
    times = Histogram((1, 2))
    times.observe(1.5)
    ours = [
        gauge("dtp_kv_cache_usage_ratio", "KV", 0.25),
        counters("dtp_generation_tokens", "t", ["domain"], [(("tp1@0",), 5), (("tp2@0,1",), 6)]),
        counters("dtp_request_success", "s", ["finish_reason"], [(("stop",), 1), (("length",), 2)]),
        histogram("dtp_time_to_first_token_seconds", "ttft", times),
    ]
    seen = samples(list(vllm_aliases(ours, "demo")))
    assert seen["vllm:kv_cache_usage_perc{model_name=demo}"] == 0.25
    assert seen["vllm:generation_tokens_total{model_name=demo}"] == 11
    assert seen["vllm:request_success_total{finished_reason=length}{model_name=demo}"] == 2
    assert seen["vllm:time_to_first_token_seconds_bucket{le=2.0}{model_name=demo}"] == 1
    assert seen["vllm:time_to_first_token_seconds_count{model_name=demo}"] == 1


def test_every_alias_stands_for_a_metric_there_is_and_the_text_can_be_read() -> None:
    metrics = Metrics()
    names = {family.name for family in metrics.collect()}
    assert {name for name, _ in VLLM} <= names
    metrics.alias_model = "demo"
    families = {family.name for family in text_string_to_metric_families(metrics.render().decode())}
    assert {alias.name for _, alias in VLLM} <= families


def test_every_help_text_asks_its_question() -> None:
    assert [family.name for family in Metrics().collect() if "?" not in family.documentation] == []


def test_machine_figures_of_living_processes_only() -> None:
    sources = MachineSources(
        processes=lambda: {"server": os.getpid(), "engine": None},
        devices=lambda: {0: Placed(os.getpid(), (0,)), 1: Placed(2**22 + 1, (10_000,))},
    )
    registry = CollectorRegistry()
    registry.register(_Collector(MachineMetrics(sources)))
    text = generate_latest(registry).decode()
    seen = samples(list(text_string_to_metric_families(text)))
    assert seen["dtp_process_resident_bytes{device=}{process=server}"] > 1e6
    assert "dtp_process_cpu_seconds_total{device=}{process=engine}" not in seen
    assert "dtp_process_cpu_seconds_total{device=1}{process=worker}" not in seen
    assert seen["dtp_device_cores_busy_seconds_total{device=0}"] > 0
    assert seen["dtp_device_cores_busy_seconds_total{device=1}"] == 0
    assert seen["dtp_node_memory_bytes{kind=available}"] <= seen["dtp_node_memory_bytes{kind=total}"]


class _Collector:
    def __init__(self, metrics: MachineMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return list(self._metrics.collect())
