"""A Grafana dashboard over the exported metrics, as the JSON that Grafana imports.

A table of panels; the same queries can be pasted into any Prometheus front end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_METRIC = re.compile(r"\bdtp_[a-z0-9_]+")
_RATE = "[$__rate_interval]"
_HERE = 'instance=~"$instance"'
WIDTH, HEIGHT = 8, 7


@dataclass(frozen=True)
class Panel:
    """One graph: `(query, legend)` pairs. `@` in a query stands for the instance's selector."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    stacked: bool = False
    text: str = ""


def _quantiles(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(
        (
            f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{@}}{_RATE})))",
            f"P{100 * q:g}{legend}",
        )
        for q in (0.5, 0.95, 0.99)
    )


def _p95(metric: str, by: str) -> tuple[tuple[str, str], ...]:
    return _quantiles(metric, by)[1:2]


def _total(metric: str) -> str:
    return f"sum(rate({metric}{{@}}{_RATE}))"


def _rate(metric: str, by: str, selector: str = "") -> str:
    inside = f"@, {selector}" if selector else "@"
    return f"sum by ({by}) (rate({metric}{{{inside}}}{_RATE}))"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Users",
        (
            Panel("Time to first token", _quantiles("dtp_time_to_first_token_seconds"), "s"),
            Panel("Time between tokens", _quantiles("dtp_inter_token_latency_seconds"), "s"),
            Panel("Whole answers", _quantiles("dtp_e2e_request_latency_seconds"), "s"),
            Panel(
                "Requests finished, failed",
                (
                    (_rate("dtp_request_success_total", "finish_reason"), "{{finish_reason}}"),
                    (_rate("dtp_request_failures_total", "reason"), "{{reason}}"),
                ),
                "reqps",
            ),
            Panel("TTFT P95 by class", _p95("dtp_class_time_to_first_token_seconds", "class"), "s"),
            Panel("TTFT P95 by tenant", _p95("dtp_tenant_time_to_first_token_seconds", "tenant"), "s"),
        ),
    ),
    (
        "Layout",
        (
            Panel(
                "Degree now, degree used",
                (
                    ("dtp_tp_degree{@}", "layout"),
                    (
                        f"sum(rate(dtp_request_tp_degree_sum{{@}}{_RATE})) / "
                        f"sum(rate(dtp_request_tp_degree_count{{@}}{_RATE}))",
                        "used by requests that ended",
                    ),
                ),
                text="A drain shows as a difference, never as a drop.",
            ),
            Panel(
                "Switches",
                ((f"sum by (from, to, reason, outcome) (increase(dtp_tp_switches_total{{@}}{_RATE}))",
                  "{{from}} → {{to}} {{reason}} {{outcome}}"),),
            ),
            Panel("Phases of switches, P95", _p95("dtp_tp_switch_phase_seconds", "phase"), "s"),
            Panel("Requests by domain", (("dtp_domain_requests_running{@}", "{{domain}}"),), stacked=True),
            Panel("Domains by state", (("dtp_domains{@}", "{{state}}"),), stacked=True),
            Panel("Tokens by domain", ((_rate("dtp_generation_tokens_total", "domain"), "{{domain}}"),),
                  stacked=True),
        ),
    ),
    (
        "Planner",
        (
            Panel("Load and capacity", (('dtp_planner_figure{@, figure=~"load|slow_load"}', "{{figure}}"),)),
            Panel("Measured / predicted steps", (("dtp_calibration_ratio{@}", "tp{{tp}} {{phase}}"),)),
            Panel("Decisions", ((_rate("dtp_decisions_total", "reason"), "{{reason}}"),), stacked=True),
        ),
    ),
    (
        "Engine",
        (
            Panel(
                "Requests",
                (
                    ("dtp_num_requests_running{@}", "running"),
                    ("dtp_num_requests_waiting{@}", "waiting"),
                    ("dtp_rows_total{@}", "slots"),
                ),
            ),
            Panel("Waiting for room", _quantiles("dtp_request_queue_time_seconds"), "s"),
            Panel("Batch efficiency", (("dtp_batch_efficiency_ratio{@}", "efficiency"),), "percentunit"),
            Panel(
                "Tokens",
                (
                    (f"sum(rate(dtp_generation_tokens_total{{@}}{_RATE}))", "output"),
                    (f"sum(rate(dtp_prompt_tokens_total{{@}}{_RATE}))", "prompt"),
                ),
            ),
            Panel(
                "Where the time of steps goes",
                ((_rate("dtp_step_seconds_total", "part"), "{{part}}"),),
                "s",
                stacked=True,
                text="weights, attention: memory or arithmetic; wait: communication; host: between steps.",
            ),
            Panel(
                "Tokens per step",
                ((f"{_total('dtp_generation_tokens_total')} / {_total('dtp_steps_total')}",
                  "output tokens"),),
            ),
            Panel("KV pages in use", (("dtp_kv_cache_usage_ratio{@}", "used"),), "percentunit"),
            Panel(
                "Prefix cache",
                ((f"sum(rate(dtp_prefix_cache_hits_total{{@}}{_RATE})) / "
                  f"sum(rate(dtp_prefix_cache_queries_total{{@}}{_RATE}))", "hit rate"),),
                "percentunit",
            ),
            Panel(
                "Preemptions, evictions",
                (
                    (f"rate(dtp_preemptions_total{{@}}{_RATE})", "preemptions"),
                    (f"rate(dtp_prefix_cache_evictions_total{{@}}{_RATE})", "evicted blocks"),
                ),
            ),
        ),
    ),
    (
        "Devices",
        (
            Panel("Busy", ((_rate("dtp_device_busy_seconds_total", "device"), "{{device}}"),), "percentunit"),
            Panel(
                "Cores of the pool",
                (
                    (f"sum(rate(dtp_pool_cores_busy_seconds_total{{@}}{_RATE}))", "busy, for whomever"),
                    (f"sum(rate(dtp_process_cpu_seconds_total{{@}}{_RATE}))", "used by this server"),
                    (f"sum(rate(dtp_node_cpu_steal_seconds_total{{@}}{_RATE}))", "stolen"),
                ),
            ),
            Panel(
                "Memory of processes",
                (("dtp_process_resident_bytes{@}", "{{process}} {{device}}"),),
                "bytes",
            ),
        ),
    ),
    (
        "Business",
        (
            Panel("Prompt lengths", _quantiles("dtp_request_prompt_tokens")),
            Panel("Answer lengths", _quantiles("dtp_request_generation_tokens")),
            Panel(
                "Tokens by tenant",
                ((_rate("dtp_tenant_generation_tokens_total", "tenant"), "{{tenant}}"),),
                stacked=True,
            ),
        ),
    ),
)  # fmt: skip


