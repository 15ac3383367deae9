"""All blocks of the arena: free, cached or referenced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dynamictp.engine.pages import Block, PageAllocator
from dynamictp.engine.prefix import PrefixCache


class BlockPool:
    """Owner of blocks: joins the page allocator and the prefix cache.

    Invariant: free + idle in the cache + referenced = all. A block is released only when no in-flight step
    names it; whoever holds the reference sees to that.
    """

    def __init__(self, pages: int, heads: int, *, prefix_cache: bool = True) -> None:
        self._pages = PageAllocator(pages, heads)
        self._cache = PrefixCache()
        self._caching = prefix_cache
        self.heads = heads
        self.total = pages // heads

    @property
    def free(self) -> int:
        return self._pages.free_blocks

    @property
    def cached(self) -> int:
        """Blocks that only the cache names: they are evicted when room is needed."""
        return self._cache.idle

    @property
    def evictions(self) -> int:
        """Blocks that the prefix cache gave up since the start."""
        return self._cache.evictions

    @property
    def available(self) -> int:
        return self._pages.free_blocks + self._cache.idle

    def allocate(self, after: Block | None = None) -> Block | None:
        """A new block with one reference, evicting a cached one if need be; None when all are referenced."""
        before = None if after is None else after.pages
        pages = self._pages.allocate(before)
        if pages is None:
            evicted = self._cache.evict()
            if evicted is None:
                return None
            self._pages.free(evicted.pages)
            pages = self._pages.allocate(before)
            if pages is None:
                raise RuntimeError("an evicted block did not make room for one")
        return Block(pages)

    def match(self, keys: Sequence[bytes], *, trials: bool = True) -> list[Block]:
        """The longest cached chain of blocks, not yet referenced; up to one on trial unless `trials`."""
        return self._cache.match(keys, trials=trials) if self._caching else []

    def share(self, block: Block) -> None:
        """Add a reference to a block found by `match`."""
        if not block.refs:
            self._cache.referenced(block)
        block.refs += 1

    def enter(self, block: Block, key: bytes, parent: Block | None, *, trial: bool = False) -> None:
        """Offer a filled block to the cache. `trial`: a ramp still watches the domain that filled it."""
        if self._caching:
            self._cache.enter(block, key, parent, trial=trial)

    def end_trial(self, *, accept: bool) -> None:
        """The ramp is over: trust what its new domains computed, or forget it."""
        if accept:
            self._cache.accept_trials()
            return
        for block in self._cache.discard_trials():
            self._pages.free(block.pages)

    def forget(self, blocks: Sequence[Block]) -> None:
        """Take the blocks of a sequence out of the cache, the last one first, as far as no other sequence's
        blocks in it follow them."""
        for block in reversed(blocks):
            if block.key is not None and (block.children or not block.refs):
                return
            self._cache.forget(block)

    def release(self, blocks: Sequence[Block]) -> None:
        """Drop one reference to each block of a sequence, the last one first."""
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs:
                continue
            if block.key is None:
                self._pages.free(block.pages)
            else:
                self._cache.released(block)

    def check_integrity(self, held: Iterable[Sequence[Block]]) -> None:
        """Raise RuntimeError unless `held` (the blocks of every holder) explains all references and pages."""
        refs = Counter(block for blocks in held for block in blocks)
        for block, count in refs.items():
            if block.refs != count:
                raise RuntimeError(f"block {block.pages} counts {block.refs} references, {count} exist")
        idle = [block for block in self._cache.blocks() if block not in refs]
        if any(block.refs for block in idle) or len(idle) != self._cache.idle:
            raise RuntimeError(f"{len(idle)} cached blocks are idle, the cache counts {self._cache.idle}")
        children = Counter(b.parent for b in self._cache.blocks() if b.parent is not None)
        if any(block.children != children[block] for block in self._cache.blocks()):
            raise RuntimeError("a cached block counts its children wrongly")
        self._pages.check_integrity(page for block in (*refs, *idle) for page in block.pages)
