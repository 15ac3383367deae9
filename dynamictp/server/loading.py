"""Loads the weights into the shared memory: short-lived loader processes, a part of the tensors each."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from typing import IO

from dynamictp.errors import FatalError, ModelRefused
from dynamictp.model.weights import WeightIndex
from dynamictp.server.child import Child, end_children

MOST_LOADERS = 4


async def load_weights(model: str, index: WeightIndex, descriptor: int, *, cores: int) -> None:
    """Write every weight of the model, in the form of `index`, to the memory behind `descriptor`.

    Raises `ModelRefused`, or `FatalError` when a loader fails otherwise.
    """
    parts = max(1, min(MOST_LOADERS, cores))
    with contextlib.ExitStack() as files:
        loaders: list[tuple[Child, IO[bytes]]] = []
        for part in range(parts):
            # A file, not a pipe: nobody has to read it for the loader to end.
            errors = files.enter_context(tempfile.TemporaryFile())
            arguments = [
                *("dynamictp.server.loader", "--model", model, "--dtype", index.dtype),
                *("--layout", index.layout, "--weights", index.weights),
                *("--fd", str(descriptor), "--part", f"{part}/{parts}"),
            ]
            child = Child("loader", arguments, descriptors=(descriptor,), stderr=errors.fileno())
            loaders.append((child, errors))
        try:
            for child, output in loaders:
                _check(await asyncio.shield(child.ended), output)
        finally:
            await end_children([child for child, _ in loaders], 0.0)


def _check(code: int, errors: IO[bytes]) -> None:
    if not code:
        return
    errors.seek(0)
    text = errors.read().decode(errors="replace").strip()
    if code == ModelRefused.exit_code:
        raise ModelRefused(text)
    raise FatalError(f"loading the weights failed (exit {code}): {text}")
