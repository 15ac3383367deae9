"""One domain on virtual time: continuous batching, chunked prefill, pages, preemption.

Its steps take what the cost model says. Decode steps between two changes of the batch are one event (the
coarse grain); a change cuts that short at a step boundary. As in the engine, steps are planned ahead: who
arrives beside running requests begins after the step in flight and those planned behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, Protocol

from dynamictp.control.values import StepSample
from dynamictp.cost.hardware import EngineLimits
from dynamictp.layout import PlacedShape
from dynamictp.sim.loop import Event, EventLoop
from dynamictp.sim.requests import SimRequest
from dynamictp.sim.steptimes import StepTimes

State = Literal["preparing", "serving", "draining", "closed"]
LONGEST_RUN_S = 1.0
"""Decode steps of at most this long are one event: contexts grow meanwhile."""


@dataclass(slots=True)
class Run:
    """Steps in flight: `steps` equal ones from `start_s` on, `chunks` of prompts in the only one."""

    start_s: float
    step_s: float
    steps: int
    end: Event
    rows: int
    context: float
    """Sum of the contexts of the rows when it began, tokens."""
    sharers: int = 0
    tokens: int = 0
    """Of prompts."""
    chunks: list[tuple[SimRequest, int]] = field(default_factory=list)

    def done(self, now: float) -> int:
        """Steps that are complete at `now`, while it is in flight."""
        return min(int((now - self.start_s) / self.step_s + 1e-9), self.steps - 1)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a step's time depends on outside the domain."""

    times: StepTimes
    sharers: int
    """Busy domains on the same devices, which take turns with it."""
    factor: float
    """Of this step: noise and faults."""
    active_devices: int


