"""The flags of the control plane: one per parameter, made from its metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import click
import msgspec

from dynamictp.control.config import ControlConfig, Slo

SLO_PREFIX = "slo_"
FILE_ONLY = ("slo", "ramp_steps")
"""Parameters that are no single value: for the configuration file."""


def control_options(command: Callable[..., None]) -> Callable[..., None]:
    """Options that leave a parameter alone when they are not given."""
    for name, hint, default in reversed([*_fields(ControlConfig, ""), *_fields(Slo, SLO_PREFIX)]):
        kind, text = _kind(hint)
        flag = f"--{name.replace('_', '-')}"
        note = f"{text.rstrip('.')} [default: {default}]"
        command = click.option(flag, name, type=kind, default=None, help=note)(command)
    return command


def control_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Flags as `build_config` takes them: those of the SLO in a mapping of their own."""
    slo_names = {name for name, _, _ in _fields(Slo, SLO_PREFIX)}
    slo = {key.removeprefix(SLO_PREFIX): value for key, value in given.items() if key in slo_names}
    rest = {key: value for key, value in given.items() if key not in slo_names}
    return {**rest, "slo": slo} if slo else rest


def _fields(kind: type[msgspec.Struct], prefix: str) -> list[tuple[str, Any, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        (prefix + field.name, hints[field.name], field.default)
        for field in msgspec.structs.fields(kind)
        if field.name not in FILE_ONLY
    ]


def _kind(hint: Any) -> tuple[Any, str]:
    """click's type of an annotated parameter, and its description."""
    base, meta = get_args(hint) if get_origin(hint) is Annotated else (hint, msgspec.Meta())
    kind = click.Choice(get_args(base)) if get_origin(base) is Literal else base
    return kind, (meta.description or "").replace("`", "")
