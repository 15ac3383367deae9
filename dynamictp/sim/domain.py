"""One domain on virtual time: continuous batching, chunked prefill, pages, preemption.

Its steps take what the cost model says. Decode steps between two changes of the batch are one event; a
change cuts that short at the next step boundary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol

from dynamictp.control.values import StepSample
from dynamictp.cost.hardware import EngineLimits
from dynamictp.cost.steps import StepModel
from dynamictp.layout import PlacedShape
from dynamictp.sim.loop import Event, EventLoop
from dynamictp.sim.requests import SimRequest

State = Literal["preparing", "serving", "draining", "closed"]
_LONGEST_RUN_S = 0.5
"""Decode steps of at most this long are one event, so that figures of running requests are fresh."""


@dataclass(slots=True)
class Run:
    """Steps in flight: `steps` equal ones from `start_s` on, `chunks` of prompts in the only one."""

    start_s: float
    step_s: float
    steps: int
    end: Event
    rows: int
    chunks: list[tuple[SimRequest, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a step's time depends on outside the domain."""

    model: StepModel
    sharers: int
    """Busy domains on the same devices, which take turns with it."""
    factor: float
    """Of this step: noise and faults."""
    active_devices: int


class Host(Protocol):
    """Who has the domain and is told what happens on it."""

    def surroundings(self, domain: SimDomain) -> Surroundings: ...

    def on_step(self, domain: SimDomain, sample: StepSample) -> None:
        """A step begins; `sample` says what it will have taken."""

    def breaks(self, domain: SimDomain) -> bool:
        """The domain failed in the step that would be complete now, and is taken apart."""

    def on_step_end(self, domain: SimDomain) -> None:
        """Steps are complete and none is in flight."""

    def on_finished(self, domain: SimDomain, request: SimRequest) -> None: ...

    def on_preempted(self, request: SimRequest) -> None: ...


