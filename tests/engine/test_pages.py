"""Pages and blocks: every page is free or in one block, neighbours stay neighbours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamictp.engine.blocks import BlockPool
from dynamictp.engine.pages import GROUP_PAGES, Block, PageAllocator
from dynamictp.engine.prefix import chain_key, chain_root


def test_pages_of_one_sequence_and_head_are_adjacent() -> None:
    allocator = PageAllocator(96, 3)
    last: dict[str, tuple[int, ...] | None] = {"a": None, "b": None}
    tables: dict[str, list[tuple[int, ...]]] = {"a": [], "b": []}
    for _ in range(GROUP_PAGES):
        for name, table in tables.items():
            pages = allocator.allocate(last[name])
            assert pages is not None
            last[name] = pages
            table.append(pages)
    for table in tables.values():
        for head in range(3):
            column = [pages[head] for pages in table]
            assert column == list(range(column[0], column[0] + GROUP_PAGES))


def test_a_fragmented_arena_is_used_to_the_last_block() -> None:
    allocator = PageAllocator(60, 3)
    taken = [allocator.allocate() for _ in range(20)]
    assert allocator.allocate() is None
    for pages in taken[::2]:
        assert pages is not None
        allocator.free(pages)
    again = [allocator.allocate() for _ in range(10)]
    assert None not in again
    assert allocator.allocate() is None


def test_a_page_is_not_freed_twice() -> None:
    allocator = PageAllocator(8, 2)
    pages = allocator.allocate()
    assert pages is not None
    allocator.free(pages)
    with pytest.raises(ValueError, match="twice"):
        allocator.free(pages)


def test_pages_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="whole number"):
        PageAllocator(10, 3)


@given(st.integers(1, 4), st.integers(1, 30), st.data())
def test_no_page_is_lost_or_doubled(heads: int, blocks: int, data: st.DataObject) -> None:
    allocator = PageAllocator(heads * blocks, heads)
    held: list[tuple[int, ...]] = []
    for _ in range(data.draw(st.integers(0, 60))):
        if held and data.draw(st.booleans()):
            allocator.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
        else:
            after = data.draw(st.sampled_from([None, *held]))
            pages = allocator.allocate(after)
            assert (pages is None) == (len(held) == blocks)
            if pages is not None:
                held.append(pages)
        allocator.check_integrity(page for pages in held for page in pages)
        assert allocator.free_blocks == blocks - len(held)


@given(st.integers(2, 12), st.data())
def test_pool_accounts_hold_under_random_sequences(blocks: int, data: st.DataObject) -> None:
    """Sequences over two letters, so that they share beginnings; every block is entered when filled."""
    pool = BlockPool(blocks * 2, 2)
    sequences: list[tuple[list[bytes], list[Block]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        if sequences and data.draw(st.booleans()):
            _, held = sequences.pop(data.draw(st.integers(0, len(sequences) - 1)))
            pool.release(held)
        else:
            keys = [chain_root("m", "", "exact")]
            for letter in data.draw(st.text("ab", min_size=1, max_size=5)):
                keys.append(chain_key(keys[-1], letter.encode()))
            del keys[0]
            held = pool.match(keys)
            for block in held:
                pool.share(block)
            while len(held) < len(keys):
                new = pool.allocate(held[-1] if held else None)
                if new is None:
                    assert pool.available == 0
                    break
                held.append(new)
                pool.enter(new, keys[len(held) - 1], held[-2] if len(held) > 1 else None)
            sequences.append((keys, held))
        pool.check_integrity(held for _, held in sequences)
    for _, held in sequences:
        pool.release(held)
    assert pool.available == pool.total
