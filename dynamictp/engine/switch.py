"""One switch: what it opens, revives and retires, and how long each phase took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dynamictp.engine.domain import Domain
from dynamictp.engine.ramp import Ramp
from dynamictp.layout import Layout
from dynamictp.messages import RampSettings, SwitchStatus

Outcome = Literal["", "committed", "closed", "noop", "failed", "cancelled", "rolled_back"]
Phase = Literal["prepare", "proof", "ramp", "commit", "drain", "close", "rollback"]


@dataclass(eq=False)
class Switch:
    """Owned by `LayoutManager`. `id` is empty for one of the engine's own: the first layout, or a failed
    domain built again.

    Phases run prepare → proof → (ramp →) commit (routing changes) → drain → close; from a ramp also to
    rollback. `mark_s` is when the phase that runs began.
    """

    id: str
    source: Layout
    target: Layout
    reason: str
    drain_deadline_s: float
    mark_s: float
    opening: list[Domain] = field(default_factory=list)
    reviving: list[Domain] = field(default_factory=list)
    retiring: list[Domain] = field(default_factory=list)
    phase: Phase = "prepare"
    outcome: Outcome = ""
    opened: bool = False
    """The members were told to open their domains."""
    phases_ms: dict[str, float] = field(default_factory=dict)
    handovers: int = 0
    recomputes: int = 0
    weight_bytes_copied: int = 0
    error: str | None = None
    ramped: bool = False
    forced: bool = False
    settings: RampSettings | None = None
    ramp: Ramp | None = None
    """While it is in its ramp."""
    began_s: float = field(init=False)
    """When the command came."""

    def __post_init__(self) -> None:
        self.began_s = self.mark_s

    def hurry(self) -> None:
        """It has become urgent: of its ramp, only the shadow probe is left. One without a ramp stays so."""
        self.forced = True
        if self.ramp is not None:
            self.ramp.hurry()

    def finish_phase(self, name: str, now: float) -> None:
        """The phase `name` ends and the next one begins."""
        self.phases_ms[name] = (now - self.mark_s) * 1e3
        self.mark_s = now

    def retired(self, domain: Domain) -> None:
        """A domain it retired is closed, failed or serves again."""
        self.retiring.remove(domain)
        self.handovers += domain.handovers
        self.recomputes += domain.recomputes

    def status(self) -> SwitchStatus:
        return SwitchStatus(
            self.id,
            str(self.source.spec),
            str(self.target.spec),
            self.phase,
            self.outcome,
            dict(self.phases_ms),
            self.handovers + sum(domain.handovers for domain in self.retiring),
            self.recomputes + sum(domain.recomputes for domain in self.retiring),
            self.weight_bytes_copied,
            self.reason,
            self.error,
            self.ramp.share if self.ramp is not None else 0.0,
        )
