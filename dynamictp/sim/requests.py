"""Requests of a simulation: what comes, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamictp.bench.workload.plan import Plan
from dynamictp.control.windows import Who


@dataclass(eq=False, slots=True)
class SimRequest:
    """One request. Mutated by the domain that has it, and by the node while none has."""

    id: str
    arrival_s: float
    prompt: int
    output: int
    """Tokens that it will generate."""
    priority: int = 0
    request_class: str = ""
    tenant: str = ""
    prefix: str = ""
    """Names the text that others begin with too; `prefix_tokens` of it."""
    prefix_tokens: int = 0
    looked_up: bool = False
    """Its prefix was looked for."""
    generated: int = 0
    """Tokens generated, without those since `joined` while it decodes."""
    computed: int = 0
    """Tokens whose KV exists."""
    joined: int = -1
    """The domain's step count when it began to decode there; -1: it does not decode."""
    ready: int = 0
    """The first step of its domain that it may be part of."""
    first_token_s: float | None = None
    finished_s: float | None = None
    resumed: bool = False
    degrees: list[int] = field(default_factory=list)
    """Degrees that served it, in order."""
    handovers: int = 0
    recomputes: int = 0

    who: Who = field(init=False)

    def __post_init__(self) -> None:
        self.who = Who(self.arrival_s, self.prompt, self.request_class, self.tenant)

    @property
    def length(self) -> int:
        return self.prompt + self.generated

    @property
    def to_prefill(self) -> int:
        """Tokens to compute before it decodes (again)."""
        return max(self.length - self.computed, 0)

    @property
    def ttft_s(self) -> float:
        """Raises ValueError before the first token."""
        if self.first_token_s is None:
            raise ValueError(f"{self.id} has no first token")
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first, of a finished request; 0 for a single token."""
        if self.first_token_s is None or self.finished_s is None:
            raise ValueError(f"{self.id} is not finished")
        return (self.finished_s - self.first_token_s) / (self.output - 1) if self.output > 1 else 0.0


def requests_of(plan: Plan) -> list[SimRequest]:
    """The open-loop requests of a benchmark's plan, later turns of conversations left out."""
    return [
        SimRequest(
            id=request.name,
            arrival_s=request.intended_s,
            prompt=request.prompt_tokens,
            output=request.output_tokens,
            priority=request.priority,
            request_class=request.traffic_class,
            tenant=request.tenant,
            prefix=request.system.key if request.system is not None else "",
            prefix_tokens=request.system.tokens if request.system is not None else 0,
        )
        for request in plan.requests
        if not request.follows
    ]
