"""The rules of exact numerics, operation by operation: which forms of a torch operation keep their bits.

When one of these fails with another torch or another processor, the forward pass needs another rule.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from dynamictp.model.attention import GROUP_TOKENS
from dynamictp.model.exchange_size import MIN_ROWS

SHAPES = [(144, 240), (288, 144), (576, 960), (1536, 576)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize(("columns", "rows"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linears_keep_their_bits_in_1_to_64_rows(columns: int, rows: int, dtype: torch.dtype) -> None:
    weight = torch.randn(rows, columns, dtype=dtype)
    x = torch.randn(64, columns, dtype=dtype)
    whole = functional.linear(x, weight)
    for count in range(1, 65):
        padded = torch.zeros(max(count, MIN_ROWS), columns, dtype=dtype)
        padded[:count] = x[:count]
        assert torch.equal(functional.linear(padded, weight)[:count], whole[:count]), count


@pytest.mark.parametrize(("columns", "rows"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linears_keep_their_bits_when_cut_at_panels(columns: int, rows: int, dtype: torch.dtype) -> None:
    weight = torch.randn(rows, columns, dtype=dtype)
    for count in (4, 7, 64, 300):
        x = torch.randn(count, columns, dtype=dtype)
        whole = functional.linear(x, weight)
        for start in range(0, rows, 48):
            for stop in (start + 16, start + 32, rows):
                assert torch.equal(functional.linear(x, weight[start:stop]), whole[:, start:stop])


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_scores_do_not_depend_on_rows_columns_or_batch(dim: int) -> None:
    q, k = torch.randn(5, 96, dim), torch.randn(5, dim, 512)
    whole = torch.bmm(q, k)
    for items in (1, 2, 5):
        for rows in (4, 5, 9, 12, 33, 96):
            for columns in (16, 64, 208, 512):
                found = torch.bmm(q[:items, :rows].contiguous(), k[:items, :, :columns].contiguous())
                assert torch.equal(found, whole[:items, :rows, :columns])


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_zero_probabilities_beyond_the_context_change_nothing(dim: int) -> None:
    v = torch.randn(3, GROUP_TOKENS, dim)
    for tokens in range(16, GROUP_TOKENS + 1, 16):
        p = torch.zeros(3, 40, GROUP_TOKENS)
        p[:, :, :tokens] = torch.rand(3, 40, tokens)
        whole = torch.bmm(p, v)
        for items, rows in ((1, 4), (1, 40), (3, 5)):
            part = p[:items, :rows, :tokens].contiguous()
            assert torch.equal(torch.bmm(part, v[:items, :tokens]), whole[:items, :rows])


@pytest.mark.parametrize("page", [16, 48, 64])
def test_rowwise_operations_do_not_depend_on_the_shape(page: int) -> None:
    x = torch.randn(5, 90, 4, page)
    total, top, exps = x.sum(-1), x.amax(-1), x.exp()
    for items, rows, pages in ((1, 4, 1), (1, 7, 3), (2, 51, 2), (5, 89, 4)):
        part = x[:items, :rows, :pages].clone(memory_format=torch.contiguous_format)
        assert torch.equal(part.sum(-1), total[:items, :rows, :pages])
        assert torch.equal(part.amax(-1), top[:items, :rows, :pages])
        assert torch.equal(part.exp_(), exps[:items, :rows, :pages])


def test_norms_do_not_depend_on_the_number_of_rows() -> None:
    for width in (16, 64, 144, 576):
        x, weight = torch.randn(300, width), torch.rand(width)
        whole = functional.rms_norm(x, (width,), weight, 1e-5)
        for start, stop in ((0, 4), (3, 8), (100, 137), (0, 299)):
            found = functional.rms_norm(x[start:stop].contiguous(), (width,), weight, 1e-5)
            assert torch.equal(found, whole[start:stop])
