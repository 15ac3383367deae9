"""The engine core with fake workers on virtual time: random latencies, every token checked as it comes."""

from __future__ import annotations

import heapq
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import msgspec

from dynamictp.clock import ManualClock
from dynamictp.engine.core import EngineCore
from dynamictp.facts import ModelFacts, RopeFacts
from dynamictp.messages import (
    ArenaFacts,
    Body,
    CancelRequest,
    EngineReady,
    EngineStart,
    FirstAdmission,
    Outputs,
    ProveDomain,
    SamplingParams,
    SetLayout,
    Snapshot,
    StepPlan,
    SubmitRequest,
    SwitchStatus,
    WorkerGone,
    WorkerHello,
    WorkerLost,
)
from dynamictp.testing.fake_worker import (
    FakeArena,
    FakeCluster,
    Job,
    reference_prompt_logprobs,
    reference_tokens,
)

VOCAB = 50
HEADS = 2
PAGE = 4
TERMINAL = {"closed", "noop", "failed", "cancelled", "rolled_back"}
STOPPED_S = 1.0
"""After so long the supervisor kills a worker that is stopped."""

FACTS = ModelFacts(
    family="llama", layers=2, hidden=144, query_heads=8, kv_heads=HEADS, head_dim=16, intermediate=288,
    vocab=VOCAB, max_context=4096, norm_eps=1e-5, rope=RopeFacts(10000.0),
)  # fmt: skip


def engine_start(**changes: Any) -> EngineStart:
    values: dict[str, Any] = {
        "facts": FACTS,
        "arena": ArenaFacts(48 * HEADS, PAGE, "fp32"),
        "devices": 3,
        "layout": "tp1",
        "legal_degrees": (1, 2, 3),
        "max_model_len": 96,
        "max_num_seqs": 6,
        "max_batched_tokens": 24,
        "comm_slots": 10,
    }
    return EngineStart(**values | changes)


class ControlRecord:
    """Control words, as the workers would read them."""

    def __init__(self) -> None:
        self.words: dict[int, tuple[int, int]] = {}
        self.progress_words: dict[int, tuple[int, int, int, float]] = {}
        """By device; without one the worker has done all it was told."""

    def set(self, slot: int, epoch: int, state: Literal[0, 1, 2]) -> None:
        self.words[slot] = (epoch, state)

    def progress(self, device: int) -> tuple[int, int, int, float]:
        return self.progress_words.get(device, (1 << 60, 0, 0, 0.0))

    @property
    def aborted(self) -> frozenset[int]:
        return frozenset(epoch for epoch, state in self.words.values() if state == 2)


@dataclass
class Stream:
    """A client's view of one request, and what it must get."""

    id: str
    prompt: list[int]
    sampling: SamplingParams
    expected: list[int]
    reason: str
    attempt: int = 1
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    end: str | None = None
    cancelled: bool = False


