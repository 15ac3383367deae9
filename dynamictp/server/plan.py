"""The node plan: devices, layout and memory of a server, decided before anything is allocated. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dynamictp.config import GIB, ServeConfig, parse_size
from dynamictp.errors import ConfigError, LayoutRefused, ResourceError
from dynamictp.facts import ModelFacts
from dynamictp.kv import KVSpec
from dynamictp.layout import Layout, LayoutSpec
from dynamictp.messages import ArenaFacts
from dynamictp.ranges import legal_degrees
from dynamictp.server.machine import device_cores
from dynamictp.server.switches import check_layout

KV_FRACTION = 0.25
KV_DEFAULT_LIMIT = 8 * GIB
RUNTIME_BYTES_PER_PROCESS = 300 << 20
"""Resident memory of one worker beyond weights and pages: interpreter, torch, buffers (measured). One worker
more than there are devices stands by."""


@dataclass(frozen=True)
class NodePlan:
    """What the supervisor builds. Sizes in bytes."""

    facts: ModelFacts
    devices: int
    cores: tuple[tuple[int, ...], ...]
    """Core set of each device."""
    oversubscribed: bool
    """More device cores than cores: waits yield at once."""
    layout: LayoutSpec | Layout
    degrees: tuple[int, ...]
    weight_bytes: int
    arena: ArenaFacts
    arena_bytes: int
    max_model_len: int
    comm_slots: int

    @property
    def kv_tokens(self) -> int:
        """Tokens of context that the arena holds."""
        return self.arena.pages // self.facts.kv_heads * self.arena.page_tokens


def plan_node(
    config: ServeConfig,
    facts: ModelFacts,
    weight_bytes: int,
    *,
    cores: tuple[int, ...],
    available_bytes: int,
    communicators: bool,
) -> NodePlan:
    """Raises `ConfigError` for a layout that can't be, `ResourceError` when memory does not suffice."""
    devices = config.devices or max(1, len(cores) // config.cores_per_device)
    degrees = legal_degrees(facts, config.numerics, devices=devices, communicators=communicators)
    try:
        layout = check_layout(config.layout, degrees, devices, config.model_name)
    except LayoutRefused as error:
        reason = "" if communicators else "; without the native extension only tp1 shapes are legal"
        raise ConfigError(f"--layout {error.message}{reason}") from error
    spec = KVSpec.of(facts, config.page_tokens, config.dtype)
    kv_bytes, arena_pages = _arena(config, spec, weight_bytes, devices, available_bytes)
    context = min(config.max_model_len or facts.max_context, facts.max_context)
    if config.max_model_len > facts.max_context:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is beyond the model's context of {facts.max_context}"
        )
    return NodePlan(
        facts=facts,
        devices=devices,
        cores=tuple(device_cores(d, cores, config.cores_per_device) for d in range(devices)),
        oversubscribed=devices * config.cores_per_device > len(cores),
        layout=layout,
        degrees=degrees,
        weight_bytes=weight_bytes,
        arena=ArenaFacts(pages=arena_pages, page_tokens=config.page_tokens, dtype=config.dtype),
        arena_bytes=kv_bytes,
        max_model_len=context,
        comm_slots=2 * devices + 4,
    )


def _arena(
    config: ServeConfig, spec: KVSpec, weight_bytes: int, devices: int, available_bytes: int
) -> tuple[int, int]:
    """(bytes, pages) of the KV arena, checked against what is available."""
    runtime = (devices + 1) * RUNTIME_BYTES_PER_PROCESS
    fixed = weight_bytes + runtime
    if config.kv_memory:
        wanted = parse_size(config.kv_memory)
    else:
        wanted = min(int(available_bytes * KV_FRACTION), KV_DEFAULT_LIMIT)
    if fixed + wanted > available_bytes:
        raise ResourceError(
            f"not enough memory: weights {weight_bytes / GIB:.2f} GiB, {devices} workers "
            f"and a spare {runtime / GIB:.2f} GiB and KV pages {wanted / GIB:.2f} GiB exceed "
            f"the {available_bytes / GIB:.2f} GiB available; use a smaller model or --kv-memory"
        )
    pages = spec.arena_pages(wanted)
    blocks = pages // spec.kv_heads
    if blocks < 2 * devices:
        need = 2 * devices * spec.block_bytes
        raise ResourceError(
            f"--kv-memory holds {blocks} blocks of {spec.page_tokens} tokens; {devices} devices need "
            f"at least {2 * devices} ({need / (1 << 20):.1f} MiB)"
        )
    return pages * spec.page_bytes, pages
