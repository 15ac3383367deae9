"""The native forward pass: against a plain decoder, and its bits over degree, batch, chunking and pages."""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dynamictp.errors import CommunicatorBroken
from dynamictp.facts import DType, WeightType
from dynamictp.kernels.native import NativeModel, StepSplit, native_exchange_bytes, open_team
from dynamictp.testing.native_domain import NativeDomain, Part
from dynamictp.worker.comm.control import ControlState, WorkerState, bytes_needed, open_control
from tests.kernels.models import USABLE, VARIANTS, int8_as_fp32, make_model, row_weights
from tests.kernels.reference import reference_logits

TYPES: tuple[DType, ...] = ("bf16", "fp32")
STORED: tuple[tuple[DType, WeightType], ...] = (("bf16", ""), ("fp32", ""), ("bf16", "int8"))
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
    model: NativeModel,
    tp: int,
    tokens: NDArray[np.int64],
    chunks: Sequence[int],
    *,
    seed: int = 0,
    threads: int = 1,
) -> Logits:
    """Logits of every token, computed in chunks of the given sizes."""
    table = page_table(model, len(tokens), seed)
    parts: list[Logits] = []
    limit = max(chunks)
    with NativeDomain(model, tp, max_tokens=limit, max_rows=limit, threads=threads) as domain:
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


@pytest.mark.parametrize("level", USABLE)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_int8_equals_a_plain_decoder_of_its_values(variant: str, dtype: DType, level: str) -> None:
    model, tokens = make_model(variant, dtype, "int8", level=level), prompt(77)
    expected = reference_logits(*int8_as_fp32(variant, dtype), tokens)
    difference = np.abs(run_chunks(model, 1, tokens, [50, 27]) - expected)
    # With fp32 around them the integers lose 2^-16 of a group's largest activation.
    limit = 4e-4 if dtype == "fp32" else 0.03
    assert difference.max() <= limit * expected.std() * 4
    assert difference.mean() <= limit * expected.std()


@pytest.mark.parametrize(("dtype", "weights"), STORED)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_degree_gives_the_same_bits(variant: str, dtype: DType, weights: WeightType) -> None:
    tokens = prompt(41)
    reference, pages = None, None
    for tp in range(1, 10):
        model = make_model(variant, dtype, weights)
        logits = run_chunks(model, tp, tokens, [20, 20, 1])
        if reference is None:
            reference, pages = logits, model.arena.copy()
        assert np.array_equal(logits, reference), f"tp{tp}"
        assert np.array_equal(model.arena, pages), f"pages at tp{tp}"


@pytest.mark.parametrize("level", USABLE)
@pytest.mark.parametrize(("dtype", "weights"), STORED)
def test_threads_of_a_rank_change_no_bit(dtype: DType, weights: WeightType, level: str) -> None:
    tokens = prompt(41)
    model = make_model("llama", dtype, weights, level=level)
    reference = run_chunks(model, 1, tokens, [20, 20, 1])
    pages = model.arena.copy()
    # Nine ranks have one panel of the hidden rows each, so that most threads have none.
    for tp, threads in ((1, 2), (1, 3), (2, 2), (2, 3), (9, 2)):
        model = make_model("llama", dtype, weights, level=level)
        assert np.array_equal(run_chunks(model, tp, tokens, [20, 20, 1], threads=threads), reference)
        assert np.array_equal(model.arena, pages)


@pytest.mark.parametrize("level", USABLE)
@pytest.mark.parametrize(("dtype", "weights"), STORED)
@settings(max_examples=6)
@given(
    data=st.data(), length=st.integers(2, 120), tp=st.integers(1, 4), page_blocks=st.sampled_from([16, 64])
)
def test_chunking_and_pages_change_no_bit(
    *,
    dtype: DType,
    weights: WeightType,
    level: str,
    data: st.DataObject,
    length: int,
    tp: int,
    page_blocks: int,
) -> None:
    chunks: list[int] = []
    while sum(chunks) < length:
        chunks.append(data.draw(st.integers(1, length - sum(chunks))))
    model = make_model("llama", dtype, weights, level=level, page_tokens=page_blocks)
    whole = run_chunks(model, 1, prompt(length), [length])
    model.arena[:] = 0xFF
    assert np.array_equal(run_chunks(model, tp, prompt(length), chunks, seed=1), whole)


@pytest.mark.parametrize(("dtype", "weights"), STORED)
@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    extra=st.lists(st.integers(1, 6), min_size=20, max_size=20),
    tp=st.integers(1, 3),
)
def test_the_batch_changes_no_bit(
    *, dtype: DType, weights: WeightType, lengths: list[int], extra: list[int], tp: int
) -> None:
    """Sequences of ragged lengths, prefilled alone, then continued together and alone."""
    model = make_model("llama", dtype, weights, blocks=20 * 5)
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


@pytest.mark.parametrize("threads", [1, 3])
def test_broken_peers_release_the_step(threads: int) -> None:
    model = make_model("llama", "bf16")
    with NativeDomain(model, 2, max_tokens=16, max_rows=4, threads=threads) as domain:
        table = page_table(model, 16)
        domain.comms[1].abort()
        for _ in range(3):  # a team outlives a step that broke
            with pytest.raises(CommunicatorBroken):
                domain.step([Part(prompt(3), 0, table)], [2])


def test_a_team_needs_a_core_for_each_thread() -> None:
    assert open_team(1) is None
    with pytest.raises(ValueError, match="3 threads on 2 cores"):
        open_team(3, (0, 1))
    with pytest.raises(RuntimeError, match="core 1023"):
        open_team(2, (0, 1023))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_progress_word_names_the_layer(threads: int) -> None:
    """Rank 0 is seen in its first layer, waiting for a rank that does not come, and after the head."""
    model = make_model("llama", "bf16")
    control = open_control(mmap.mmap(-1, bytes_needed(1, 2)), 1, 2)
    control.set_control(0, 1, ControlState.LIVE)
    control.set_progress(0, 7, 0, WorkerState.IDLE)
    with NativeDomain(model, 2, max_tokens=16, max_rows=4, threads=threads, control=control) as domain:
        table = page_table(model, 16)
        waiting = domain.on_rank(0, lambda rank: rank.run(prompt(3), [(0, 3)], [table]))
        while control.progress(0)[:3] != (7, 0, WorkerState.WAITING):
            assert not waiting.done()
        domain.on_rank(1, lambda rank: rank.run(prompt(3), [(0, 3)], [table])).result()
        waiting.result()
        assert control.progress(0)[:3] == (7, 1, WorkerState.COMPUTING)
        domain.on_all(lambda rank: rank.logits([2]))
        assert control.progress(0)[:3] == (7, 2, WorkerState.COMPUTING)


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