class Simulation:
    """One engine, its workers and its clients. Everything random comes from `rng`."""

    def __init__(
        self,
        rng: random.Random,
        start: EngineStart,
        *,
        step_s: Callable[[StepPlan], float] | None = None,
        latency_s: float = 0.0005,
    ) -> None:
        self.rng = rng
        self.clock = ManualClock(100.0)
        self.control = ControlRecord()
        self.core = EngineCore(start, self.clock, self.control)
        pages = start.arena.pages
        self.cluster = FakeCluster(start.devices, FakeArena(pages, PAGE, HEADS), VOCAB)
        self.streams: dict[str, Stream] = {}
        self.statuses: dict[str, SwitchStatus] = {}
        self.first_admitted_ms: dict[str, float] = {}
        self.ready: EngineReady | None = None
        self.snapshot: Snapshot | None = None
        self.layout = start.layout
        """The last committed one, as the server knows it."""
        self.lost: list[WorkerLost] = []
        self.plans: list[StepPlan] = []
        self.outcomes: list[str] = []
        self.degrees: dict[str, int] = {}
        """Degree of each request's latest token."""
        self.ends: list[str] = []
        """Ids of requests in the order in which they ended."""
        self._step_s = step_s or (lambda plan: 0.002 + 0.0005 * rng.random() * len(plan.rows))
        self._latency_s = latency_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._names = count()
        self._last_delivery: dict[tuple[str, int], float] = {}
        self._stopped: set[int] = set()
        for device, worker in enumerate(self.cluster.workers):
            self.from_worker(device, WorkerHello(device, worker.incarnation, 1))

    # ------------------------------------------------------------ clients

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        seed: int = 0,
        stop_at: int | None = None,
        **fields: Any,
    ) -> Stream:
        """`stop_at`: make the token expected at that position a stop id."""
        limit = min(max_tokens, self.core.start.max_model_len - len(prompt))
        expected = reference_tokens(prompt, seed, limit, heads=HEADS, vocab=VOCAB)
        reason = "length"
        stop_ids: tuple[int, ...] = ()
        if stop_at is not None and stop_at < len(expected):
            stop_ids = (expected[stop_at],)
            expected = expected[: expected.index(stop_ids[0]) + 1]
            reason = "stop"
        wanted = {"logprobs", "prompt_logprobs", "min_tokens"} & fields.keys()
        sampling = SamplingParams(
            seed, max_tokens, stop_ids=stop_ids, **{name: fields.pop(name) for name in wanted}
        )
        stream = Stream(f"r{next(self._names)}", prompt, sampling, expected, reason)
        self.streams[stream.id] = stream
        self.send_stream(stream, **fields)
        return stream

    def send_stream(self, stream: Stream, **fields: Any) -> None:
        tokens = array("I", stream.prompt + stream.tokens).tobytes()
        self.core.on_server(
            SubmitRequest(
                stream.id, stream.attempt, tokens, len(stream.prompt), stream.sampling,
                self.clock.now(), **fields,
            )
        )  # fmt: skip

    def resubmit(self, stream: Stream) -> None:
        """As a server does that lost track: the next attempt, with what was emitted."""
        stream.attempt += 1
        self.send_stream(stream)

    def cancel(self, stream: Stream) -> None:
        stream.cancelled = True
        self.core.on_server(CancelRequest(stream.id, stream.attempt))

    def set_layout(self, layout: str, **fields: Any) -> str:
        """`fields` of the command: drain_deadline_s, ramp, forced."""
        switch_id = f"s{next(self._names)}"
        self.core.on_server(SetLayout(switch_id, layout, **fields))
        return switch_id

    @property
    def unfinished(self) -> list[Stream]:
        return [stream for stream in self.streams.values() if stream.end is None]

    # ------------------------------------------------------------ time

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock.now() + delay_s, next(self._order), action))

    def turn(self) -> None:
        """One turn of the engine; its messages are under way afterwards."""
        self.core.turn()
        for body in self.core.to_server:
            self._on_server_message(body)
        self.core.to_server.clear()
        for device, body in self.core.to_workers:
            if isinstance(body, StepPlan) and (not self.plans or self.plans[-1] is not body):
                self.plans.append(body)
            incarnation = self.core.fleet.incarnations.get(device)
            self._deliver(("to", device), lambda d=device, b=body, i=incarnation: self._arrive(d, b, i))
        self.core.to_workers.clear()
        self._start_jobs()

    def step(self) -> None:
        """On to the next event or deadline, and a turn."""
        deadline = self.core.next_deadline()
        if self._events and self._events[0][0] <= deadline:
            time, _, action = heapq.heappop(self._events)
            self.clock.advance(max(0.0, time - self.clock.now()))
            action()
            self._start_jobs()
            # Several messages may be there before the engine gets its turn.
            while self._events and self.rng.random() < 0.2:
                if self._events[0][0] > self.clock.now() + 0.0002:
                    break
                heapq.heappop(self._events)[2]()
                self._start_jobs()
        else:
            self.clock.advance(max(0.0, deadline - self.clock.now()))
        self.turn()

    def run(self, until: Callable[[], bool], *, within_s: float = 60.0) -> None:
        """Steps until the condition holds; AssertionError after so much virtual time."""
        end = self.clock.now() + within_s
        self.turn()
        while not until():
            assert self.clock.now() < end, f"standstill: {self.core.snapshot()}"
            self.step()

    def run_until_idle(self, *, within_s: float = 60.0) -> None:
        self.run(lambda: self.idle, within_s=within_s)

    @property
    def idle(self) -> bool:
        core = self.core
        return (
            not self.unfinished
            and not core.book.live
            and core.layouts.settled
            and self.cluster.idle
            and not self._events
            and all(domain.state == "serving" for domain in core.fleet.domains.values())
            and all(domain.empty for domain in core.fleet.domains.values())
        )

    def check_idle(self) -> None:
        """Nothing is left behind: the accounts of an idle engine."""
        core = self.core
        core.check_integrity()
        assert core.pool.free + core.pool.cached == core.pool.total
        domains = core.fleet.domains.values()
        assert {domain.placed for domain in domains} == set(core.layouts.observed.domains)
        assert all(domain.free_rows == domain.max_rows for domain in domains)
        live = {domain.comm.slot: (domain.epoch, 1) for domain in domains}
        for slot, word in self.control.words.items():
            if slot in live:
                assert word == live[slot]
            else:
                assert word[1] == 0
        for device, worker in enumerate(self.cluster.workers):
            assert set(worker.domains) == {d.epoch for d in domains if device in d.devices}

    # ------------------------------------------------------------ workers

    def from_worker(self, device: int, body: Body) -> None:
        self._deliver(("from", device), lambda: self.core.on_worker(device, body))

    def kill(self, device: int) -> None:
        """A worker dies; its replacement says hello a little later, and the supervisor may be faster with
        the news than that."""
        before = self.cluster.workers[device].incarnation
        worker = self.cluster.replace(device)
        if self.rng.random() < 0.5:
            gone = WorkerGone(device, before, "exit code -9")
            self.at(0.005 * self.rng.random(), lambda: self.core.on_server(gone))
        hello = WorkerHello(device, worker.incarnation, 1)
        self.at(0.01, lambda: self.from_worker(device, hello))

    def stop_worker(self, device: int) -> None:
        """A worker is stopped in whatever it does, until the supervisor kills it: it may write pages of its
        step until then. Its peers leave a step once the domain is revoked."""
        self._stopped.add(device)

        def kill() -> None:
            self._stopped.discard(device)
            self.kill(device)

        self.at(STOPPED_S, kill)

    def restart_engine(self) -> None:
        """The engine dies; the next one gets the last committed layout, workers that drop their domains and
        greet it, and every live request."""
        core = self.core
        start = msgspec.structs.replace(
            core.start,
            incarnation=core.start.incarnation + 1,
            layout=self.layout,
            workers=tuple(worker.incarnation for worker in self.cluster.workers),
        )
        for switch_id, status in self.statuses.items():
            ended = {"": "failed", "committed": "closed"}.get(status.outcome)
            if ended is not None:
                self.statuses[switch_id] = msgspec.structs.replace(status, outcome=ended)
        self.control.words = dict.fromkeys(self.control.words, (0, 0))
        self.ready = None
        self.core = EngineCore(start, self.clock, self.control)
        for device, worker in enumerate(self.cluster.workers):
            self.cluster.leave_all(device)
            hello = WorkerHello(device, worker.incarnation, 1)
            self.at(0.01 * self.rng.random(), lambda d=device, h=hello: self.from_worker(d, h))  # type: ignore[misc]
        for stream in self.unfinished:
            if stream.cancelled:
                stream.end = "cancelled"
            else:
                self.resubmit(stream)

    def _deliver(self, link: tuple[str, int], action: Callable[[], None]) -> None:
        """Messages of a link arrive in order, each after its own delay; an engine's links end with it."""
        core = self.core
        time = self.clock.now() + self._latency_s * self.rng.random()
        time = max(time, self._last_delivery.get(link, 0.0))
        self._last_delivery[link] = time
        arrive = lambda: action() if self.core is core else None  # noqa: E731
        heapq.heappush(self._events, (time, next(self._order), arrive))

    def _arrive(self, device: int, body: Body, incarnation: int | None) -> None:
        """What was sent to a worker that is dead by now reaches no one."""
        if self.cluster.workers[device].incarnation == incarnation:
            self.cluster.deliver(device, body)

    def _start_jobs(self) -> None:
        for job in self.cluster.startable(self.control.aborted):
            if self._stopped.intersection(job.devices):
                continue
            self.cluster.begin(job)
            seconds = self._step_s(job.body) if isinstance(job.body, StepPlan) else 0.001
            self.at(seconds, lambda j=job, s=seconds: self._finish(j, s))

    def _finish(self, job: Job, seconds: float) -> None:
        if self._stopped.intersection(job.devices):
            if isinstance(job.body, StepPlan | ProveDomain) and job.body.epoch in self.control.aborted:
                for device in set(job.devices) - self._stopped:
                    self.cluster.leave(device, job)
            self.at(0.01, lambda: self._finish(job, seconds))
            return
        for device, body in self.cluster.finish(job, seconds):
            self.from_worker(device, body)

    # ------------------------------------------------------------ checks

    def _on_server_message(self, body: Body) -> None:
        match body:
            case Outputs():
                self._on_outputs(body)
            case SwitchStatus():
                self.statuses[body.switch_id] = body
                if body.outcome in ("committed", "noop"):
                    self.layout = body.to_layout
                if body.outcome in TERMINAL:
                    self.outcomes.append(body.outcome)
            case FirstAdmission():
                assert body.switch_id not in self.first_admitted_ms
                self.first_admitted_ms[body.switch_id] = body.milliseconds
            case EngineReady():
                assert self.ready is None
                self.ready = body
                self.layout = body.layout
            case Snapshot():
                self.snapshot = body
                self.layout = body.layout
            case WorkerLost():
                self.lost.append(body)
            case _:
                raise AssertionError(f"unexpected message {body}")

    def _on_outputs(self, outputs: Outputs) -> None:
        for prompt in outputs.prompts:
            stream = self.streams[prompt.request_id]
            assert prompt.start == 1 + len(stream.prompt_logprobs), prompt
            stream.prompt_logprobs += [entry.logprob for entry in prompt.entries]
        for event in outputs.tokens:
            stream = self.streams[event.request_id]
            if event.attempt < stream.attempt:
                continue
            assert stream.end is None, f"{event} after the end of {stream}"
            assert event.position == len(stream.tokens), (event, stream)
            assert event.token == stream.expected[event.position], (event, stream)
            assert event.served.tp_min <= event.served.tp <= event.served.tp_max
            assert (event.logprobs is None) == (stream.sampling.logprobs is None)
            stream.tokens.append(event.token)
            self.degrees[stream.id] = event.served.tp
        for end in outputs.ends:
            stream = self.streams[end.request_id]
            if end.attempt < stream.attempt:
                continue
            assert stream.end is None, (end, stream)
            assert end.tokens == len(stream.tokens), (end, stream)
            stream.end = end.reason
            self.ends.append(end.request_id)
            if not stream.cancelled:
                assert end.reason == stream.reason, (end, stream)
                assert stream.tokens == stream.expected
                if stream.sampling.prompt_logprobs is not None and stream.attempt == 1:
                    assert stream.prompt_logprobs == reference_prompt_logprobs(stream.prompt)
