"""The import guard of the native extension: who needs it asks here.

The package installs without it (`DYNAMICTP_NO_NATIVE=1`); then only tp1 shapes are legal. The same variable
at run time hides an extension that is installed.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from dynamictp.errors import ResourceError

NO_NATIVE_ENV = "DYNAMICTP_NO_NATIVE"
_MODULE = "dynamictp._native"


def load() -> ModuleType | None:
    """`dynamictp._native`, or None when it is not installed or hidden by `DYNAMICTP_NO_NATIVE=1`.

    Raises `ResourceError` for an extension that is there but does not load.
    """
    if os.environ.get(NO_NATIVE_ENV) == "1":
        return None
    try:
        return importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        if error.name != _MODULE:
            raise
        return None
    except ImportError as error:
        raise ResourceError(
            f"the native extension is installed but does not load ({error}); reinstall dynamictp"
        ) from error


def require() -> ModuleType:
    """`dynamictp._native`. Raises `ResourceError` without it."""
    module = load()
    if module is None:
        raise ResourceError(
            "the native extension dynamictp._native is not available: without it only tp1 shapes are legal. "
            f"Install a C++ compiler, unset {NO_NATIVE_ENV} and reinstall dynamictp"
        )
    return module
