"""The node plan: what is refused, and how memory is divided."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamictp.config import GIB, build_config
from dynamictp.errors import ConfigError, ResourceError
from dynamictp.facts import ModelFacts, RopeFacts
from dynamictp.server.machine import device_cores
from dynamictp.server.plan import Candidate, NodePlan, plan_models, plan_node

SMOL = ModelFacts(
    family="llama",
    layers=30,
    hidden=576,
    query_heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    vocab=49152,
    max_context=8192,
    norm_eps=1e-5,
    rope=RopeFacts(theta=100000.0),
)
WEIGHTS = 270_000_000


def plan(*, cores: int = 2, available: int = 16 * GIB, communicators: bool = True, **flags: Any) -> NodePlan:
    return plan_node(
        build_config(flags),
        SMOL,
        WEIGHTS,
        cores=tuple(range(cores)),
        available_bytes=available,
        communicators=communicators,
    )


def test_defaults_follow_the_machine() -> None:
    node = plan()
    assert (node.devices, node.cores, node.oversubscribed) == (2, ((0,), (1,)), False)
    assert node.degrees == (1, 2)
    assert node.arena_bytes <= 4 * GIB
    assert node.arena_bytes > 4 * GIB - 3 * 64 * 7680 - 1
    assert node.kv_tokens == node.arena_bytes // 23_040
    assert node.max_model_len == 8192


def test_devices_of_several_cores() -> None:
    node = plan(cores=5, cores_per_device=2)
    assert (node.devices, node.cores, node.oversubscribed) == (2, ((0, 1), (2, 3)), False)
    node = plan(cores=2, cores_per_device=2, devices=2)
    assert (node.cores, node.oversubscribed) == (((0, 1), (0, 1)), True)
    assert plan(cores=2, cores_per_device=3).oversubscribed


def test_kv_memory_has_a_default_limit_and_can_be_given() -> None:
    assert plan(available=100 * GIB).arena_bytes <= 8 * GIB
    assert plan(kv_memory="64MiB").arena.pages == (64 << 20) // (3 * 64 * 7680) * 3


def test_more_devices_than_cores_share_them() -> None:
    node = plan(devices=3)
    assert node.cores == ((0,), (1,), (0,))
    assert node.oversubscribed
    assert device_cores(1, (4, 5, 6, 7), 2) == (6, 7)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"layout": "tp3"}, r"tp3.*legal layouts: tp1, tp2, tp1\+tp1"),
        ({"layout": "tp10", "devices": 10}, "tp10"),
        ({"layout": "tp1pp2"}, "pipeline"),
        ({"layout": "big:tp1"}, "the model here is"),
        ({"max_model_len": 9000}, "8192"),
        ({"max_devices": 3}, "max_devices 3 is more than the pool has: 2"),
        ({"min_devices": 4, "devices": 3}, "min_devices 4 is more than the pool has: 3"),
    ],
)
def test_layouts_that_can_not_be(flags: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        plan(**flags)


def test_without_communicators_only_tp1() -> None:
    assert plan(communicators=False, layout="tp1+tp1").degrees == (1,)
    with pytest.raises(ConfigError, match=r"tp2.*without the native extension only tp1 shapes are legal"):
        plan(communicators=False, layout="tp2")


def test_too_little_memory_is_refused_with_figures() -> None:
    with pytest.raises(ResourceError, match="not enough memory"):
        plan(available=GIB // 2)
    with pytest.raises(ResourceError, match="at least 4"):
        plan(kv_memory="2MiB")


def plan_two(*, available: int = 16 * GIB, flags: dict[str, Any] | None = None, **entry: Any) -> Any:
    """`big` with three parts of the KV memory, `small` with one and whatever `entry` says."""
    config = build_config({"devices": 4, "kv_memory": "4GiB", **(flags or {})})
    wanted = {"max_devices": 0, "layout": "tp1"} | entry
    candidates = [
        Candidate(
            msgspec.structs.replace(config, served_model_name="big", layout="tp3"), SMOL, WEIGHTS, 3, 0
        ),
        Candidate(
            msgspec.structs.replace(config, served_model_name="small", layout=wanted["layout"]),
            SMOL, WEIGHTS, 1, wanted["max_devices"],
        ),
    ]  # fmt: skip
    return plan_models(candidates, cores=(0, 1, 2, 3), available_bytes=available, communicators=True)


def test_several_models_get_their_shares_of_the_memory_and_leave_each_other_a_device() -> None:
    big, small = plan_two()
    assert big.arena_bytes / GIB == pytest.approx(3, abs=0.01)
    assert small.arena_bytes / GIB == pytest.approx(1, abs=0.01)
    assert (big.devices, big.most_devices, big.degrees) == (4, 3, (1, 2, 3))
    (_, small) = plan_two(max_devices=1)
    assert (small.most_devices, small.degrees) == (1, (1,))


def test_models_that_do_not_fit_are_named() -> None:
    with pytest.raises(ResourceError, match=r"big 0\.25 GiB of weights, small .* exceed the 5\.00 GiB"):
        plan_two(available=5 * GIB)
    with pytest.raises(ConfigError, match="model small: layout tp2"):
        plan_two(max_devices=1, layout="tp2")
    with pytest.raises(ConfigError, match="model small: max_devices 4 leaves no device"):
        plan_two(max_devices=4)
    with pytest.raises(ResourceError, match="model small: kv_memory holds"):
        plan_two(flags={"kv_memory": "14MiB"})
    with pytest.raises(ConfigError, match="2 models need a device each"):
        plan_two(flags={"devices": 1})
