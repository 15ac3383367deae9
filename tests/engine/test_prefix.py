"""Prefix keys and the order of eviction."""

from __future__ import annotations

from dynamictp.engine.blocks import BlockPool
from dynamictp.engine.pages import Block
from dynamictp.engine.prefix import KEY_BYTES, chain_key, chain_root


def chain(text: str, salt: str = "") -> list[bytes]:
    keys = [chain_root("m", salt, "exact")]
    for letter in text:
        keys.append(chain_key(keys[-1], letter.encode()))
    return keys[1:]


def fill(pool: BlockPool, keys: list[bytes]) -> list[Block]:
    """Blocks of a sequence whose every block is filled."""
    blocks: list[Block] = []
    for key in keys:
        block = pool.allocate(blocks[-1] if blocks else None)
        assert block is not None
        pool.enter(block, key, blocks[-1] if blocks else None)
        blocks.append(block)
    return blocks


def test_keys_depend_on_all_that_came_before() -> None:
    assert len(chain("a")[0]) == KEY_BYTES >= 16
    assert chain("ab")[1] != chain("bb")[1]
    assert chain("a", "tenant") != chain("a")
    # Parts are not run together.
    assert chain_root("ab", "c", "exact") != chain_root("a", "bc", "exact")


def test_released_blocks_are_found_again_and_are_not_free() -> None:
    pool = BlockPool(8, 1)
    blocks = fill(pool, chain("abc"))
    pool.release(blocks)
    assert (pool.free, pool.cached) == (5, 3)
    assert pool.match(chain("abd")) == blocks[:2]
    pool.share(blocks[0])
    assert (pool.cached, blocks[0].refs) == (2, 1)


def test_leaves_are_evicted_first_and_the_longest_unused_of_them() -> None:
    pool = BlockPool(6, 1)
    old = fill(pool, chain("ab"))
    pool.release(old)
    young = fill(pool, chain("xy"))
    pool.release(young)
    keep = [pool.allocate() for _ in range(2)]
    assert pool.allocate() is not None
    assert pool.match(chain("ab")) == old[:1]
    assert pool.match(chain("xy")) == young
    assert pool.allocate() is not None
    assert pool.match(chain("ab")) == []
    assert None not in keep


def test_a_used_block_is_not_evicted_and_goes_to_the_end_of_the_order() -> None:
    pool = BlockPool(4, 1)
    first, second = fill(pool, chain("a")), fill(pool, chain("b"))
    pool.release(first)
    pool.release(second)
    pool.share(first[0])
    pool.release(first)
    for _ in range(3):
        assert pool.allocate() is not None
    assert pool.match(chain("a")) == first
    assert pool.match(chain("b")) == []


def test_the_second_of_two_equal_blocks_keeps_its_own() -> None:
    pool = BlockPool(4, 1)
    first, second = fill(pool, chain("a")), fill(pool, chain("a"))
    assert pool.match(chain("a")) == first
    pool.release(second)
    assert (pool.free, pool.cached) == (3, 0)


def test_without_cache_nothing_is_kept() -> None:
    pool = BlockPool(4, 1, prefix_cache=False)
    blocks = fill(pool, chain("ab"))
    pool.release(blocks)
    assert (pool.free, pool.match(chain("ab"))) == (4, [])
