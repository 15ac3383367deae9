"""Traces: the tree of a request and of a switch, and that nothing is imported while they are off."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from dynamictp.clock import ManualClock
from dynamictp.messages import SwitchStatus
from dynamictp.observe.tracing import ChoiceTrace, RequestTrace, Tracer
from tests.server.server_stack import Stack, running_stack

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="traces are an extra: pip install '.[tracing]'")


class Traced:
    """A tracer that keeps its spans."""

    def __init__(self, clock: Any) -> None:
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.exporter = InMemorySpanExporter()
        provider = sdk.TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = Tracer(provider, clock)

    @property
    def spans(self) -> list[Any]:
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> Any:
        (found,) = [span for span in self.spans if span.name == name]
        return found

    def tree(self) -> dict[str, set[str]]:
        """Names of children by the name of their parent."""
        names = {span.context.span_id: span.name for span in self.spans}
        found: dict[str, set[str]] = {}
        for span in self.spans:
            if span.parent is not None and span.parent.span_id in names:
                found.setdefault(names[span.parent.span_id], set()).add(span.name)
        return found


def seconds(span: Any) -> float:
    return (span.end_time - span.start_time) / 1e9


@pytest_asyncio.fixture
async def traced() -> AsyncIterator[tuple[Stack, Traced]]:
    async with running_stack() as stack:
        kept = Traced(stack.service.clock)
        stack.service.trace_with(kept.tracer)
        yield stack, kept


async def test_a_request_is_a_tree_under_the_trace_of_its_client(traced: tuple[Stack, Traced]) -> None:
    stack, kept = traced
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    response = await stack.http.post(
        "/v1/completions",
        json={"prompt": "hi", "max_tokens": 4},
        headers={"traceparent": parent, "x-request-id": "mine"},
    )
    assert response.status_code == 200
    assert kept.tree() == {
        "POST /v1/completions": {"generate"},
        "generate": {"queue", "prefill", "decode"},
    }
    root, generate = kept.named("POST /v1/completions"), kept.named("generate")
    assert f"{root.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    assert {span.attributes["request_id"] for span in kept.spans} == {"mine"}
    assert (generate.attributes["tp_domain_id"], generate.attributes["tp"]) == ("d1", 1)
    assert generate.attributes["gen_ai.usage.output_tokens"] == 4
    assert generate.attributes["finish_reason"] == "length"
    assert root.start_time <= generate.start_time <= generate.end_time <= root.end_time


async def test_each_choice_has_its_span(traced: tuple[Stack, Traced]) -> None:
    stack, kept = traced
    await stack.complete(max_tokens=3, n=3)
    assert [span.name for span in kept.spans].count("generate") == 3


async def test_a_switch_is_a_tree_of_its_phases_and_a_line_of_the_log(
    traced: tuple[Stack, Traced], caplog: pytest.LogCaptureFixture
) -> None:
    stack, kept = traced
    with caplog.at_level(logging.INFO, "dynamictp.server.switches"):
        await stack.http.put("/admin/layout", json={"layout": "tp2", "wait": "closed"})
    switch = kept.named("switch")
    assert {"proof", "commit", "drain", "close"} <= kept.tree()["switch"]
    assert (switch.attributes["from"], switch.attributes["to"]) == ("tp1", "tp2")
    assert (switch.attributes["reason"], switch.attributes["outcome"]) == ("admin", "closed")
    (line,) = [record.getMessage() for record in caplog.records if "outcome=closed" in record.getMessage()]
    assert f"switch_id={switch.attributes['switch_id']} from=tp1 to=tp2 reason=admin" in line
    assert "drain:3.0" in line


def test_times_are_those_of_the_request() -> None:
    clock = ManualClock(100.0)
    kept = Traced(clock)
    clock.advance(10.0)
    choice = ChoiceTrace("c-0", 100.0, 1.0, 103.0, 107.0, 5, 9, "stop")
    kept.tracer.request(RequestTrace("r", "/v1/completions", 99.5, True, [choice]))
    lengths = {span.name: round(seconds(span), 3) for span in kept.spans}
    assert lengths == {
        "POST /v1/completions": 10.5, "generate": 7.0, "queue": 1.0, "prefill": 2.0, "decode": 4.0
    }  # fmt: skip


def test_a_request_without_a_token_has_only_waited() -> None:
    clock = ManualClock(100.0)
    kept = Traced(clock)
    clock.advance(2.0)
    choice = ChoiceTrace("c-0", 100.0, 0.0, 0.0, 0.0, 5, 0, "error")
    kept.tracer.request(RequestTrace("r", "/v1/completions", 100.0, False, [choice]))
    assert kept.tree()["generate"] == {"queue"}
    assert seconds(kept.named("queue")) == pytest.approx(2.0, abs=1e-3)
    assert not kept.named("generate").status.is_ok


def test_a_failed_switch_says_why() -> None:
    kept = Traced(ManualClock(100.0))
    kept.tracer.switch(SwitchStatus("s1", "tp1", "tp2", "decide"))
    assert kept.spans == []
    kept.tracer.switch(
        SwitchStatus("s1", "tp1", "tp2", "proof", "failed", {"prepare_views": 4.0}, error="a worker ended")
    )
    switch = kept.named("switch")
    assert switch.attributes["error"] == "a worker ended"
    assert not switch.status.is_ok
    assert seconds(kept.named("prepare_views")) == pytest.approx(0.004, abs=1e-4)


def test_a_server_without_traces_does_not_import_them() -> None:
    code = (
        "import sys, dynamictp.server.launch, dynamictp.server.app\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
