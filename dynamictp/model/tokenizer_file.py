"""`tokenizer.json`, looked at before the `tokenizers` library reads it.

The library trusts the file: it allocates what a size field says, and a panic or abort of its Rust code is no
exception that a server could answer. What is checked here is what was seen to do that.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from dynamictp.errors import ModelRefused

MAX_FILE_BYTES = 256 << 20
"""The largest published vocabularies take 35 MB."""
MAX_GROWTH = 64
"""How many times longer a normaliser may make a text; published ones replace a character by one or two."""


def read_tokenizer_file(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The library's tokenizer and the file's JSON. Raises `ModelRefused` when the file is unsound."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ModelRefused(f"{file}: larger than {MAX_FILE_BYTES >> 20} MiB, not a tokenizer file")
        text = file.read_text(encoding="utf-8")
        layout = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"{file}: not a sound tokenizer file: {error}") from error
    if not isinstance(layout, dict):
        raise ModelRefused(
            f"{file}: not a sound tokenizer file: it holds a {type(layout).__name__}, expected an object"
        )
    for step in _objects(layout.get("normalizer")):
        _check_charsmap(step, file)
    if (growth := _growth(layout.get("normalizer"))) > MAX_GROWTH:
        raise ModelRefused(
            f"{file}: its normalizer makes a text {growth:g} times as long, at most {MAX_GROWTH}"
        )
    with sound(f"{file}: not a sound tokenizer file"):
        return tokenizers.Tokenizer.from_str(text), layout


@contextmanager
def sound(what: str) -> Iterator[None]:
    """Turns whatever the library raises inside, panics included, into `ModelRefused`."""
    try:
        yield
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ModelRefused(f"{what}: {error}") from error


def is_failure(error: BaseException) -> bool:
    """The library failed: an exception, or a panic of its Rust code, a `BaseException` that has no importable
    type.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object in `value`."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _check_charsmap(step: dict[str, Any], file: Path) -> None:
    """SentencePiece's compiled map: the size of its trie in bytes (little-endian), the trie, the texts."""
    if step.get("type") != "Precompiled":
        return
    try:
        content = base64.b64decode(step["precompiled_charsmap"], validate=True)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelRefused(f"{file}: precompiled_charsmap is not base64: {error}") from error
    size = int.from_bytes(content[:4], "little")
    if len(content) < 4 or size % 4 or size > len(content) - 4:
        raise ModelRefused(
            f"{file}: precompiled_charsmap counts {size} bytes and has {len(content)}: corrupt"
        )


def _growth(normalizer: Any) -> float:
    """Most characters that the replacements of a normaliser make of one."""
    growth = 1.0
    for step in _objects(normalizer):
        content, pattern = step.get("content"), step.get("pattern")
        if step.get("type") == "Replace" and isinstance(content, str):
            replaced = pattern.get("String") if isinstance(pattern, dict) else None
            # Something empty is found before each character; what a regex finds may be as short.
            at_least = len(replaced) if isinstance(replaced, str) else 1
            growth *= max(1.0, len(content) / at_least if at_least else 1.0 + len(content))
    return growth
