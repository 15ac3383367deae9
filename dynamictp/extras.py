"""Optional parts of the installation: what is missing is said before the work, not after it."""

from __future__ import annotations

from dynamictp.errors import ConfigError


def install_hint(extra: str) -> str:
    """How to get what an optional part needs, for a message that says what is missing."""
    return f"in the checkout, pip install --no-build-isolation -e '.[{extra}]'"


def need_plots(option: str, instead: str = "") -> None:
    """Raises `ConfigError` without matplotlib; `instead`: what can be done without it."""
    try:
        import matplotlib as _  # noqa: F401, PLC0415  (slow to import, and optional)
    except ImportError as error:
        raise ConfigError(
            f"{option} needs matplotlib for its plots: {install_hint('bench')}{instead}"
        ) from error
