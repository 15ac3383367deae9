"""What calibration makes of measured times to the first token."""

from __future__ import annotations

import msgspec
import pytest

from dynamictp.advisor.calibrate import LONG_STREAMS, memory_slowdown, merged, outside_steps
from dynamictp.cost.calibration import Calibration, CalibrationPoint, CrowdedPoint, RequestPoint
from dynamictp.cost.figures import Corner, Figure
from dynamictp.cost.hardware import DeviceFacts
from dynamictp.cost.shape import ModelShape
from dynamictp.cost.steps import Domain, StepModel


def test_an_idle_request_is_its_first_token_less_one_step() -> None:
    # Times 13 … 17 ms around a step of 9 ms: 6 ms outside of steps; quartiles 14 and 16, so ± 1 ms.
    found = outside_steps(0, [0.013, 0.014, 0.015, 0.016, 0.017], 0.009, 1.0)
    assert found == RequestPoint(0, pytest.approx(0.006), pytest.approx(0.005), pytest.approx(0.007))


def test_beside_streams_the_moment_of_arrival_is_no_spread_of_the_host() -> None:
    # Steps of 10 ms; 8 ms outside, always: first tokens after 8 + 20 + (0 … 10) ms, quartiles 5 ms apart.
    times = [0.028 + 0.010 * (i + 0.5) / 100 for i in range(100)]
    found = outside_steps(2, times, 0.010, 2.5)
    assert found.seconds == pytest.approx(0.008)
    assert found.high_s - found.low_s < 0.0005
    # Quartiles 13 ms apart: the host's are sqrt(13² - 5²) = 12 ms apart.
    wide = outside_steps(2, [0.033 + 2.6 * (at - 0.033) for at in times], 0.010, 2.5)
    assert wide.high_s - wide.low_s == pytest.approx(0.012, rel=0.02)


def test_a_stall_of_the_machine_is_left_out() -> None:
    times = [0.015] * 20
    assert outside_steps(0, [*times, 1.0, 1.0], 0.01, 1.0).seconds == pytest.approx(0.005)


def test_a_request_is_never_faster_than_nothing() -> None:
    found = outside_steps(0, [0.009, 0.010, 0.011], 0.02, 1.0)
    assert (found.seconds, found.low_s) == (0.0, 0.0)


def test_layouts_that_keep_as_many_devices_busy_are_one_point() -> None:
    found = merged(
        [
            RequestPoint(2, 0.010, 0.008, 0.013, 0.003),
            RequestPoint(0, 0.004, 0.003, 0.005),
            RequestPoint(2, 0.014, 0.009, 0.018, 0.005),
        ]
    )
    assert found == (
        RequestPoint(0, 0.004, 0.003, 0.005),
        RequestPoint(2, pytest.approx(0.012), 0.008, 0.018, pytest.approx(0.004)),
    )


CORE = DeviceFacts(
    "core", 4e9, Figure(28e9, "measured", "x"), Figure(200e9, "measured", "x"),
    shared_bandwidth=Figure(40e9, "measured", "x"), shared_memory=True, node_devices=2,
)  # fmt: skip
SMOL = ModelShape("smol", 30, 576, 9, 3, 64, 1536, 49152, 8192, tied_head=True)


def test_a_crowded_memory_is_as_slow_as_its_steps_say() -> None:
    ratios = Calibration("m", "d", "t", (CalibrationPoint("base", 1, 4, 0.8),))
    crowd = Domain(SMOL, CORE, 1, calibration=ratios, active_devices=2)
    plain = StepModel(crowd).decode(LONG_STREAMS, 52).total_s
    assert memory_slowdown(crowd, plain) == pytest.approx(1.0, rel=1e-3)
    found = memory_slowdown(crowd, 1.2 * plain)
    assert found is not None
    assert 1.2 < found < 1.5, "memory is not all of a step"
    measured = msgspec.structs.replace(ratios, crowded=(CrowdedPoint(1, 2, found),))
    corrected = msgspec.structs.replace(crowd, calibration=measured)
    assert StepModel(corrected).decode(LONG_STREAMS, 52).total_s == pytest.approx(1.2 * plain, rel=1e-3)
    assert memory_slowdown(crowd, 100 * plain) is None, "memory does not explain that"
    assert memory_slowdown(crowd, plain / 100) is None


def test_a_domain_alone_and_the_bound_know_no_crowd() -> None:
    ratios = Calibration("m", "d", "t", (CalibrationPoint("base", 1, 4, 0.8),))
    measured = msgspec.structs.replace(ratios, crowded=(CrowdedPoint(1, 2, 2.0),))
    alone = Domain(SMOL, CORE, 1, calibration=ratios)
    for domain, corner in (
        (alone, Corner.EXPECTED),
        (msgspec.structs.replace(alone, active_devices=2), Corner.IDEAL),
    ):
        other = msgspec.structs.replace(domain, calibration=measured)
        assert StepModel(other, corner).base(4, 4) == StepModel(domain, corner).base(4, 4)
