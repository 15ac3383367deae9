"""Workloads for the cost model, from the benchmark's classes: one definition of `chat` for both."""

from __future__ import annotations

from dynamictp.bench.workload.classes import CLASSES, MIXES, TrafficClass, parse_mix
from dynamictp.cost.lengths import Lengths, RequestClass, Workload

FOUR_CLASSES = {
    "qa": "short prompt, short output",
    "chat": "short prompt, long output",
    "rag": "long prompt, short output",
    "code": "long prompt, long output",
}


def workload_names() -> tuple[str, ...]:
    return (*CLASSES, *MIXES)


def find_workload(text: str, scale: float = 1.0) -> Workload:
    """A class (`chat`), a mix (`chat-rag`), or classes with weights and lengths as `dynamictp bench` takes
    them (`chat=0.8,own(1500/4000:40/100)=0.2`). `scale` multiplies all lengths. Raises `ConfigError`.
    """
    return Workload(text, tuple(_request_class(kind, scale) for kind in parse_mix(text)))


def _request_class(kind: TrafficClass, scale: float) -> RequestClass:
    prompt, output = (
        Lengths(lengths.mean, lengths.p95).scaled(scale) for lengths in (kind.prompt, kind.output)
    )
    return RequestClass(kind.name, prompt, output, kind.weight)
