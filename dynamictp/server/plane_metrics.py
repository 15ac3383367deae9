"""Metrics of the control plane: decisions, alarms, device states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dynamictp.control.calibrate import Ratios
from dynamictp.control.pool import DeviceState
from dynamictp.control.values import Alarm, Decision
from dynamictp.observe.families import gauges


class PlaneMetrics:
    """Owner of the counts of decisions. `device_states` is asked at scrape time."""

    def __init__(self) -> None:
        self._decisions: Counter[str] = Counter()
        self._last: Decision | None = None
        self._ratios: Ratios = ()
        self.device_states: Callable[[], Mapping[int, DeviceState]] | None = dict
        """None where the pool's states are shown once for several models."""

    def on_decision(self, decision: Decision, ratios: Ratios = ()) -> None:
        """`ratios`: measured / predicted time of steps, as the decision saw it."""
        self._decisions[decision.reason.value] += 1
        self._last = decision
        self._ratios = ratios

    def collect(self) -> Iterator[Metric]:
        last = self._last
        decisions = CounterMetricFamily(
            "dtp_decisions",
            "Decisions of the planner. Why does the layout change, or stay?",
            labels=["reason"],
        )
        for reason, count in self._decisions.items():
            decisions.add_metric([reason], count)
        yield decisions
        yield GaugeMetricFamily(
            "dtp_planner_devices",
            "Devices that the planner's forecast needs. Does it ask for more than there are?",
            value=last.reserve if last is not None else 0,
        )
        yield gauges(
            "dtp_planner_figure",
            "What the last decision was based on. Why does the planner think so? (docs/control.md)",
            "figure",
            last.figures if last is not None else {},
        )
        ratios = GaugeMetricFamily(
            "dtp_calibration_ratio",
            "Measured / predicted time of a step, as learnt. Is the cost model right about this machine?",
            labels=["tp", "phase"],
        )
        for tp, phase, ratio in self._ratios:
            ratios.add_metric([str(tp), phase], ratio)
        yield ratios
        alarms = GaugeMetricFamily(
            "dtp_alarm",
            "1 while the last decision raised it. Is the target out of reach, "
            "a calibration at its limit, or the layout flapping?",
            labels=["alarm"],
        )
        for alarm in Alarm:
            alarms.add_metric([alarm.value], float(last is not None and alarm in last.alarms))
        yield alarms
        if self.device_states is not None:
            yield from device_states(self.device_states())


def device_states(found: Mapping[int, DeviceState]) -> Iterator[Metric]:
    """How many devices are in each state."""
    states = Counter(state.value for state in found.values())
    devices = GaugeMetricFamily(
        "dtp_devices", "Devices by state. Is something leased, or waking up?", labels=["state"]
    )
    for state in DeviceState:
        devices.add_metric([state.value], states[state.value])
    yield devices
