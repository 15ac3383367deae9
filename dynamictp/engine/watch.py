"""Finds workers that hang: they owe an answer and make no progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dynamictp.engine.comms import ControlWords
from dynamictp.engine.domain import Domain

LOOK_S = 0.25
OVERSLEPT_S = 1.0
"""Between two looks: more means that this process itself did not run, so the workers may not have either."""
LONGEST_STEP = 10.0
"""A step may take so many times what was predicted before its worker counts as hanging."""
LEAVE_S = 1.0
"""A rank that waits looks at the control word every few ms, so by then it has left a failed domain."""
HELLO_S = 30.0
"""Longest start of a worker: it may have to import torch on a busy machine."""
HELLO_AGAIN_S = 5.0
"""A worker that serves already says hello to a restarted engine by then, or after its longest step."""
_WAITING = 2


@dataclass
class Verdict:
    """What a look found: workers that are of no use any more, and domains that can't get on."""

    lost: list[tuple[int, str]] = field(default_factory=list)
    """(device, reason)."""
    stuck: list[tuple[Domain, str]] = field(default_factory=list)


@dataclass(frozen=True)
class _Stall:
    seconds: float
    waits: bool
    """It is inside a collective, so a peer may be the one to blame."""


class Watch:
    """Owner of how much each worker was sent, and since when it owes something.

    A worker's progress word counts the messages it has begun. It hangs when it has not executed all it was
    sent and the word stands still for longer than any legal step. One that computes (or does not even begin)
    is the culprit. One that waits for its peers is innocent, unless its domain has failed and it does not
    leave: when all members of a domain wait, one of them is stopped inside its wait, so the domain is failed
    to see who leaves. The time that a worker could run and had no core does not count: on a busy machine it
    is slow, and its successor would be slower.
    """

    def __init__(
        self, control: ControlWords, hang_s: float, core_wait_s: Callable[[int], float] = lambda pid: 0.0
    ) -> None:
        """`core_wait_s`: how long the process of that id has waited for a core so far."""
        self._control = control
        self._hang_s = hang_s
        self._core_wait_s = core_wait_s
        self._pids: dict[int, int] = {}
        self._marks: dict[int, tuple[float, float]] = {}
        """When a worker was first seen to stand still, and how long it had waited for a core by then."""
        self._sent: dict[int, int] = {}
        self._owes_since: dict[int, float] = {}
        self._hello_by: dict[int, float] = {}
        self._looked_at: float | None = None

    def expect_hello(self, device: int, deadline_s: float) -> None:
        self._hello_by[device] = deadline_s

    def on_hello(self, device: int, pid: int = 0) -> None:
        """A worker begins to count, from zero."""
        self._pids[device] = pid
        self._marks.pop(device, None)
        self._hello_by.pop(device, None)
        self._owes_since.pop(device, None)
        self._sent[device] = 0

    def sent(self, device: int) -> None:
        if device in self._sent:
            self._sent[device] += 1

    def forget(self, device: int) -> None:
        """The device has no worker now."""
        for table in (self._sent, self._owes_since, self._hello_by):
            table.pop(device, None)

    def look(self, domains: Iterable[Domain], now: float) -> Verdict:
        """Call every `LOOK_S`."""
        late_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if late_s > OVERSLEPT_S:
            self._owes_since.clear()
            self._hello_by = {device: by + late_s for device, by in self._hello_by.items()}
        verdict = Verdict()
        for device, deadline_s in self._hello_by.items():
            if now >= deadline_s:
                verdict.lost.append((device, "it did not say hello in time"))
        members = list(domains)
        overdue = self._overdue(members, now)
        for device, stall in overdue.items():
            if not stall.waits:
                verdict.lost.append((device, f"no progress for {stall.seconds:.1f} s"))
        if not verdict.lost and overdue:
            self._judge_waiting(members, overdue, now, verdict)
        return verdict

    def _overdue(self, domains: list[Domain], now: float) -> dict[int, _Stall]:
        """Workers without progress for longer than what they are at may take."""
        found: dict[int, _Stall] = {}
        for device, sent in self._sent.items():
            begun, _, state, age_s = self._control.progress(device)
            if begun >= sent and not state:
                self._owes_since.pop(device, None)
                continue
            since = self._owes_since.setdefault(device, now)
            seconds = min(age_s, now - since)
            seconds -= self._without_core_s(device, now - seconds, now)
            waits = state == _WAITING
            if seconds > (self._hang_s if waits else self._step_limit_s(device, domains)):
                found[device] = _Stall(seconds, waits)
        return found

    def _without_core_s(self, device: int, still_since_s: float, now: float) -> float:
        """How long the worker has waited for a core while it stood still, as far as it was looked at."""
        waited_s = self._core_wait_s(self._pids[device])
        mark = self._marks.get(device)
        if mark is None or mark[0] < still_since_s:
            mark = self._marks[device] = (now, waited_s)
        return max(0.0, waited_s - mark[1])

    def _step_limit_s(self, device: int, domains: list[Domain]) -> float:
        steps_ms = (r.predicted_ms for d in domains if device in d.devices for r in d.in_flight)
        return max(self._hang_s, LONGEST_STEP * max(steps_ms, default=0.0) * 1e-3)

    def _judge_waiting(
        self, domains: list[Domain], overdue: dict[int, _Stall], now: float, verdict: Verdict
    ) -> None:
        """Every overdue worker waits: none is to blame yet."""
        for domain in domains:
            if domain.state == "failed":
                if now < domain.retired_s + LEAVE_S:
                    continue
                verdict.lost += [
                    (device, f"it does not leave the failed domain {domain.id}")
                    for rank, device in enumerate(domain.devices)
                    if rank not in domain.closed_by and device in overdue
                ]
            elif domain.tp > 1 and all(device in overdue for device in domain.devices):
                verdict.stuck.append((domain, "every member waits for the others"))
