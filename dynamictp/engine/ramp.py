"""The ramp of a switch: new requests go to the new side step by step, while both sides are watched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dynamictp.control.route import RampSides, Side
from dynamictp.engine.domain import Domain, PlanRecord
from dynamictp.engine.probe import Probe
from dynamictp.engine.request import Request
from dynamictp.engine.steptime import StepTimes
from dynamictp.messages import RampSettings, StepResult

LONG_PROMPT_TOKENS = 512
"""Requests are compared with those of their class only: prompts up to here, and longer ones."""


@dataclass(frozen=True)
class Regression:
    """Why the new side is taken back. `distrust`: nothing that it computed is to be used."""

    reason: str
    distrust: bool


@dataclass
class _Course:
    """A request's steps on one side so far, in ms as measured and as expected."""

    side: Side
    measured_ms: float = 0.0
    expected_ms: float = 0.0


class Ramp:
    """Owner of the share, of who is on which side, and of what the gates have seen.

    ```
    probe ─▶ first request ─▶ 10 % ─▶ … ─▶ 100 % ─▶ settle ─▶ done
    ```
    The new side are the domains on trial, the old side all others; with the last step the target's kept
    domains take part in the new side. Times are compared as measured over expected, so that a degree which is
    meant to be slower is no regression; what a rank waits for peers counts only where no other domain shares
    the devices.
    """

    def __init__(
        self,
        settings: RampSettings,
        *,
        new: Sequence[Domain],
        retiring: Sequence[Domain],
        probe: Probe,
        times: StepTimes,
        forced: bool,
    ) -> None:
        """`times`: predictions as they are before the new side has run."""
        self._settings = settings
        self._new = frozenset(new)
        self._retiring = frozenset(retiring)
        self._probe: Probe | None = probe
        self._times = times
        self._forced = forced
        self._step = -1
        self._until_s = probe.deadline_s
        self._first_due = False
        self._courses: dict[Request, _Course] = {}
        self._ratios: dict[tuple[Side, bool], list[float]] = defaultdict(list)
        self._unjudged = False
        self.done = False

    @property
    def share(self) -> float:
        """Of new requests, on the new side."""
        shares = self._settings.shares
        return shares[min(self._step, len(shares) - 1)] if self._step >= 0 else 0.0

    @property
    def deadline_s(self) -> float:
        """When it goes on though nothing happens."""
        return self._until_s

    # ------------------------------------------------------------ sides

    def choices(self, request: Request, domains: Sequence[Domain], blocks: int) -> list[list[Domain]]:
        """The serving domains in the order in which they may take a request of so many blocks."""
        sides = RampSides(
            self.share,
            self._new,
            self._retiring,
            first_due=self._first_due,
            probing=self._probe is not None,
        )
        return sides.groups(request.id, domains, lambda domain: domain.quota >= blocks)

    def bound(self, domain: Domain) -> None:
        """A request was admitted to a domain."""
        if domain in self._new:
            self._first_due = False

    # ------------------------------------------------------------ watching

    def tries(self, domain: Domain) -> bool:
        """The domain is on trial."""
        return domain in self._new

    def completed(self, domain: Domain, record: PlanRecord, result: StepResult) -> None:
        """A step of any domain is complete and its requests are dealt with."""
        expected = self._times.expected_ms(domain.tp, record.decode_rows, record.prefill_tokens)
        if expected is None:
            return
        measured = (result.seconds if record.alone else result.seconds - result.wait_s) * 1e3
        side: Side = "new" if domain in self._new else "old"
        for work in record.rows:
            course = self._courses.get(work.request)
            if course is None or course.side != side:
                course = self._courses[work.request] = _Course(side)
            course.measured_ms += measured
            course.expected_ms += expected
            if work.request.finished and work.request.shadow is None:
                del self._courses[work.request]
                long = work.request.prompt_len > LONG_PROMPT_TOKENS
                self._ratios[side, long].append(course.measured_ms / max(course.expected_ms, 1e-6))
                self._unjudged = True

    def advance(self, now: float) -> Regression | None:
        """Take the steps whose time has come; a regression ends the ramp."""
        if self._probe is not None:
            verdict = self._probe.look(now)
            if verdict is None:
                return None
            if verdict:
                return Regression(verdict, distrust=True)
            self._probe = None
            self._first_due = True
            self._begin_step(0, now)
        if self._unjudged:
            self._unjudged = False
            slower = self._slower()
            if slower:
                return Regression(slower, distrust=False)
        if self._forced:
            self._step, self.done = len(self._settings.shares), True
        while now >= self._until_s and not self.done:
            if self._step == len(self._settings.shares):
                self.done = True
            else:
                self._begin_step(self._step + 1, self._until_s)
        return None

    def hurry(self) -> None:
        """The switch has become urgent: after its probe it is done."""
        self._forced = True

    def stop(self) -> None:
        """The switch is taken back."""
        if self._probe is not None:
            self._probe.cancel()

    def _begin_step(self, step: int, now: float) -> None:
        """Step `len(shares)` is the settling."""
        self._step = step
        settings = self._settings
        self._until_s = now + (settings.observe_s if step < len(settings.shares) else settings.settle_s)

    def _slower(self) -> str:
        """The latency gate: what is wrong, if anything."""
        settings = self._settings
        for long in (False, True):
            new, old = self._ratios[("new", long)], self._ratios[("old", long)]
            if min(len(new), len(old)) < settings.min_finished:
                continue
            new_p95, old_p95 = percentile(new, 0.95), percentile(old, 0.95)
            # A side that is as fast as expected is no regression, however fast the other one is.
            if new_p95 > settings.worse * max(old_p95, 1.0):
                return (
                    f"P95 of measured over expected time is {new_p95:.2f} on the new side "
                    f"({len(new)} requests), {old_p95:.2f} on the old one ({len(old)})"
                )
        return ""


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]
