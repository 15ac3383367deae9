"""KV cache sizes: pages, blocks, arenas and quotas."""

from __future__ import annotations

from fractions import Fraction

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynamictp.errors import ModelRefused
from dynamictp.facts import ModelFacts, RopeFacts
from dynamictp.kv import KVSpec, quota_blocks

SMOLLM2 = ModelFacts(
    family="llama", layers=30, hidden=576, query_heads=9, kv_heads=3, head_dim=64, intermediate=1536,
    vocab=49152, max_context=8192, norm_eps=1e-5, rope=RopeFacts(theta=100_000.0),
)  # fmt: skip

SPECS = st.builds(
    KVSpec,
    layers=st.integers(1, 100),
    kv_heads=st.integers(1, 16),
    head_dim=st.sampled_from((16, 64, 80, 128)),
    page_tokens=st.integers(1, 64).map(lambda pairs: 2 * pairs),
    dtype=st.sampled_from(("bf16", "fp32")),
)


def test_smollm2_takes_23040_bytes_a_token() -> None:
    spec = KVSpec.of(SMOLLM2, 64, "bf16")
    assert spec.plane_elements == 64 * 64
    assert spec.page_bytes == 2 * 30 * 64 * 64 * 2 == 491_520
    assert spec.block_bytes == 64 * 23_040 == 64 * SMOLLM2.kv_bytes_per_token("bf16")
    assert KVSpec.of(SMOLLM2, 64, "fp32").block_bytes == 2 * spec.block_bytes


@given(SPECS)
def test_a_block_holds_its_tokens_and_nothing_else(spec: KVSpec) -> None:
    per_token = 2 * spec.layers * spec.kv_heads * spec.head_dim * {"bf16": 2, "fp32": 4}[spec.dtype]
    assert spec.block_bytes == spec.page_tokens * per_token == spec.kv_heads * spec.page_bytes


@given(SPECS, st.integers(0, 100_000))
def test_blocks_are_rounded_up(spec: KVSpec, tokens: int) -> None:
    blocks = spec.blocks(tokens)
    assert (blocks - 1) * spec.page_tokens < tokens <= blocks * spec.page_tokens or tokens == blocks == 0


@given(SPECS, st.integers(0, 1 << 40))
def test_an_arena_is_whole_blocks_and_fits(spec: KVSpec, memory_bytes: int) -> None:
    pages = spec.arena_pages(memory_bytes)
    assert pages % spec.kv_heads == 0
    assert pages * spec.page_bytes <= memory_bytes < pages * spec.page_bytes + spec.block_bytes


def test_an_arena_of_one_gib_holds_46592_tokens_of_smollm2() -> None:
    spec = KVSpec.of(SMOLLM2, 64, "bf16")
    pages = spec.arena_pages(1 << 30)
    assert pages == 3 * 728
    assert pages // spec.kv_heads * spec.page_tokens == 46_592
    assert spec.arena_pages(spec.block_bytes - 1) == 0
    assert spec.arena_pages(spec.block_bytes) == 3


@given(
    st.integers(0, 1 << 24), st.lists(st.integers(1, 16), min_size=1, max_size=8), st.sampled_from((0.7, 1.0))
)
@example(5670, [3], 0.7)
def test_quotas_of_disjoint_domains_fit_the_arena(arena_blocks: int, domains: list[int], cap: float) -> None:
    devices = sum(domains)
    quotas = [quota_blocks(arena_blocks, devices, taken, cap) for taken in domains]
    # Exactly: as a float 5670 * 0.7 is less than the 3969 blocks that it is.
    assert 0 <= sum(quotas) <= arena_blocks * Fraction(str(cap))
    assert sum(quotas) > arena_blocks * cap - len(domains) - 1  # no more than rounding is lost


@given(st.integers(0, 1 << 24), st.integers(1, 64))
def test_a_domain_on_all_devices_has_the_whole_arena(arena_blocks: int, devices: int) -> None:
    assert quota_blocks(arena_blocks, devices, devices) == arena_blocks


@given(st.integers(0, 1 << 20), st.integers(1, 16), st.data())
def test_a_wider_domain_has_no_smaller_quota(arena_blocks: int, devices: int, data: st.DataObject) -> None:
    taken = data.draw(st.integers(1, devices))
    assert quota_blocks(arena_blocks, devices, taken - 1) <= quota_blocks(arena_blocks, devices, taken)


def test_quotas_in_dynamic_mode() -> None:
    assert quota_blocks(728, 2, 1, 0.7) == 254
    assert quota_blocks(728, 2, 2, 0.7) == 509


def test_other_kinds_of_attention_are_refused_by_name() -> None:
    with pytest.raises(ModelRefused, match="'sliding_window' is not supported; supported: full"):
        KVSpec(30, 3, 64, 64, "bf16", kind="sliding_window")


@pytest.mark.parametrize("page_tokens", [-2, 0, 1, 63])
def test_pages_hold_pairs_of_tokens(page_tokens: int) -> None:
    with pytest.raises(ValueError, match="even"):
        KVSpec.of(SMOLLM2, page_tokens, "bf16")


@given(SPECS)
def test_specs_travel_between_processes(spec: KVSpec) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=KVSpec) == spec
