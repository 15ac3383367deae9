"""The node plan: devices, layout and memory of a server, decided before anything is allocated. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dynamictp.config import GIB, ServeConfig, parse_size
from dynamictp.control.config import check_pool
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
    most_devices: int
    """Devices that the model may have at most: its arena is divided by them. All, unless there are others."""

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
    most_devices: int = 0,
) -> NodePlan:
    """`most_devices`: of the node's for this model, 0 for all.

    Raises `ConfigError` for a layout that can't be and for bounds of the planner beyond the pool,
    `ResourceError` when memory does not suffice.
    """
    devices = node_devices(config, cores)
    check_pool(config.control, devices)
    most = min(most_devices or devices, devices)
    degrees = legal_degrees(facts, config.numerics, devices=most, communicators=communicators)
    try:
        layout = check_layout(config.layout, degrees, most, config.model_name, pool=devices)
    except LayoutRefused as error:
        reason = "" if communicators else "; without the native extension only tp1 shapes are legal"
        raise ConfigError(f"--layout {error.message}{reason}") from error
    spec = KVSpec.of(facts, config.page_tokens, config.dtype)
    kv_bytes, arena_pages = _arena(config, spec, weight_bytes, devices, available_bytes)
    if arena_pages // spec.kv_heads < 2 * most:
        need = 2 * most * spec.block_bytes
        raise ResourceError(
            f"--kv-memory holds {arena_pages // spec.kv_heads} blocks of {spec.page_tokens} tokens; {most} "
            f"devices need at least {2 * most} ({need / (1 << 20):.1f} MiB)"
        )
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
        most_devices=most,
    )


def node_devices(config: ServeConfig, cores: Sequence[int]) -> int:
    """Devices of the pool."""
    return config.devices or max(1, len(cores) // config.cores_per_device)


@dataclass(frozen=True)
class Candidate:
    """One of several models, as far as its files tell."""

    config: ServeConfig
    facts: ModelFacts
    weight_bytes: int
    kv_share: float
    max_devices: int


def plan_models(
    candidates: Sequence[Candidate], *, cores: tuple[int, ...], available_bytes: int, communicators: bool
) -> tuple[NodePlan, ...]:
    """Plans of several models on one node: `--kv-memory` is cut by their shares. Raises as `plan_node`, with
    the model's name."""
    devices = node_devices(candidates[0].config, cores)
    check_pool(candidates[0].config.control, devices)
    if len(candidates) > devices:
        raise ConfigError(
            f"{len(candidates)} models need a device each at least; the pool has {devices} (--devices)"
        )
    budget = _kv_budget(candidates[0].config, available_bytes)
    shares = sum(candidate.kv_share for candidate in candidates)
    parts = [int(budget * candidate.kv_share / shares) for candidate in candidates]
    fixed = [candidate.weight_bytes + _runtime_bytes(devices) for candidate in candidates]
    if sum(fixed) + sum(parts) > available_bytes:
        listed = ", ".join(
            f"{c.config.model_name} {c.weight_bytes / GIB:.2f} GiB of weights" for c in candidates
        )
        raise ResourceError(
            f"not enough memory: {listed}, {len(candidates)} times {devices} workers and a spare "
            f"{len(candidates) * _runtime_bytes(devices) / GIB:.2f} GiB and KV pages {budget / GIB:.2f} GiB "
            f"exceed the {available_bytes / GIB:.2f} GiB available; use fewer models or --kv-memory"
        )
    plans = []
    for candidate, part, own in zip(candidates, parts, fixed, strict=True):
        if candidate.max_devices > devices - len(candidates) + 1:
            raise ConfigError(
                f"model {candidate.config.model_name}: max_devices {candidate.max_devices} leaves no device "
                f"for each of the other models; the pool has {devices}"
            )
        try:
            plans.append(
                plan_node(
                    msgspec.structs.replace(candidate.config, kv_memory=str(part)),
                    candidate.facts,
                    candidate.weight_bytes,
                    cores=cores,
                    available_bytes=own + part,
                    communicators=communicators,
                    most_devices=candidate.max_devices or devices - len(candidates) + 1,
                )
            )
        except (ConfigError, ResourceError) as error:
            raise error.of_model(candidate.config.model_name) from error
    return tuple(plans)


def _runtime_bytes(devices: int) -> int:
    """Of a model's workers and its spare."""
    return (devices + 1) * RUNTIME_BYTES_PER_PROCESS


def _kv_budget(config: ServeConfig, available_bytes: int) -> int:
    if config.kv_memory:
        return parse_size(config.kv_memory)
    return min(int(available_bytes * KV_FRACTION), KV_DEFAULT_LIMIT)


def _arena(
    config: ServeConfig, spec: KVSpec, weight_bytes: int, devices: int, available_bytes: int
) -> tuple[int, int]:
    """(bytes, pages) of the KV arena, checked against what is available."""
    runtime = _runtime_bytes(devices)
    fixed = weight_bytes + runtime
    wanted = _kv_budget(config, available_bytes)
    if fixed + wanted > available_bytes:
        raise ResourceError(
            f"not enough memory: weights {weight_bytes / GIB:.2f} GiB, {devices} workers "
            f"and a spare {runtime / GIB:.2f} GiB and KV pages {wanted / GIB:.2f} GiB exceed "
            f"the {available_bytes / GIB:.2f} GiB available; use a smaller model or --kv-memory"
        )
    pages = spec.arena_pages(wanted)
    return pages * spec.page_bytes, pages
