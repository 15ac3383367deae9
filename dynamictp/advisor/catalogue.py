"""Models known by name, so that a plan needs no download: public figures from their `config.json`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dynamictp.advisor.model_config import read_config_folder, shape_from_config
from dynamictp.advisor.model_gguf import read_gguf
from dynamictp.cost.shape import ModelShape
from dynamictp.errors import ModelRefused

_FOLDER = Path(__file__).parent / "models"


def model_names() -> tuple[str, ...]:
    """Names of the models that ship with the advisor."""
    return tuple(sorted(file.stem for file in _FOLDER.glob("*.json")))


def named_model(name: str) -> ModelShape:
    """A model of the catalogue. Raises `ModelRefused` listing the names."""
    if name not in model_names():
        raise ModelRefused(f"{name!r} is no known model; known: {', '.join(model_names())}")
    file = _FOLDER / f"{name}.json"
    return shape_from_config(msgspec.json.decode(file.read_bytes()), name, str(file))


def open_shape(model: str) -> ModelShape:
    """MODEL of the command line: a name of the catalogue, `demo`, a folder, a config.json or a .gguf file.

    Raises `ModelRefused` when it is none of these.
    """
    if model == "demo":
        from dynamictp.model.load import demo_path  # noqa: PLC0415  (looks for an optional package)

        return read_gguf(demo_path())
    if model in model_names():
        return named_model(model)
    path = Path(model)
    if path.is_dir():
        return read_config_folder(path)
    if path.suffix == ".gguf":
        return read_gguf(path)
    if path.name.endswith(".json") and path.is_file():
        from dynamictp.model.config_json import read_json  # noqa: PLC0415

        return shape_from_config(read_json(path), path.resolve().parent.name or path.stem, str(path))
    raise ModelRefused(
        f"{model}: no such folder, config.json or .gguf file, and no known name; "
        f"known: demo, {', '.join(model_names())}"
    )
