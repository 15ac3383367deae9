"""Prefix cache: whole blocks, found by a hash of everything before and in them.

A block's key is the hash of its parent's key and its own tokens; the chain starts from model, tenant salt
and numerics tag. Equal keys mean equal KV bytes, whichever domain computed them. Keys are 128 bits.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Sequence

from dynamictp.engine.pages import Block

KEY_BYTES = 16


def chain_root(model: str, salt: str, numerics: str) -> bytes:
    """Key that a sequence's first block hangs on."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in (model, salt, numerics):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def chain_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of a whole block of packed tokens after the block (or root) with key `parent`."""
    return hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES).digest()


class PrefixCache:
    """Owner of the map key → block and of the eviction order: leaves first, least recently used.

    A cached block without references is *idle*. A request that names a block names its cached parents too,
    so the children of an idle block are idle: every idle block can be evicted in the end.
    """

    def __init__(self) -> None:
        self.idle = 0
        self.evictions = 0
        self._blocks: dict[bytes, Block] = {}
        # (time of use, tie-break, block) of idle leaves. Entries go stale when a block is used again or gets
        # a child; they are recognised when popped.
        self._leaves: list[tuple[int, int, Block]] = []
        self._uses = 0
        self._trials: list[Block] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, keys: Sequence[bytes], *, trials: bool = True) -> list[Block]:
        """The longest cached chain, up to the first block on trial unless `trials`. The caller references its
        blocks before anything is evicted."""
        found: list[Block] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None or (block.trial and not trials):
                break
            found.append(block)
        return found

    def enter(self, block: Block, key: bytes, parent: Block | None, *, trial: bool = False) -> bool:
        """Make a filled, referenced block findable. False when equal content is there already.

        `parent` is the block before it in the same sequence; it holds the eviction order only if it is in
        the cache itself.
        """
        if block.key is not None or key in self._blocks:
            return False
        block.key = key
        self._blocks[key] = block
        if parent is not None and parent.key is not None:
            block.parent = parent
            parent.children += 1
        if trial:
            block.trial = True
            self._trials.append(block)
        return True

    def accept_trials(self) -> None:
        """The domain that computed them is trusted from now on."""
        for block in self._trials:
            block.trial = False
        self._trials.clear()

    def discard_trials(self) -> list[Block]:
        """Forget every block on trial, and what hangs on one. The idle ones among them, for their pages."""
        # A trial block may have left the cache since, or come back as another domain's.
        dropped = {block for block in self._trials if block.trial and block.key is not None}
        self._trials.clear()
        idle: list[Block] = []
        for block in dropped:
            assert block.key is not None
            del self._blocks[block.key]
            block.key, block.children, block.trial = None, 0, False
            if not block.refs:
                self.idle -= 1
                idle.append(block)
        for block in self._blocks.values():
            if block.parent in dropped:
                block.parent = None
        for block in dropped:
            parent, block.parent = block.parent, None
            if parent is not None and parent not in dropped:
                parent.children -= 1
                if not parent.refs and not parent.children:
                    self._push(parent)
        return idle

    def referenced(self, block: Block) -> None:
        """An idle block got its first reference."""
        self.idle -= 1

    def released(self, block: Block) -> None:
        """A cached block lost its last reference."""
        self.idle += 1
        self._uses += 1
        block.used = self._uses
        if not block.children:
            self._push(block)

    def evict(self) -> Block | None:
        """Take the least recently used idle leaf out of the cache; None when nothing is idle."""
        while self._leaves:
            used, _, block = heapq.heappop(self._leaves)
            if block.key is None or block.refs or block.children or block.used != used:
                continue
            del self._blocks[block.key]
            block.key, block.trial = None, False
            self.idle -= 1
            self.evictions += 1
            parent, block.parent = block.parent, None
            if parent is not None:
                parent.children -= 1
                if not parent.refs and not parent.children:
                    self._push(parent)
            return block
        return None

    def forget(self, block: Block) -> None:
        """Make a referenced block without children unfindable; nothing happens to one that is not cached."""
        if block.key is None:
            return
        del self._blocks[block.key]
        block.key = None
        parent, block.parent = block.parent, None
        if parent is not None:
            parent.children -= 1

    def blocks(self) -> Iterable[Block]:
        return self._blocks.values()

    def _push(self, block: Block) -> None:
        if len(self._leaves) > 64 + 4 * self.idle:
            fresh = [e for e in self._leaves if not e[2].refs and not e[2].children and e[2].used == e[0]]
            self._leaves = [e for e in fresh if e[2].key is not None]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (block.used, id(block), block))
