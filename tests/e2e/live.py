"""What the end-to-end tests share: polling with a deadline, metrics, streams over plain HTTP, the CLI."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 60.0


def until(
    condition: Callable[[], Any],
    what: str,
    deadline_s: float = TIMEOUT_S,
    otherwise: Callable[[], object] = lambda: "",
) -> None:
    """Poll until the condition holds; `otherwise`: what a failure should show. The deadline is a guard, no
    expectation: it only costs time where the test fails."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"after {deadline_s:g} s not yet: {what} {otherwise()}"
        time.sleep(0.02)


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dynamictp", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@dataclass
class Stream:
    """What a stream has brought so far."""

    headers: httpx.Headers
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @property
    def text(self) -> str:
        return "".join(choice["text"] for event in self.events for choice in event.get("choices", ()))

    @property
    def tokens(self) -> list[int]:
        choices = [choice for event in self.events for choice in event.get("choices", ())]
        return [token for choice in choices for token in choice.get("token_ids") or ()]

    @property
    def logprobs(self) -> list[float]:
        found = [choice.get("logprobs") for event in self.events for choice in event.get("choices", ())]
        return [value for part in found if part for value in part["token_logprobs"]]

    @property
    def served(self) -> dict[str, Any]:
        """The first choice's `dynamictp` entry."""
        entry: dict[str, Any] = self.events[-1]["dynamictp"]["choices"][0]
        return entry


class Api:
    """A client of one server, without any retries. A context manager."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def complete(self, prompt: str | list[int], max_tokens: int = 4, **more: Any) -> dict[str, Any]:
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    @contextmanager
    def stream(self, prompt: str, max_tokens: int, **more: Any) -> Iterator[tuple[Stream, Iterator[None]]]:
        """A running stream, and an iterator that takes one event at a time into it."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, **more}
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            stream = Stream(response.headers)
            yield stream, _take(response, stream)

    def tokenize(self, text: str) -> list[int]:
        tokens: list[int] = self.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        return tokens

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of that name which carry these labels (`from` as `from_`)."""
        wanted = {(key.rstrip("_"), value) for key, value in labels.items()}
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = (sample for family in families for sample in family.samples)
        return sum(s.value for s in samples if s.name == name and wanted <= s.labels.items())

    def in_use(self) -> dict[str, float]:
        """What live requests hold; empty at rest."""
        names = ("dtp_rows_used", "dtp_kv_pages_used", "dtp_num_requests_running", "dtp_num_requests_waiting")
        return {name: value for name in names if (value := self.metric(name))}

    def layout(self) -> dict[str, Any]:
        state: dict[str, Any] = self.http.get("/admin/layout").json()
        return state

    def put_layout(self, layout: str, **more: Any) -> httpx.Response:
        return self.http.put("/admin/layout", json={"layout": layout, **more})

    def set_layout(self, layout: str) -> None:
        """Switch and wait until old domains are closed."""
        response = self.put_layout(layout, wait="closed")
        assert response.status_code == 200, response.text
        until(lambda: self.layout()["observed"] == layout, f"layout {layout} observed")


def _take(response: httpx.Response, stream: Stream) -> Iterator[None]:
    for line in response.iter_lines():
        if line == "data: [DONE]":
            stream.done = True
        elif line:
            stream.events.append(json.loads(line.removeprefix("data: ")))
            yield
