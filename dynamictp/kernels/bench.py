"""`python -m dynamictp.kernels.bench`: the native path by itself, all ranks in one process.

Prints the time of a step by batch and degree, of a prefill, and the memory state before and after: a figure
means nothing without it. No server, no scheduler: what the kernels can do.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import click
import numpy as np
from numpy.typing import NDArray

from dynamictp.bench.machine import describe_machine, probe_memory
from dynamictp.facts import DType, WeightType
from dynamictp.kernels.native import NativeModel, collapse
from dynamictp.kernels.select import LEVELS, kernel_level
from dynamictp.kv import KVSpec
from dynamictp.model.load import open_model
from dynamictp.model.rope import RopeTable
from dynamictp.model.weights import load_weights, plan_weights
from dynamictp.testing.native_domain import NativeDomain, Part, shared_bytes

PAGE_TOKENS = 64


class Loaded(NamedTuple):
    """A model ready to run, with an arena of `blocks` blocks."""

    model: NativeModel
    blocks: int


class Timing(NamedTuple):
    """Milliseconds: median step, and medians of what rank 0 spent in matrices, in attention, at barriers."""

    step_ms: float
    weights_ms: float
    attention_ms: float
    wait_ms: float

    def __str__(self) -> str:
        return (
            f"weights {self.weights_ms:.2f}, attention {self.attention_ms:.2f}, waiting {self.wait_ms:.2f} ms"
        )


def load(path: str, dtype: DType, level: str, tokens: int, weights_type: WeightType = "") -> Loaded:
    """Read a model, with pages for `tokens` tokens."""
    source = open_model(path)
    weights_index = plan_weights(source.facts, dtype, "panels", weights_type)
    weights = shared_bytes(weights_index.total_bytes)
    load_weights(source, weights_index, weights)
    spec = KVSpec.of(source.facts, PAGE_TOKENS, dtype)
    blocks = spec.blocks(tokens)
    arena = shared_bytes(blocks * spec.block_bytes)
    rotation = RopeTable(source.facts)
    return Loaded(NativeModel(source.facts, weights_index, weights, arena, spec, rotation, level), blocks)


def tables(loaded: Loaded, sequences: int) -> list[NDArray[np.int32]]:
    """Page tables that share the arena evenly; pages of one sequence and head are adjacent."""
    each, heads = loaded.blocks // sequences, loaded.model.facts.kv_heads
    pages = np.arange(sequences * heads * each, dtype=np.int32).reshape(sequences, heads, each)
    return [np.ascontiguousarray(pages[s].T) for s in range(sequences)]


def decode(domain: NativeDomain, loaded: Loaded, batch: int, context: int, steps: int) -> Timing:
    """Steps of one token for each of `batch` sequences at about `context` tokens."""
    each = tables(loaded, batch)
    rows = list(range(batch))
    times = []
    for number in range(steps + 2):
        token = np.full(1, 7 + number, np.int64)
        parts = [Part(token, context - 1, table) for table in each]
        times.append(_timed(domain, parts, rows))
    return Timing(*map(statistics.median, zip(*times[2:], strict=True)))


def prefill(domain: NativeDomain, loaded: Loaded, tokens: int, chunk: int) -> Timing:
    """A prompt of `tokens` tokens in chunks."""
    table = tables(loaded, 1)[0]
    prompt = np.random.default_rng(0).integers(0, loaded.model.facts.vocab, tokens)
    total = np.zeros(4)
    for start in range(0, tokens, chunk):
        part = Part(prompt[start : start + chunk], start, table)
        total += _timed(domain, [part], [len(part.tokens) - 1])
    return Timing(*total)


def _timed(domain: NativeDomain, parts: Sequence[Part], rows: Sequence[int]) -> tuple[float, ...]:
    began = time.perf_counter()
    domain.compute(parts, rows)
    elapsed = time.perf_counter() - began
    return tuple(seconds * 1e3 for seconds in (elapsed, *domain.ranks[0].take_split()))


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    batches: tuple[int, ...]
    context: int
    steps: int
    prompt: int
    chunk: int
    threads: int = 1


def measure(loaded: Loaded, tp: int, plan: Plan) -> Iterator[str]:
    """A line for every batch, and one for the prefill."""
    cores = sorted(os.sched_getaffinity(0))
    with NativeDomain(
        loaded.model,
        tp,
        max_tokens=max(plan.chunk, *plan.batches),
        max_rows=max(plan.batches),
        threads=plan.threads,
        cores=cores if tp * plan.threads <= len(cores) else (),
    ) as domain:
        for batch in plan.batches:
            timing = decode(domain, loaded, batch, plan.context, plan.steps)
            yield (
                f"tp{tp} batch {batch:3d} context {plan.context}: {timing.step_ms:7.2f} ms "
                f"({batch / timing.step_ms * 1e3:6.0f} tok/s; {timing})"
            )
        if plan.prompt:
            timing = min(prefill(domain, loaded, plan.prompt, plan.chunk) for _ in range(3))
            yield f"tp{tp} prefill {plan.prompt}: {timing.step_ms:.0f} ms ({timing})"


@click.command()
@click.option("--model", default="demo")
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16")
@click.option("--weights", type=click.Choice(["", "int8"]), default="", help="Quantisation.")
@click.option("--threads", default=1, help="Threads of each rank.")
@click.option("--level", type=click.Choice(LEVELS), help="CPU-feature level; the best by default.")
@click.option("--tp", "degrees", multiple=True, type=int, default=(1, 2))
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 4, 16, 32, 64))
@click.option("--context", default=128, help="Tokens of context of each sequence.")
@click.option("--steps", default=20)
@click.option("--prefill", "prompt", default=1000, help="Prompt tokens of the prefill; 0 for none.")
@click.option("--chunk", default=512)
@click.option("--probe/--no-probe", default=True, help="Print the memory state before and after.")
def main(
    *,
    model: str,
    dtype: DType,
    weights: WeightType,
    level: str | None,
    degrees: tuple[int, ...],
    probe: bool,
    **plan: Any,
) -> None:
    """Step times of the native kernels."""
    wanted = Plan(**plan)
    tokens = max(max(wanted.batches) * (wanted.context + PAGE_TOKENS), wanted.prompt + PAGE_TOKENS)
    loaded = load(model, dtype, level or kernel_level(), tokens, weights)
    huge = collapse(loaded.model.weights)
    click.echo(
        f"{describe_machine()}; {loaded.model.level}, {weights or dtype} weights, {huge:.0%} of them in huge "
        f"pages, {wanted.threads} thread(s) a rank"
    )
    if probe:
        click.echo(probe_memory())
    for tp in degrees:
        for line in measure(loaded, tp, wanted):
            click.echo(line)
    if probe:
        click.echo(probe_memory())


if __name__ == "__main__":
    main()
