"""Price of a switch by hand."""

from __future__ import annotations

import math

import pytest

from dynamictp.cost.switching import COMMIT_S, COMMUNICATOR_S, PROOF_S, break_even_s, switch_price


def test_within_the_residency_plan_only_kv_moves() -> None:
    # 8 devices, 16 GB of running KV of which half stays: 8 GB over 8 links of 100 GB/s = 10 ms.
    price = switch_price(
        devices=8,
        shared_memory=False,
        missing_weight_bytes=0,
        running_kv_bytes=16e9,
        kv_stays=0.5,
        bandwidth=100e9,
    )
    assert price.weight_bytes_streamed == 0
    assert price.kv_bytes_moved == 8e9
    assert price.drain_s == pytest.approx(0.01)
    assert price.prepare_s == COMMUNICATOR_S.value + PROOF_S.value
    assert price.lost_device_s == pytest.approx(8 * (PROOF_S.value + COMMIT_S.value + 0.01))
    assert price.total_s < 2, "H2"


def test_missing_weights_are_streamed_before_the_switch() -> None:
    price = switch_price(
        devices=4,
        shared_memory=False,
        missing_weight_bytes=10e9,
        running_kv_bytes=0,
        kv_stays=1,
        bandwidth=20e9,
    )
    assert price.prepare_s == pytest.approx(COMMUNICATOR_S.value + PROOF_S.value + 0.5)
    assert price.weight_bytes_streamed == 40e9
    assert price.lost_device_s == pytest.approx(4 * (PROOF_S.value + COMMIT_S.value)), (
        "it runs in the background"
    )


def test_nothing_moves_in_a_shared_memory() -> None:
    price = switch_price(
        devices=2, shared_memory=True, missing_weight_bytes=0, running_kv_bytes=1e9, kv_stays=0, bandwidth=1e9
    )  # fmt: skip
    assert price.kv_bytes_moved == price.drain_s == 0


def test_break_even() -> None:
    price = switch_price(
        devices=8, shared_memory=False, missing_weight_bytes=0, running_kv_bytes=0, kv_stays=1, bandwidth=1e9
    )  # fmt: skip
    assert break_even_s(price, 2.0) == pytest.approx(price.lost_device_s / 2)
    assert break_even_s(price, 0.0) == math.inf