class SimDomain:
    """Owner of the requests on one domain."""

    def __init__(
        self,
        epoch: int,
        placed: PlacedShape,
        loop: EventLoop,
        *,
        limits: EngineLimits,
        quota_tokens: float,
        host: Host,
    ) -> None:
        self.epoch, self.placed = epoch, placed
        self.state: State = "preparing"
        self.quota = quota_tokens
        self.used = 0.0
        """Tokens of pages, half a page more for each request."""
        self.busy_s = 0.0
        self.run: Run | None = None
        self._loop, self._limits = loop, limits
        self._host = host
        self._prefilling: dict[SimRequest, None] = {}
        self._decoding: dict[SimRequest, None] = {}
        self._joining: dict[SimRequest, None] = {}
        """Handed over while a step is in flight: they decode from the next one on."""
        self._ends: list[tuple[int, int, SimRequest]] = []
        self._order = count()
        self._steps = 0
        self._context = 0.0
        """Sum of the contexts of decoding requests."""

    # ------------------------------------------------------------ asked from outside

    @property
    def tp(self) -> int:
        return self.placed.shape.tp

    @property
    def devices(self) -> tuple[int, ...]:
        return self.placed.devices

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding) + len(self._joining)

    @property
    def rows_free(self) -> int:
        return self._limits.max_num_seqs - self.running

    @property
    def backlog(self) -> int:
        """Prompt tokens yet to be computed."""
        return sum(request.to_prefill for request in self._prefilling)

    @property
    def context_mean(self) -> float:
        return self._context / len(self._decoding) if self._decoding else 0.0

    def requests(self) -> Iterator[SimRequest]:
        yield from self._prefilling
        yield from self._decoding
        yield from self._joining

    def decoding(self) -> Iterator[tuple[SimRequest, int]]:
        """Requests that decode, with the tokens each has generated."""
        for request in self._decoding:
            yield request, request.generated + self._steps - request.joined

    def fits(self, request: SimRequest) -> bool:
        """Its known tokens have room. An empty domain takes any one request, as the engine's does."""
        return not self.running or self.used + self._pages(request) <= self.quota

    # ------------------------------------------------------------ requests come and go

    def add(self, request: SimRequest) -> None:
        """Bind a request; it decodes at once when all its tokens are computed."""
        self.used += self._pages(request)
        if not request.degrees or request.degrees[-1] != self.tp:
            request.degrees.append(self.tp)
        if request.to_prefill or not request.generated:
            self._prefilling[request] = None
        elif self.run is None:
            self._begin_decoding(request)
        else:
            self._joining[request] = None
        self.cut()

    def take(self, request: SimRequest) -> None:
        """Take a request off, between two steps; its computed tokens stay counted."""
        if request in self._decoding:
            del self._decoding[request]
            self._fold(request)
        else:
            self._prefilling.pop(request, None)
            self._joining.pop(request, None)
        self.used -= self._pages(request)

    def cut(self) -> None:
        """End the run at the next step boundary."""
        run = self.run
        if run is None or run.steps == 1:
            return
        done = max(1, math.ceil((self._loop.now() - run.start_s) / run.step_s - 1e-9))
        if done < run.steps:
            run.end.cancel()
            run.steps = done
            end_s = max(run.start_s + done * run.step_s, self._loop.now())
            run.end = self._loop.at(end_s, self._complete)

    def abort(self) -> None:
        """Forget the step in flight: the domain has failed."""
        if self.run is not None:
            self.run.end.cancel()
            self.run = None
        for request in tuple(self._joining):
            del self._joining[request]
            self._begin_decoding(request)

    # ------------------------------------------------------------ steps

    def start(self) -> None:
        """Begin the next step or run of steps, if there is work and none is in flight."""
        if self.run is not None or not self.running:
            return
        self._make_room()
        rows = len(self._decoding)
        around = self._host.surroundings(self)
        chunks = self._chunks(rows, around.model)
        tokens = sum(size for _, size in chunks)
        if not rows and not chunks:
            return
        step_s = self._step_s(rows, chunks, around.model) * around.factor * (1 + around.sharers)
        steps = 1 if chunks else self._decode_steps(rows, step_s)
        end = self._loop.after(steps * step_s, self._complete)
        self.run = Run(self._loop.now(), step_s, steps, end, rows, chunks)
        past = sum(request.computed * size for request, size in chunks) / tokens if tokens else 0.0
        self._host.on_step(
            self,
            StepSample(
                self.tp,
                step_s,
                rows,
                self.context_mean,
                tokens,
                past,
                exclusive=not around.sharers,
                active_devices=around.active_devices,
            ),
        )

    def _make_room(self) -> None:
        """Preempt the newest decoding requests until the next token of the others fits."""
        while len(self._decoding) > 1 and self.used + len(self._decoding) > self.quota:
            victim = next(reversed(self._decoding))
            self.take(victim)
            victim.computed = 0
            victim.recomputes += 1
            self._host.on_preempted(victim)

    def _chunks(self, rows: int, model: StepModel) -> list[tuple[SimRequest, int]]:
        if not self._prefilling:
            return []
        limits = self._limits
        budget = limits.max_batched_tokens - rows
        if rows and limits.max_step_s:
            each = model.base(limits.max_batched_tokens, 1.0).total_s / limits.max_batched_tokens
            left = limits.max_step_s - model.decode(rows, self.context_mean).total_s
            budget = min(budget, max(limits.page_tokens, int(left / each)))
        chunks = []
        for request in self._prefilling:
            size = min(request.to_prefill, budget)
            if size < 1:
                break
            chunks.append((request, size))
            budget -= size
        return chunks

    def _step_s(self, rows: int, chunks: list[tuple[SimRequest, int]], model: StepModel) -> float:
        tokens = sum(size for _, size in chunks)
        seconds = model.base(rows + tokens, rows + len(chunks)).total_s
        if rows:
            seconds += model.decode_attention_s(rows, self.context_mean)
        for request, size in chunks:
            seconds += model.prompt_attention_s(size, request.computed)
        return seconds

    def _decode_steps(self, rows: int, step_s: float) -> int:
        until_end = self._next_end() - self._steps
        room = (self.quota - self.used) / rows
        return max(1, min(until_end, int(room), int(_LONGEST_RUN_S / step_s)))

    def _next_end(self) -> int:
        while self._ends[0][2] not in self._decoding or self._ends[0][0] != self._end_of(self._ends[0][2]):
            heapq.heappop(self._ends)  # it left before its end
        return self._ends[0][0]

    @staticmethod
    def _end_of(request: SimRequest) -> int:
        return request.joined + request.output - request.generated

    def _complete(self) -> None:
        run = self.run
        assert run is not None
        self.run = None
        if self._host.breaks(self):
            return
        self.busy_s += run.steps * run.step_s
        if run.rows:
            self._steps += run.steps
            grown = float(run.rows * run.steps)
            self._context += grown
            self.used += grown
        for request, size in run.chunks:
            request.computed += size
            if not request.to_prefill:
                self._first_or_next_token(request)
        done = []
        while self._decoding and self._next_end() <= self._steps:
            request = heapq.heappop(self._ends)[2]
            self.take(request)
            done.append(request)
        for request in done:
            self._end(request)
        for request in tuple(self._joining):
            del self._joining[request]
            self._begin_decoding(request)
        self._host.on_step_end(self)

    def _first_or_next_token(self, request: SimRequest) -> None:
        del self._prefilling[request]
        request.generated += 1
        self.used += 1
        if request.first_token_s is None:
            request.first_token_s = self._loop.now()
        if request.generated >= request.output:
            self.used -= self._pages(request)
            self._end(request)
        else:
            self._begin_decoding(request)

    def _end(self, request: SimRequest) -> None:
        request.finished_s = self._loop.now()
        self._host.on_finished(self, request)

    def _begin_decoding(self, request: SimRequest) -> None:
        self._decoding[request] = None
        request.joined = self._steps
        request.computed = request.length
        self._context += request.length
        heapq.heappush(self._ends, (self._end_of(request), next(self._order), request))

    def _fold(self, request: SimRequest) -> None:
        request.generated += self._steps - request.joined
        request.joined = -1
        request.computed = request.length
        self._context -= request.length

    def _pages(self, request: SimRequest) -> float:
        return request.length + self._limits.page_tokens / 2
