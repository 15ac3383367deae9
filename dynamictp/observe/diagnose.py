"""What limits a server, from its figures: a verdict, the evidence, what to try. Pure.

Causes come before symptoms: a queue behind a server that waits for a neighbour's process is that neighbour's
doing. `docs/troubleshooting.md` has a row per verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from dynamictp.observe import findings
from dynamictp.observe.figures import PARTS, Figures
from dynamictp.observe.findings import Finding, Lever, Verdict

ROOM = 0.5
"""Busy share below which a server without troubles is healthy."""


@dataclass(frozen=True)
class Diagnosis:
    """The verdict is that of the first finding; the others hold beside it, and none advises against one
    before it.
    """

    findings: tuple[Finding, ...]
    split: dict[str, float]
    """Share of each part of the time of steps and between them; empty when there was none."""

    @property
    def verdict(self) -> Verdict:
        return self.findings[0].verdict


def diagnose(figures: Figures) -> Diagnosis:
    """What limits the server, worst first."""
    if not figures.steps:
        waits = figures.waiting or figures.running
        return Diagnosis((findings.stalled(figures) if waits else findings.idle(figures),), {})
    split = {part: figures.share(part) for part in PARTS}
    bound = findings.bound(figures)
    troubles = list(_troubles(figures))
    if not troubles and figures.busy < ROOM:
        return Diagnosis((findings.healthy(figures, bound),), split)
    model = figures.share("weights") + figures.share("attention")
    if not troubles or not figures.divided or model >= findings.MODEL_SHARE:
        troubles.append(bound)
    return Diagnosis(tuple(_agreeing(troubles)), split)


def _troubles(figures: Figures) -> Iterator[Finding]:
    """What is wrong, causes first."""
    found = (findings.kv_full(figures), *_around(figures), findings.queueing(figures))
    yield from (finding for finding in found if finding is not None)


def _around(figures: Figures) -> tuple[Finding | None, Finding | None]:
    """Host and communication, the cause of the other first, else the one that takes more of the time."""
    host, communication = findings.host(figures), findings.communication(figures)
    if findings.disturbed(figures) or findings.breathless(figures):
        return host, communication
    host_share = max(figures.share("host"), figures.share("other"))
    if findings.crowded(figures) or figures.share("wait") > host_share:
        return communication, host
    return host, communication


def _agreeing(found: Iterable[Finding]) -> Iterator[Finding]:
    """The same, without advice on a lever that a finding before has had: it says the same again, or the
    opposite.
    """
    taken: set[Lever] = set()
    for finding in found:
        kept = tuple(advice for advice in finding.advice if advice.lever not in taken)
        taken |= {advice.lever for advice in finding.advice if advice.lever is not None}
        yield replace(finding, advice=kept)
