"""The native forward pass: against a plain decoder, and its bits over degree, batch, chunking and pages."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynamictp.errors import CommunicatorBroken
from dynamictp.facts import DType
from dynamictp.kernels.native import NativeModel, StepSplit, native_exchange_bytes
from dynamictp.testing.native_domain import NativeDomain, Part
from tests.kernels.models import USABLE, VARIANTS, make_model, row_weights
from tests.kernels.reference import reference_logits

TYPES: tuple[DType, ...] = ("bf16", "fp32")
Logits = NDArray[np.float32]


def prompt(count: int, seed: int = 0, vocab: int = 523) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, vocab, count)


def page_table(model: NativeModel, tokens: int, seed: int = 0) -> NDArray[np.int32]:
    """Pages of one sequence, scattered over the arena."""
    heads, blocks = model.facts.kv_heads, model.spec.blocks(tokens)
    pages = model.arena.nbytes // model.spec.page_bytes
    chosen = np.random.default_rng(seed).permutation(pages)[: blocks * heads]
    return chosen.reshape(blocks, heads).astype(np.int32)


def run_chunks(
    model: NativeModel, tp: int, tokens: NDArray[np.int64], chunks: Sequence[int], seed: int = 0
) -> Logits:
    """Logits of every token, computed in chunks of the given sizes."""
    table = page_table(model, len(tokens), seed)
    parts: list[Logits] = []
    with NativeDomain(model, tp, max_tokens=max(chunks), max_rows=max(chunks)) as domain:
        start = 0
        for count in chunks:
            part = Part(tokens[start : start + count], start, table)
            parts.append(domain.step([part], list(range(count)))[0])
            start += count
    return np.concatenate(parts)


@pytest.mark.parametrize("level", USABLE)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_a_plain_decoder(variant: str, dtype: DType, level: str) -> None:
    model, tokens = make_model(variant, dtype, level=level), prompt(77)
    expected = reference_logits(VARIANTS[variant], *row_weights(variant, dtype), tokens)
    got = run_chunks(model, 1, tokens, [50, 27])
    difference = np.abs(got - expected)
    # Two layers of bf16 activations: a few units of 2^-8 of the logits' size.
    limit = 2e-5 if dtype == "fp32" else 0.03
    assert difference.max() <= limit * expected.std() * 4
    assert difference.mean() <= limit * expected.std()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_degree_gives_the_same_bits(variant: str, dtype: DType) -> None:
    tokens = prompt(41)
    reference, pages = None, None
    for tp in range(1, 10):
        model = make_model(variant, dtype)
        logits = run_chunks(model, tp, tokens, [20, 20, 1])
        if reference is None:
            reference, pages = logits, model.arena.copy()
        assert np.array_equal(logits, reference), f"tp{tp}"
        assert np.array_equal(model.arena, pages), f"pages at tp{tp}"


@pytest.mark.parametrize("level", USABLE)
@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=6)
@given(
    data=st.data(), length=st.integers(2, 120), tp=st.integers(1, 4), page_blocks=st.sampled_from([16, 64])
)
def test_chunking_and_pages_change_no_bit(
    *, dtype: DType, level: str, data: st.DataObject, length: int, tp: int, page_blocks: int
) -> None:
    chunks: list[int] = []
    while sum(chunks) < length:
        chunks.append(data.draw(st.integers(1, length - sum(chunks))))
    model = make_model("llama", dtype, level=level, page_tokens=page_blocks)
    whole = run_chunks(model, 1, prompt(length), [length])
    model.arena[:] = 0xFF
    assert np.array_equal(run_chunks(model, tp, prompt(length), chunks, seed=1), whole)


@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    extra=st.lists(st.integers(1, 6), min_size=20, max_size=20),
    tp=st.integers(1, 3),
)
def test_the_batch_changes_no_bit(dtype: DType, lengths: list[int], extra: list[int], tp: int) -> None:
    """Sequences of ragged lengths, prefilled alone, then continued together and alone."""
    model = make_model("llama", dtype, blocks=20 * 5)
    heads, blocks = model.facts.kv_heads, 5
    tables = [
        np.arange(i * blocks * heads, (i + 1) * blocks * heads, dtype=np.int32).reshape(blocks, heads)
        for i in range(len(lengths))
    ]
    sequences = [
        prompt(length + more, seed=i) for i, (length, more) in enumerate(zip(lengths, extra, strict=False))
    ]
    parts = [Part(s[n:], n, t) for s, n, t in zip(sequences, lengths, tables, strict=True)]
    last = np.cumsum([len(part.tokens) for part in parts]) - 1
    with NativeDomain(model, tp, max_tokens=130, max_rows=20) as domain:
        for sequence, length, table in zip(sequences, lengths, tables, strict=True):
            domain.step([Part(sequence[:length], 0, table)], [length - 1])
        together, best = domain.step(parts, last.tolist())
        for i, part in enumerate(parts):
            alone, _ = domain.step([part], [len(part.tokens) - 1])
            assert np.array_equal(alone[0], together[i])
            assert best[i] == int(alone[0].argmax())


@pytest.mark.parametrize("dtype", TYPES)
def test_long_contexts_decode_as_they_prefill(dtype: DType) -> None:
    """4,096 tokens: the last one by itself, and as the end of a chunk, on one rank and on three."""
    model = make_model("llama", dtype, blocks=64, page_tokens=64)
    tokens = prompt(4096)
    whole = run_chunks(model, 1, tokens, [512] * 8)
    assert np.isfinite(whole).all()
    table = page_table(model, 4096)
    with NativeDomain(model, 3, max_tokens=16, max_rows=1) as domain:
        for start in (4095, 4090, 4000, 63, 0):
            logits, _ = domain.step([Part(tokens[start : start + 1], start, table)], [0])
            assert np.array_equal(logits[0], whole[start])


def test_broken_peers_release_the_step() -> None:
    model = make_model("llama", "bf16")
    with NativeDomain(model, 2, max_tokens=16, max_rows=4) as domain:
        table = page_table(model, 16)
        domain.comms[1].abort()
        with pytest.raises(CommunicatorBroken):
            domain.step([Part(prompt(3), 0, table)], [2])


@pytest.mark.parametrize(
    ("tokens", "table", "message"),
    [
        ([5] * 17, [[0, 1, 2]] * 2, "at most 16"),
        ([523], [[0, 1, 2]], "not in the vocabulary"),
        ([5], [[0, 1, 48]], "not in the arena"),
        ([5], [[0, -1, 2]], "not in the arena"),
    ],
)
def test_steps_beyond_the_limits_are_refused(tokens: list[int], table: list[list[int]], message: str) -> None:
    model = make_model("llama", "bf16")
    part = Part(np.array(tokens), 0, np.array(table, np.int32))
    with (
        NativeDomain(model, 1, max_tokens=16, max_rows=4) as domain,
        pytest.raises(ValueError, match=message),
    ):
        domain.step([part], [0])


def test_the_exchange_grows_with_its_limits() -> None:
    facts = VARIANTS["llama"]

    def size(tokens: int, rows: int, world: int) -> int:
        return native_exchange_bytes(facts, "bf16", max_tokens=tokens, max_rows=rows, world=world)

    assert size(16, 4, 1) < size(17, 4, 1) < size(17, 5, 1) < size(17, 5, 9)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_parts_of_a_step_lie_within_its_time(tp: int) -> None:
    model, tokens = make_model("llama", "bf16"), prompt(40)
    with NativeDomain(model, tp, max_tokens=40, max_rows=1) as domain:
        began = time.perf_counter()
        domain.step([Part(tokens, 0, page_table(model, 40))], [39])
        elapsed_s = time.perf_counter() - began
        for rank in domain.ranks:
            split = rank.take_split()
            assert split.weights_s > 0
            assert split.attention_s > 0
            assert (split.wait_s > 0) == (tp > 1)
            assert sum(split) < elapsed_s
            assert rank.take_split() == StepSplit()
