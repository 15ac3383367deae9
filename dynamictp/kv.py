"""KV cache sizes: pages, blocks, quotas. Pure.

A page holds `page_tokens` tokens of one KV head, K and V, for all layers. A block is the pages of all KV
heads for the same tokens; it is allocated whole or not at all.
"""

from __future__ import annotations

import msgspec

from dynamictp.errors import ModelRefused
from dynamictp.facts import DTYPE_BYTES, DType, ModelFacts

DYNAMIC_CAP = 0.7
"""Share of its quota that a domain may fill in dynamic mode, so that a switch has room (D6)."""


class KVSpec(msgspec.Struct, frozen=True):
    """Form of the KV pages of one layer group. `kind` other than full attention is refused at load."""

    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: DType
    kind: str = "full"

    def __post_init__(self) -> None:
        if self.kind != "full":
            raise ModelRefused(f"attention kind '{self.kind}' is not supported; supported: full")
        if self.page_tokens < 2 or self.page_tokens % 2:
            raise ValueError("page_tokens must be even: V is stored in pairs of tokens")

    @classmethod
    def of(cls, facts: ModelFacts, page_tokens: int, dtype: DType) -> KVSpec:
        return cls(facts.layers, facts.kv_heads, facts.head_dim, page_tokens, dtype)

    @property
    def plane_elements(self) -> int:
        """Elements of K (or V) of one page in one layer."""
        return self.page_tokens * self.head_dim

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, K and V."""
        return 2 * self.layers * self.plane_elements * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.kv_heads * self.page_bytes

    def blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens of context take."""
        return -(-tokens // self.page_tokens)

    def arena_pages(self, memory_bytes: int) -> int:
        """Pages in an arena of that size, rounded down to whole blocks."""
        return memory_bytes // self.block_bytes * self.kv_heads


def quota_blocks(arena_blocks: int, devices: int, domain_devices: int, cap: float = 1.0) -> int:
    """Blocks that a domain may reference: its devices' share of the arena, times the cap.

    The cap is `switching_cap` in dynamic mode, 1 in static mode.
    """
    return int(arena_blocks * domain_devices * cap) // devices


def switching_cap(devices: int) -> float:
    """The cap where the layout changes by itself. With one device there is none to change to."""
    return DYNAMIC_CAP if devices > 1 else 1.0
