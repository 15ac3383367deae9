"""Hugging Face folder → `ModelSource`: `config.json` and one or several safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from dynamictp.errors import ModelRefused
from dynamictp.facts import ModelFacts
from dynamictp.model.config_json import read_facts, read_json, read_sampling_defaults
from dynamictp.model.int8 import Int8Rows
from dynamictp.model.source import Array, check_tensors, widen

if TYPE_CHECKING:
    from dynamictp.model.chat import ChatTemplate
    from dynamictp.model.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUPPORTED_TYPES = ("F32", "F16", "BF16")


class SafetensorsSource:
    """A `ModelSource` over a Hugging Face folder. Owns the open shards (memory-mapped)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._facts = read_facts(folder)
        self._shards: dict[str, Any] = {}
        self._home: dict[str, str] = {}
        for file, promised in shard_files(folder).items():
            self._open_shard(file, promised)
        shapes = {name: self.shape(name) for name in self._home}
        self._names = check_tensors(shapes, self._facts, str(folder))
        for name in self._names:
            kind = self._slice(name).get_dtype()
            if kind not in SUPPORTED_TYPES:
                raise ModelRefused(
                    f"{folder}: tensor {name} is stored as {kind}, which is not supported; "
                    f"supported: {', '.join(SUPPORTED_TYPES)}"
                )

    @property
    def path(self) -> Path:
        return self._folder

    @property
    def label(self) -> str:
        return self._folder.resolve().name

    @property
    def facts(self) -> ModelFacts:
        return self._facts

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def rows(self, name: str, start: int, stop: int) -> Array:
        values: Array = self._slice(name)[start:stop]
        return values

    def int8_rows(self, name: str, start: int, stop: int) -> Int8Rows | None:
        return None

    def tensor(self, name: str) -> Array:
        return widen(self.rows(name, 0, self.shape(name)[0]))

    def sampling_defaults(self) -> dict[str, float]:
        return read_sampling_defaults(self._folder)

    def tokenizer(self) -> Tokenizer:
        from dynamictp.model.tokenizer import tokenizer_from_folder  # noqa: PLC0415  (workers never need it)

        return tokenizer_from_folder(self._folder, self._facts)

    def chat_template(self) -> ChatTemplate:
        from dynamictp.model.chat import template_from_folder  # noqa: PLC0415  (workers never need it)

        return template_from_folder(self._folder)

    def _slice(self, name: str) -> Any:
        return self._shards[self._home[name]].get_slice(name)

    def _open_shard(self, file: str, promised: frozenset[str] | None) -> None:
        path = self._folder / file
        try:
            # The handle lives as long as the source: it is the memory map the slices read from.
            shard = safe_open(str(path), framework="numpy")
        except FileNotFoundError:
            raise ModelRefused(
                f"{path}: no such file, although {INDEX} names it; download it again"
            ) from None
        except (SafetensorError, OSError) as error:
            raise ModelRefused(f"{path}: not a sound safetensors file: {error}") from error
        names: frozenset[str] = frozenset(shard.keys())  # type: ignore[no-untyped-call]
        if promised is not None and (absent := sorted(promised - names)):
            raise ModelRefused(f"{path}: tensor {absent[0]} is missing, although {INDEX} places it here")
        self._shards[file] = shard
        for name in names if promised is None else promised:
            self._home[name] = file


def shard_files(folder: Path) -> dict[str, frozenset[str] | None]:
    """The folder's shards and the tensors its index places in each; None for a single file without index.

    Raises `ModelRefused` when there is no checkpoint, or an index is missing or unsound.
    """
    if (folder / INDEX).exists():
        return _indexed(folder / INDEX)
    if (folder / SINGLE).exists():
        return {SINGLE: None}
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(files) == 1 and "-of-" not in files[0]:
        return {files[0]: None}
    if files:
        raise ModelRefused(f"{folder}: {len(files)} safetensors files ({files[0]} …) but no {INDEX}")
    if any(folder.glob("*.bin")):
        raise ModelRefused(
            f"{folder}: only pickled weights (*.bin), which are not read; save them as safetensors"
        )
    raise ModelRefused(f"{folder}: no *.safetensors file")


def _indexed(index: Path) -> dict[str, frozenset[str] | None]:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ModelRefused(f"{index}: weight_map is missing or empty")
    shards: dict[str, set[str]] = {}
    for name, file in mapping.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelRefused(
                f"{index}: {name} is placed in {file!r}, expected a safetensors file of this folder"
            )
        shards.setdefault(file, set()).add(name)
    return {file: frozenset(names) for file, names in shards.items()}
