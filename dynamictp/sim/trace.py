"""A simulation as a Chrome trace (chrome://tracing, ui.perfetto.dev): domains on devices, switches, load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from dynamictp.sim.outcome import CaseResult, Outcome

_US = 1e6
_SWITCHES = 1000
"""Track of the switches, below those of the devices."""

Event = dict[str, Any]


def chrome_trace(outcome: Outcome) -> bytes:
    """JSON: a process for each configuration, of the first seed. Times in microseconds of virtual time."""
    events = [
        event
        for pid, name in enumerate(outcome.configurations, 1)
        for event in _process(outcome.of(name)[0], pid)
    ]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}) + b"\n"


def _process(result: CaseResult, pid: int) -> Iterator[Event]:
    yield _named("process_name", result.configuration, pid)
    used = sorted({device for life in result.domains for device in life.devices})
    for device in used:
        yield _named("thread_name", f"device {device}", pid, device)
    yield _named("thread_name", "switches", pid, _SWITCHES)
    yield from _domains(result, pid)
    for switch in result.switches:
        end_s = switch.committed_s or switch.began_s
        yield _span(
            f"{switch.from_layout} → {switch.to_layout}", pid, _SWITCHES, switch.began_s, end_s,
            reason=switch.reason, forced=switch.forced, outcome=switch.outcome, id=switch.id,
        )  # fmt: skip
    for sample in result.samples:
        for name, value in (
            ("arrivals/s", sample.arrivals_per_s),
            ("devices held", sample.devices),
            ("running", sample.running),
            ("waiting", sample.waiting),
        ):
            yield {"name": name, "ph": "C", "pid": pid, "ts": sample.t_s * _US, "args": {name: value}}


def _domains(result: CaseResult, pid: int) -> Iterator[Event]:
    """A domain's states, on each of its devices."""
    for life in result.domains:
        end_s = life.closed_s if life.closed_s is not None else result.end_s
        serving_s = life.serving_s if life.serving_s is not None else end_s
        draining_s = life.draining_s if life.draining_s is not None else end_s
        states = (
            ("preparing", life.opened_s, serving_s),
            ("serving", serving_s, draining_s),
            ("draining", draining_s, end_s),
        )
        for state, begin_s, until_s in states:
            if until_s > begin_s:
                for device in life.devices:
                    name = f"{life.shape} {state}"
                    yield _span(name, pid, device, begin_s, until_s, domain=f"d{life.epoch}")


def _span(name: str, pid: int, tid: int, begin_s: float, end_s: float, **args: object) -> Event:
    return {
        "name": name, "ph": "X", "pid": pid, "tid": tid, "ts": begin_s * _US, "dur": (end_s - begin_s) * _US,
        "args": args,
    }  # fmt: skip


def _named(kind: str, name: str, pid: int, tid: int = 0) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
