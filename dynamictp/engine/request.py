"""A request as the engine keeps it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from dynamictp.engine.pages import Block
from dynamictp.engine.prefix import chain_key, chain_root
from dynamictp.messages import ServedBy, SubmitRequest

if TYPE_CHECKING:
    from dynamictp.engine.domain import Domain

NUMERICS = "exact"
SUSPECT_CRASHES = 2


class Detach(Enum):
    """Why a running request is taken out of its domain's plans, and so what follows its last step."""

    FINISH = "finish"
    CANCEL = "cancel"
    PREEMPT = "preempt"
    HANDOVER = "handover"
    RECOMPUTE = "recompute"
    """As a handover, but nothing that its domain computed is trusted."""

    @property
    def ends(self) -> bool:
        return self in {Detach.FINISH, Detach.CANCEL}

    @property
    def drops_output(self) -> bool:
        """What its steps in flight bring does not reach the client."""
        return self.ends or self is Detach.RECOMPUTE


@dataclass
class Shadow:
    """Output of a request that the engine sent itself. It never leaves the domain that it was given."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: str = ""
    """Why it ended, empty before."""
    error: str = ""


class Request:
    """One live request: its tokens, where it runs, and how far its KV is computed. Mutated by `RequestBook`
    and, for what a plan adds, by `Scheduler`.

    ```
    index:  0 … prompt_len … computed … planned … len(tokens) … length
                                        └ in flight ┘           └ sampled by steps in flight
    ```
    `computed` and `planned` count tokens whose KV is written by completed and by all planned steps.
    """

    __slots__ = (
        "admitted_s", "age", "arrival_s", "attempt", "blocks", "cached_tokens", "computed", "crashed_at",
        "crashes", "deadline_s", "detach", "domain", "entered", "finished", "group", "handovers", "id",
        "in_flight", "keys", "limit", "model", "pending", "planned", "priority", "prompt_len",
        "prompts_from", "recomputes", "resumed", "row", "sampling", "sent_blocks", "served", "shadow",
        "stop_ids", "tenant", "tokens", "tp_max", "tp_min",
    )  # fmt: skip

    def __init__(self, message: SubmitRequest, age: int, max_len: int) -> None:
        self.id = message.request_id
        self.attempt = message.attempt
        self.age = age
        """Order of submission: the older of two wins when there is no room for both."""
        self.tokens = array("I")
        self.tokens.frombytes(message.tokens)
        self.prompt_len = message.prompt_len
        self.sampling = message.sampling
        self.stop_ids = frozenset(message.sampling.stop_ids)
        self.limit = min(message.prompt_len + message.sampling.max_tokens, max_len)
        """Length in tokens at which the request ends."""
        self.model = message.model
        self.tenant, self.group = message.tenant, message.group or message.request_id
        self.priority = message.priority
        self.arrival_s = message.arrival_s
        self.admitted_s = 0.0
        """When a domain first took it; 0 while none did."""
        self.deadline_s = message.deadline_s

        self.domain: Domain | None = None
        self.row = -1
        self.blocks: list[Block] = []
        self.sent_blocks = -1
        """Blocks the workers know of; -1 while they do not know the row."""
        self.planned = self.computed = 0
        self.in_flight = 0
        self.pending = 0
        """Tokens that steps in flight will sample."""
        self.detach: Detach | None = None
        self.finished = False
        """It came to its end by a step, not by a cancel."""
        self.shadow: Shadow | None = None
        """Set for a request of the engine's own: who gets its output."""
        self.resumed = False
        """It ran before: it waits in front of those that did not."""

        self.keys = [chain_root(message.model, message.salt, NUMERICS)]
        """Prefix keys: the root's, then one per whole block of known tokens, as far as they were needed."""
        self.entered = 0
        """Blocks offered to the prefix cache."""
        self.cached_tokens = -1
        self.prompts_from = 1 if message.sampling.prompt_logprobs is not None else message.prompt_len
        """First prompt index whose log-probabilities are still to be sent."""

        self.served: ServedBy | None = None
        """Where its latest step ran; None when that has to be made anew."""
        self.tp_min = self.tp_max = 0
        self.handovers = self.recomputes = 0
        self.crashes = 0
        """Domains that failed while it ran, one after the other, without getting on in between."""
        self.crashed_at = 0
        """Most tokens that were computed when one failed."""

    @property
    def length(self) -> int:
        """Tokens known, or sampled once the steps in flight are complete."""
        return len(self.tokens) + self.pending

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def suspect(self) -> bool:
        """It may be the cause of crashes: its next step has no other request in it."""
        return self.crashes >= SUSPECT_CRASHES

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.prompts_from < self.prompt_len

    def block_keys(self, blocks: int, page_tokens: int) -> list[bytes]:
        """Keys of the first `blocks` whole blocks of known tokens."""
        for index in range(len(self.keys) - 1, blocks):
            tokens = self.tokens[index * page_tokens : (index + 1) * page_tokens]
            self.keys.append(chain_key(self.keys[-1], tokens.tobytes()))
        return self.keys[1 : blocks + 1]

    def ran_on(self, domain: Domain) -> ServedBy:
        """Note that a step on `domain` is complete; the values to send with a token of it."""
        tp = domain.placed.shape.tp
        self.tp_min = min(self.tp_min or tp, tp)
        self.tp_max = max(self.tp_max, tp)
        self.served = ServedBy(domain.id, tp, self.tp_min, self.tp_max, self.handovers, self.recomputes)
        return self.served
