"""`/metrics` of a server with several models: each model's series with its name, the machine's once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from dynamictp.server.plane_metrics import device_states
from dynamictp.server.roster import Roster

LABEL = "model_name"
"""As vLLM labels its metrics."""


class RosterMetrics(Collector):
    """Everything of all models. Asked at scrape time."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing to declare ahead: the registry must not collect at registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """A family once, with the samples of every model."""
        merged: dict[str, Metric] = {}
        for service in self._roster.services:
            for family in service.metrics.collect():
                _add(merged, family, {LABEL: service.model})
        for family in self._roster.machine.collect():
            _add(merged, family, {})
        for family in device_states(self._roster.shares.desk.states()):
            _add(merged, family, {})
        return iter(merged.values())


def _add(merged: dict[str, Metric], family: Metric, labels: dict[str, str]) -> None:
    whole = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
    whole.samples.extend(sample._replace(labels={**labels, **sample.labels}) for sample in family.samples)
