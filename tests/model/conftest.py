"""Checkpoints are made once per session: saving one takes transformers half a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dynamictp.model.tokenizer import Tokenizer
from tests.model.checkpoints import make_variant, write_gguf
from tests.model.vocabularies import demo_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(variant)` → folder of that random model. Read only: tests copy before they damage."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            made[variant] = make_variant(variant, tmp_path_factory.mktemp("checkpoints") / variant)
        return made[variant]

    return make


@pytest.fixture(scope="session")
def gguf_checkpoint(checkpoint: Callable[[str], Path]) -> Callable[[str], Path]:
    """`gguf_checkpoint(variant)` → the same model as a GGUF file."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            folder = checkpoint(variant)
            made[variant] = write_gguf(folder, folder.parent / f"{variant}.gguf")
        return made[variant]

    return make


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    """The demo model's tokenizer."""
    return demo_tokenizer()
