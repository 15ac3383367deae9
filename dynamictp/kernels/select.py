"""Which kernel path a server runs: native at one CPU-feature level, or torch."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple

from dynamictp import native
from dynamictp.errors import ConfigError
from dynamictp.facts import PANEL_ROWS, ModelFacts

KernelPath = Literal["torch", "native"]
LEVELS = ("portable", "avx2", "avx512", "avx512_bf16")
"""CPU-feature levels, each including those before it. Bits are the same within a level, not between them."""

LEVEL_ENV = "DYNAMICTP_KERNEL_LEVEL"
"""Environment variable that forces a level below the processor's best, for tests and comparisons."""


class KernelChoice(NamedTuple):
    """The kernel path, its level (empty for torch), and why it is not native where it could be expected."""

    path: KernelPath
    level: str = ""
    reason: str = ""

    @property
    def tag(self) -> str:
        """What results are bit-equal within."""
        return f"native-{self.level}" if self.path == "native" else "torch"


def choose_kernels(
    wanted: Literal["auto", "torch", "native"],
    facts: ModelFacts,
    page_tokens: int,
    *,
    native_only: str = "",
) -> KernelChoice:
    """The path for this model on this machine. `auto` is native where it can be.

    `native_only` is the flag that torch has no kernels for, if one is given. Raises `ConfigError` when native
    is asked for, also by such a flag, and can't be, or the environment names an unusable level.
    """
    if wanted == "torch":
        if native_only:
            raise ConfigError(f"{native_only} needs the native kernels; leave out --kernels torch")
        return KernelChoice("torch")
    reason = _unsuitable(facts, page_tokens)
    if reason and native_only:
        raise ConfigError(f"{native_only} needs the native kernels: {reason}")
    if reason and wanted == "native":
        raise ConfigError(f"--kernels native: {reason}")
    return KernelChoice("torch", reason=reason) if reason else KernelChoice("native", kernel_level())


def kernel_level() -> str:
    """The processor's best level, or the lower one that the environment names. Needs the extension."""
    best: str = native.require().kernel_level()
    forced = os.environ.get(LEVEL_ENV)
    if not forced:
        return best
    if forced not in LEVELS or LEVELS.index(forced) > LEVELS.index(best):
        usable = ", ".join(LEVELS[: LEVELS.index(best) + 1])
        raise ConfigError(f"{LEVEL_ENV}={forced}: expected one of {usable}")
    return forced


def _unsuitable(facts: ModelFacts, page_tokens: int) -> str:
    """Why the native kernels can't run this model; empty when they can."""
    if native.load() is None:
        return "the native extension is not installed"
    sizes = {"head_dim": facts.head_dim, "hidden": facts.hidden, "intermediate": facts.intermediate}
    for name, size in (*sizes.items(), ("page_tokens", page_tokens)):
        if size % PANEL_ROWS:
            return f"{name} is {size}, the native kernels need a multiple of {PANEL_ROWS}"
    return ""
