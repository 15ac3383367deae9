"""Who sends what: traffic classes, mixes, tenants, shared prefixes and conversations. Values only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dynamictp.bench.schedule import Endpoint
from dynamictp.bench.workload.lengths import Lengths
from dynamictp.errors import ConfigError

SHORT_PROMPT, LONG_PROMPT = Lengths(100, 250), Lengths(1500, 4000)
SHORT_OUTPUT, LONG_OUTPUT = Lengths(40, 100), Lengths(300, 800)
VERY_LONG_PROMPT = Lengths(8000, 16000)

# Where a recorded request counts as long.
LONG_PROMPT_TOKENS = 1024
LONG_OUTPUT_TOKENS = 128
# Of the peak rate, from which on classes that only come at the peak do come.
PEAK_SHARE = 0.8
# Of a workload's `scale`: longer prompts than any model's context.
MOST_SCALE = 1000


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """A kind of request. `when` peak: only while the arrival rate is near its highest."""

    name: str
    prompt: Lengths
    output: Lengths
    weight: float = 1.0
    when: Literal["always", "peak"] = "always"

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ConfigError(f"class {self.name} has weight {self.weight:g}; expected more than 0")

    def weighing(self, weight: float) -> TrafficClass:
        return TrafficClass(self.name, self.prompt, self.output, weight, self.when)


QA = TrafficClass("qa", SHORT_PROMPT, SHORT_OUTPUT)
CHAT = TrafficClass("chat", SHORT_PROMPT, LONG_OUTPUT)
RAG = TrafficClass("rag", LONG_PROMPT, SHORT_OUTPUT)
CODE = TrafficClass("code", LONG_PROMPT, LONG_OUTPUT)
GIANT = TrafficClass("giant", VERY_LONG_PROMPT, SHORT_OUTPUT, when="peak")

CLASSES = {item.name: item for item in (QA, CHAT, RAG, CODE, GIANT)}
MIXES: dict[str, tuple[TrafficClass, ...]] = {
    "chat-rag": (CHAT.weighing(0.8), RAG.weighing(0.2)),
    "qa-code": (QA.weighing(0.5), CODE.weighing(0.5)),
    "even": tuple(item.weighing(0.25) for item in (QA, CHAT, RAG, CODE)),
    "peak-giants": (CHAT.weighing(0.78), RAG.weighing(0.2), GIANT.weighing(0.02)),
}


@dataclass(frozen=True, slots=True)
class Tenant:
    """`share` of the requests carry this name and `priority` (higher is served first)."""

    name: str
    share: float
    priority: int = 0

    def __post_init__(self) -> None:
        if not self.share > 0:
            raise ConfigError(f"tenant {self.name} has share {self.share:g}; expected more than 0")

    @classmethod
    def parse(cls, text: str) -> Tenant:
        """`NAME:SHARE[:PRIORITY]`. Raises ConfigError."""
        parts = text.split(":")
        try:
            if len(parts) in (2, 3) and parts[0]:
                return cls(parts[0], float(parts[1]), int(parts[2]) if len(parts) == 3 else 0)
        except ValueError:
            pass
        raise ConfigError(f"'{text}' is no tenant: expected NAME:SHARE[:PRIORITY], as in gold:0.2:10")


@dataclass(frozen=True, slots=True)
class Prefixes:
    """`share` of the conversations begin with one of `groups` texts of `tokens` tokens (system prompts)."""

    groups: int
    tokens: int
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.groups < 1 or self.tokens < 1 or not 0 < self.share <= 1:
            raise ConfigError(
                "prefixes need a group, a token and a share up to 1, not "
                f"{self.groups}:{self.tokens}:{self.share:g}"
            )

    @classmethod
    def parse(cls, text: str) -> Prefixes:
        """`GROUPS:TOKENS[:SHARE]`. Raises ConfigError."""
        parts = text.split(":")
        try:
            if len(parts) in (2, 3):
                return cls(int(parts[0]), int(parts[1]), float(parts[2]) if len(parts) == 3 else 1.0)
        except ValueError:
            pass
        raise ConfigError(f"'{text}' are no prefixes: expected GROUPS:TOKENS[:SHARE], as in 4:256:0.5")


@dataclass(frozen=True, slots=True)
class Turns:
    """Conversations of `mean` turns on average (geometric); the next turn comes `think_s` after an answer."""

    mean: float = 1.0
    think_s: float = 1.0

    def __post_init__(self) -> None:
        if self.mean < 1 or self.think_s < 0:
            raise ConfigError(
                f"turns are at least 1 with a pause of 0 or more, not {self.mean}:{self.think_s}"
            )

    @classmethod
    def parse(cls, text: str) -> Turns:
        """`MEAN[:THINK_S]`. Raises ConfigError."""
        mean, _, think = text.partition(":")
        try:
            return cls(float(mean), float(think or 1.0))
        except ValueError as error:
            raise ConfigError(f"'{text}' are no turns: expected MEAN[:THINK_S], as in 3:2") from error


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that decides a plan. `arrivals` in the text form of `workload.spec`.

    `scale` multiplies every length (traces included) for machines that can't bear the full ones;
    `longest_tokens` bounds prompt + output (0: no bound).
    """

    classes: tuple[TrafficClass, ...] = MIXES["chat-rag"]
    arrivals: str = "poisson:1"
    duration_s: float = 60.0
    seed: int = 0
    scale: float = 1.0
    tenants: tuple[Tenant, ...] = ()
    prefixes: Prefixes | None = None
    turns: Turns = Turns()
    endpoint: Endpoint = "chat"
    longest_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.duration_s < math.inf or not 0 < self.scale <= MOST_SCALE or self.seed < 0:
            raise ConfigError(
                f"duration {self.duration_s:g} s, scale {self.scale:g} and seed {self.seed}: "
                f"expected more than 0, more than 0 and up to {MOST_SCALE:g}, and 0 or more"
            )
        if not any(item.when == "always" for item in self.classes):
            raise ConfigError("a workload needs a class that is not bound to the peak")
        if self.turns.mean > 1 and self.endpoint != "chat":
            raise ConfigError("conversations of several turns need the chat endpoint")
        names = [item.name for item in self.classes]
        if len(set(names)) < len(names):
            raise ConfigError(f"each class once, got {', '.join(names)}")


def parse_mix(text: str) -> tuple[TrafficClass, ...]:
    """A name of MIXES, or `CLASS=WEIGHT,…` with CLASS a name of CLASSES or `NAME(PROMPT:OUTPUT)`.

    `chat=0.8,rag=0.2` · `short(64:16)=1,long(1500/4000:40/100)=0.5`. Raises ConfigError.
    """
    if text in MIXES:
        return MIXES[text]
    return tuple(_parse_class(part) for part in text.split(","))


def _parse_class(text: str) -> TrafficClass:
    name, _, weight_text = text.partition("=")
    try:
        weight = float(weight_text or 1.0)
    except ValueError as error:
        raise ConfigError(f"'{text}' in a mix: expected CLASS=WEIGHT") from error
    if name in CLASSES:
        return CLASSES[name].weighing(weight)
    base, bracket, lengths = name.partition("(")
    prompt, colon, output = lengths.removesuffix(")").partition(":")
    if not (base and bracket and colon and name.endswith(")")):
        raise ConfigError(
            f"'{name}' is no mix ({', '.join(MIXES)}) and no class: expected one of {', '.join(CLASSES)} or"
            " NAME(PROMPT:OUTPUT), as in short(64:16)"
        )
    return TrafficClass(base, Lengths.parse(prompt), Lengths.parse(output), weight)