def queries() -> Iterator[str]:
    """Every query of the dashboard."""
    for _, panels in ROWS:
        for panel in panels:
            for query, _ in panel.queries:
                yield query.replace("@", _HERE)


def metrics_in(query: str) -> set[str]:
    """Names of our metrics that a query reads."""
    return set(_METRIC.findall(query))


def dashboard() -> dict[str, Any]:
    """For Grafana's import; it asks for the data source."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        panels.append({
            "type": "row", "title": title, "collapsed": False, "id": len(panels) + 1, "panels": [],
            "gridPos": {"x": 0, "y": top, "w": 24, "h": 1},
        })  # fmt: skip
        top += 1
        for index, panel in enumerate(row):
            x, y = index % 3 * WIDTH, top + index // 3 * HEIGHT
            panels.append(_panel(panel, len(panels) + 1, x, y))
        top += -(-len(row) // 3) * HEIGHT
    return {
        "title": "DynamicTP",
        "uid": "dynamictp",
        "tags": ["dynamictp"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "__inputs": [{"name": "DS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}],
        "templating": {
            "list": [
                {
                    "name": "instance",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${DS}"},
                    "query": "label_values(dtp_num_requests_running, instance)",
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "current": {"text": "All", "value": "$__all"},
                }
            ]
        },
        "panels": panels,
    }


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": panel.text,
        "datasource": {"type": "prometheus", "uid": "${DS}"},
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "targets": _targets(panel.queries),
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {
                    "fillOpacity": 30 if panel.stacked else 0,
                    "stacking": {"mode": "normal" if panel.stacked else "none"},
                },
            },
            "overrides": [],
        },
    }


def _targets(pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {"refId": chr(ord("A") + index), "expr": query.replace("@", _HERE), "legendFormat": legend}
        for index, (query, legend) in enumerate(pairs)
    ]
