"""Everything one run of `scripts/bench` measured, and its JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamictp.bench.accuracy import ClientFigures
from dynamictp.bench.blocks import Block, DecodePoint, PrefillPoint, SwitchFigures
from dynamictp.bench.kernel_figures import KernelFigures
from dynamictp.bench.machine import Build, Machine
from dynamictp.bench.metrics_cost import MetricsCost
from dynamictp.bench.rival import RivalFacts
from dynamictp.bench.roofline import DecodeBytes
from dynamictp.bench.stats import Quantiles
from dynamictp.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Figures:
    """None or empty where a part was not asked for. `flags` are those of the server beyond the defaults;
    `bytes_read` is None where the roofline is not known.
    """

    machine: Machine
    start_s: Block[Quantiles] | None
    decode: tuple[Block[list[DecodePoint]], ...]
    prefill: Block[list[PrefillPoint]] | None
    switch: Block[SwitchFigures] | None
    client: Block[ClientFigures] | None = None
    kernels: Block[KernelFigures] | None = None
    metrics: Block[MetricsCost] | None = None
    build: Build | None = None
    flags: tuple[str, ...] = ()
    bytes_read: DecodeBytes | None = None
    rival: RivalFacts | None = None

    def blocks(self) -> Iterator[tuple[str, Block[Any]]]:
        """(name of the field, block) of everything that was measured."""
        yield from (("decode", block) for block in self.decode)
        for name in ("start_s", "prefill", "switch", "client", "kernels", "metrics"):
            block: Block[Any] | None = getattr(self, name)
            if block is not None:
                yield name, block


def as_json(figures: Figures) -> Mapping[str, Any]:
    """Plain values; the criterion's verdict and the state's name are spelled out."""
    plain: dict[str, Any] = msgspec.to_builtins(figures)
    decode = iter(plain["decode"])
    for name, block in figures.blocks():
        target = next(decode) if name == "decode" else plain[name]
        target["state_before"], target["state_after"] = block.before.name, block.after.name
    for name in ("switch", "client", "metrics"):
        judged: Block[SwitchFigures] | Block[ClientFigures] | Block[MetricsCost] | None = getattr(
            figures, name
        )
        if judged is not None:
            plain[name]["figures"]["held"] = judged.figures.held
    return plain


def read_json(data: bytes) -> Figures:
    """What `as_json` wrote. Raises `ConfigError` for anything else."""
    try:
        return msgspec.json.decode(data, type=Figures)
    except msgspec.DecodeError as error:
        raise ConfigError(f"not the JSON of scripts/bench: {error}") from error
