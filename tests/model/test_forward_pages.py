"""KV pages: the documented order of elements, reading back what was written, and masks."""

from __future__ import annotations

import pytest
import torch

from dynamictp.errors import ConfigError
from dynamictp.facts import DType
from dynamictp.kv import KVSpec
from dynamictp.model.pages import KVArena, Scratch

LAYERS, HEADS, DIM, TOKENS, PAGES = 2, 3, 32, 48, 6


def arena_of(dtype: DType, page_tokens: int = 16) -> KVArena:
    spec = KVSpec(LAYERS, HEADS, DIM, page_tokens, dtype)
    memory = torch.full((9 * spec.page_bytes + 5,), 0xFF, dtype=torch.uint8)
    return KVArena(memory, spec)


def written(arena: KVArena, layer: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V [tokens, heads, D] on random pages, and the page table [blocks, heads]."""
    torch.manual_seed(0)
    table = torch.randperm(9)[: 3 * HEADS].view(3, HEADS)
    k = torch.randn(TOKENS, HEADS, DIM).bfloat16().float()
    v = torch.randn(TOKENS, HEADS, DIM).bfloat16().float()
    position = torch.arange(TOKENS)
    pages, slots = table[position // 16], position % 16
    arena.write_k(layer, arena.k_index(pages, slots), k)
    arena.write_v(layer, arena.v_index(pages, slots), v)
    return k, v, table


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_elements_lie_as_documented(dtype: DType) -> None:
    arena = arena_of(dtype)
    k, v, table = written(arena)
    assert arena.pages == 9
    assert arena.tensor.shape == (LAYERS, 2, 9, 16 * DIM)
    for token, head, dim in ((0, 0, 0), (17, 2, 31), (47, 1, 8), (30, 0, 7)):
        page = int(table[token // 16, head])
        slot = token % 16
        pairs_of_dims = arena.tensor[1, 0, page].view(DIM // 2, 16, 2)
        pairs_of_tokens = arena.tensor[1, 1, page].view(8, DIM, 2)
        assert pairs_of_dims[dim // 2, slot, dim % 2] == k[token, head, dim]
        assert pairs_of_tokens[slot // 2, dim, slot % 2] == v[token, head, dim]
    assert arena.tensor[0].isnan().all(), "another layer was touched"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_pages_read_back(dtype: DType) -> None:
    arena = arena_of(dtype)
    k, v, table = written(arena)
    pages = table.t().reshape(-1)  # one item per head
    keys = arena.read_k(1, pages, HEADS, Scratch())
    assert torch.equal(keys, k.permute(1, 2, 0))
    kept = torch.ones(HEADS, 3, 16, dtype=torch.bool)
    values = arena.read_v(1, pages, arena.value_mask(kept), HEADS, Scratch())
    assert torch.equal(values, v.permute(1, 0, 2))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_masked_values_are_zero_whatever_is_stored(dtype: DType) -> None:
    arena = arena_of(dtype)
    arena.tensor.fill_(torch.nan)
    kept = (torch.arange(32) < 19).view(1, 2, 16)
    arena.tensor[0, 1, 4] = 2.0
    values = arena.read_v(0, torch.tensor([4, 7]), arena.value_mask(kept), 1, Scratch())
    assert (values[0, :16] == 2).all()
    assert values[0, 16:19].isnan().all()
    assert (values[0, 19:] == 0).all()


def test_page_sizes_that_break_exactness_are_refused() -> None:
    with pytest.raises(ConfigError, match="page_tokens is 24"):
        arena_of("bf16", page_tokens=24)