class Host(Protocol):
    """Who has the domain and is told what happens on it."""

    def surroundings(self, domain: SimDomain) -> Surroundings: ...

    def wants_sample(self, domain: SimDomain, *, prefill: bool) -> bool:
        """A measured step of that kind is asked for."""

    def on_sample(self, domain: SimDomain, sample: StepSample) -> None:
        """A step begins; `sample` says what it will have taken."""

    def on_work(self, domain: SimDomain, run: Run) -> None:
        """Steps are complete."""

    def on_prompt_token(self, domain: SimDomain, request: SimRequest) -> None:
        """A prompt (or what had to be computed again) is complete and brought a token."""

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
        longest_run_s: float = LONGEST_RUN_S,
    ) -> None:
        """`longest_run_s` 0: every step is an event of its own (the single-step grain)."""
        self.epoch, self.placed = epoch, placed
        self.state: State = "preparing"
        self.quota = quota_tokens
        self.used = 0.0
        """Tokens of pages, half a page more for each request."""
        self.run: Run | None = None
        self.backlog = 0
        """Prompt tokens yet to be computed."""
        self._loop, self._limits = loop, limits
        self._host = host
        self._prefilling: dict[SimRequest, None] = {}
        self._decoding: dict[SimRequest, None] = {}
        self._joining: dict[SimRequest, None] = {}
        """Handed over while a step is in flight: they decode from the next one on."""
        self._ends: list[tuple[int, int, SimRequest]] = []
        self._order = count()
        self._steps = 0
        """Decode steps that are complete."""
        self._next = 0
        """Number of the next step to begin, of any kind."""
        self._longest_run_s = longest_run_s
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
    def decoders(self) -> int:
        """Requests past their first token."""
        return len(self._decoding)

    @property
    def rows_free(self) -> int:
        return self._limits.max_num_seqs - self.running

    @property
    def context_mean(self) -> float:
        return self._context / len(self._decoding) if self._decoding else 0.0

    def requests(self) -> Iterator[SimRequest]:
        yield from self._prefilling
        yield from self._decoding
        yield from self._joining

    def decoding(self) -> Iterator[tuple[SimRequest, int]]:
        """Requests that decode, with the tokens each has generated."""
        run = self.run
        steps = self._steps + (run.done(self._loop.now()) if run is not None and run.rows else 0)
        for request in self._decoding:
            yield request, request.generated + steps - request.joined

    def settled(self) -> Iterator[tuple[SimRequest, int]]:
        """Requests with the tokens that each has from steps that are complete."""
        for request in self.requests():
            more = self._steps - request.joined if request in self._decoding else 0
            yield request, request.generated + more

    def held_tokens(self) -> float:
        """Tokens of pages of its requests, counted one by one."""
        return sum(r.prompt + tokens + self._limits.page_tokens / 2 for r, tokens in self.settled())

    def unserved(self) -> Iterator[SimRequest]:
        """Requests without a first token."""
        return (request for request in self._prefilling if request.first_token_s is None)

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
            request.ready = self._ready()
            self.backlog += request.to_prefill
            self._prefilling[request] = None
        elif self.run is None:
            self._begin_decoding(request)
        else:
            self._joining[request] = None
        self.cut()

    def _ready(self) -> int:
        """The first step that a request which comes now may be part of."""
        run, ahead = self.run, self._limits.steps_ahead
        if run is None:
            return self._next + (ahead if self._decoding or self._prefilling else 0)
        return self._next - run.steps + run.done(self._loop.now()) + 1 + ahead

    def take(self, request: SimRequest) -> None:
        """Take a request off, between two steps; its computed tokens stay counted."""
        if request in self._decoding:
            del self._decoding[request]
            self._fold(request)
        elif request in self._prefilling:
            del self._prefilling[request]
            self.backlog -= request.to_prefill
        else:
            self._joining.pop(request, None)
        self.used -= self._pages(request)

    def cut(self, ahead: int | None = None) -> None:
        """End the run where who came just now may begin; `ahead` 0: at the next step boundary."""
        run = self.run
        if run is None or run.steps == 1:
            return
        done = run.done(self._loop.now()) + 1 + (self._limits.steps_ahead if ahead is None else ahead)
        if done < run.steps:
            run.end.cancel()
            self._next -= run.steps - done
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
        if self.run is not None or not (self._decoding or self._prefilling):
            return
        self._make_room()
        rows = len(self._decoding)
        around = self._host.surroundings(self)
        chunks, later = self._chunks(rows, around.times)
        if not rows and not chunks:
            if not self._prefilling:
                return
            # Nothing was planned ahead: it begins at once.
            self._next = later
            chunks, later = self._chunks(rows, around.times)
        tokens = sum([size for _, size in chunks])
        step_s, steps = self._lengths(rows, chunks, tokens, later, around)
        now = self._loop.now()
        end = self._loop.at(now + steps * step_s, self._complete)
        self.run = Run(now, step_s, steps, end, rows, self._context, around.sharers, tokens, chunks)
        self._next += steps
        if self._host.wants_sample(self, prefill=tokens > 0):
            past = sum(request.computed * size for request, size in chunks) / tokens if tokens else 0.0
            self._host.on_sample(
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

    def _lengths(
        self,
        rows: int,
        chunks: list[tuple[SimRequest, int]],
        tokens: int,
        later: int,
        around: Surroundings,
    ) -> tuple[float, int]:
        """(seconds of a step, steps) of the next run. A run takes its steps at the context of its middle:
        attention is linear in it."""
        times = around.times
        factor = around.factor * (1 + around.sharers)
        plain_s = times.base_s(rows + tokens, rows + len(chunks))
        if chunks:
            for request, size in chunks:
                plain_s += times.prompt_attention_s(size, request.computed)
            if rows:
                plain_s += times.decode_attention_s(rows, self._context / rows)
            return plain_s * factor, 1
        context = self._context / rows
        step_s = (plain_s + times.decode_attention_s(rows, context)) * factor
        steps = self._decode_steps(rows, step_s)
        if later:
            steps = max(1, min(steps, later - self._next))
        if steps > 1:
            step_s = (plain_s + times.decode_attention_s(rows, context + (steps - 1) / 2)) * factor
        return step_s, steps

    def _make_room(self) -> None:
        """Preempt the newest decoding requests until the next token of the others fits."""
        while len(self._decoding) > 1 and self.used + len(self._decoding) > self.quota:
            victim = next(reversed(self._decoding))
            self.take(victim)
            victim.computed = 0
            victim.recomputes += 1
            self._host.on_preempted(victim)

    def _chunks(self, rows: int, times: StepTimes) -> tuple[list[tuple[SimRequest, int]], int]:
        """Chunks of the next step, and the first later step that a request waits for (0: none does)."""
        if not self._prefilling:
            return [], 0
        limits = self._limits
        budget = limits.max_batched_tokens - rows
        if rows and limits.max_step_s:
            left = limits.max_step_s - times.decode_s(rows, self.context_mean)
            timed = int(left / times.prompt_token_s(limits.max_batched_tokens))
            budget = min(budget, max(limits.page_tokens, timed))
        chunks, later = [], 0
        for request in self._prefilling:
            if request.ready > self._next:
                later = min(later, request.ready) if later else request.ready
                continue
            size = min(request.to_prefill, budget)
            if size < 1:
                break
            chunks.append((request, size))
            budget -= size
        return chunks, later

    def _decode_steps(self, rows: int, step_s: float) -> int:
        until_end = self._next_end() - self._steps
        room = (self.quota - self.used) / rows
        return max(1, min(until_end, int(room), int(self._longest_run_s / step_s)))

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
        self._host.on_work(self, run)
        if run.rows:
            self._steps += run.steps
            grown = float(run.rows * run.steps)
            self._context += grown
            self.used += grown
        for request, size in run.chunks:
            request.computed += size
            self.backlog -= size
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
        self._host.on_prompt_token(self, request)
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
