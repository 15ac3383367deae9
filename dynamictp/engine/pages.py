"""Pages of the KV arena, handed out as blocks.

A page holds `page_tokens` tokens of one KV head; a block is one page per KV head, for the same tokens. Blocks
are allocated whole or not at all, so a page table does not depend on the degree.
"""

from __future__ import annotations

from collections.abc import Iterable

GROUP_PAGES = 8
"""Pages that one (sequence, head) opens at a time: neighbours are read as one stream (measured 1.9x)."""


class Block:
    """One page per KV head for `page_tokens` tokens. `refs` counts the requests that name it.

    The prefix cache owns `key`, `parent`, `children`, `trial` and `used`; `key` is None for a block that is
    not in the cache.
    """

    __slots__ = ("children", "key", "pages", "parent", "refs", "trial", "used")

    def __init__(self, pages: tuple[int, ...]) -> None:
        self.pages = pages
        self.refs = 1
        self.key: bytes | None = None
        self.parent: Block | None = None
        self.children = 0
        self.used = 0
        self.trial = False
        """Computed by a domain that a ramp still watches."""


class PageAllocator:
    """Owner of the free pages. O(KV heads) per block.

    For each head it prefers the page after the block before (adjacent pages read faster), then the first
    page of an empty aligned group, then any free page.
    """

    def __init__(self, pages: int, heads: int) -> None:
        if heads < 1 or pages < heads or pages % heads:
            raise ValueError(f"{pages} pages are no whole number of blocks of {heads} heads")
        self.pages = pages
        self.heads = heads
        self.free_pages = pages
        self._is_free = bytearray(b"\1") * pages
        groups = -(-pages // GROUP_PAGES)
        self._free_in = [min(GROUP_PAGES, pages - g * GROUP_PAGES) for g in range(groups)]
        # Both are used as stacks of distinct groups; the lowest group is on top at first.
        self._empty: dict[int, None] = dict.fromkeys(reversed(range(groups)))
        self._partial: dict[int, None] = {}

    @property
    def free_blocks(self) -> int:
        return self.free_pages // self.heads

    def allocate(self, after: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
        """Pages of a new block, or None when there are not enough. `after`: the sequence's last block."""
        if self.free_pages < self.heads:
            return None
        return tuple(self._take(-1 if after is None else after[head] + 1) for head in range(self.heads))

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back. Raises ValueError for one that is free already."""
        for page in pages:
            if self._is_free[page]:
                raise ValueError(f"page {page} is freed twice")
            self._is_free[page] = 1
            self.free_pages += 1
            group = page // GROUP_PAGES
            self._free_in[group] += 1
            if self._free_in[group] == self._size(group):
                self._partial.pop(group, None)
                self._empty[group] = None
            else:
                self._partial[group] = None

    def check_integrity(self, used: Iterable[int]) -> None:
        """Raise RuntimeError unless exactly the pages `used` (each named once) are taken."""
        expected = bytearray(b"\1") * self.pages
        for page in used:
            if not expected[page]:
                raise RuntimeError(f"page {page} belongs to two blocks")
            expected[page] = 0
        if expected != self._is_free or sum(expected) != self.free_pages:
            wrong = [page for page in range(self.pages) if expected[page] != self._is_free[page]]
            raise RuntimeError(f"free pages are not those that no block names: {wrong[:8]}")
        for group, count in enumerate(self._free_in):
            listed = (group in self._empty, group in self._partial)
            if listed != (count == self._size(group), 0 < count < self._size(group)):
                raise RuntimeError(f"page group {group} with {count} free pages is in the wrong list")

    def _take(self, wanted: int) -> int:
        if 0 <= wanted < self.pages and self._is_free[wanted]:
            page = wanted
        else:
            group = next(reversed(self._empty)) if self._empty else next(reversed(self._partial))
            page = self._is_free.index(1, group * GROUP_PAGES)
        self._is_free[page] = 0
        self.free_pages -= 1
        group = page // GROUP_PAGES
        self._free_in[group] -= 1
        if self._free_in[group]:
            if self._empty.pop(group, 0) is None:
                self._partial[group] = None
        else:
            self._empty.pop(group, None)
            self._partial.pop(group, None)
        return page

    def _size(self, group: int) -> int:
        return min(GROUP_PAGES, self.pages - group * GROUP_PAGES)
