"""Calibration files and the ratios between their points."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dynamictp.cost.calibration import CLAMP, Calibration, CalibrationPoint, RequestPoint
from dynamictp.cost.figures import Corner
from dynamictp.errors import ConfigError

POINTS = (
    CalibrationPoint("base", 1, 4, 1.0),
    CalibrationPoint("base", 1, 16, 4.0),
    CalibrationPoint("base", 4, 8, 3.0),
    CalibrationPoint("attention", 1, 4, 2.0),
)
CALIBRATION = Calibration("m", "d", "test", POINTS)


@pytest.mark.parametrize(("size", "ratio"), [(1, 1.0), (4, 1.0), (8, 2.0), (16, 4.0), (500, 4.0)])
def test_ratios_are_interpolated_and_held_at_the_ends(size: int, ratio: float) -> None:
    found = CALIBRATION.correction("base", 1, size)
    assert found is not None
    assert found.ratio == pytest.approx(ratio)
    assert not found.inherited


def test_untried_degrees_inherit_with_a_wider_spread() -> None:
    near, far = CALIBRATION.correction("base", 1, 4), CALIBRATION.correction("base", 3, 8)
    assert near is not None
    assert far is not None
    assert far.inherited
    assert far.ratio == 3.0, "tp3 is nearer to tp4 than to tp1"
    assert far.spread > near.spread


def test_an_unmeasured_operation_has_no_ratio() -> None:
    assert CALIBRATION.correction("prompt_attention", 1, 4) is None


def test_absurd_ratios_are_pegged_and_say_so() -> None:
    calibration = Calibration("m", "d", "test", (CalibrationPoint("base", 1, 1, 1e6),))
    found = calibration.correction("base", 1, 1)
    assert found is not None
    assert found.ratio == CLAMP
    assert found.pegged
    assert calibration.pegged
    assert not CALIBRATION.pegged
    assert CALIBRATION.degrees == (1, 4)


REQUESTS = (RequestPoint(0, 4e-3, 3e-3, 6e-3), RequestPoint(2, 12e-3, 8e-3, 20e-3, 5e-3))


@pytest.mark.parametrize(
    ("busy", "value", "better", "worse"),
    [(0, 4e-3, 3e-3, 6e-3), (1, 8e-3, 5.5e-3, 13e-3), (2, 12e-3, 8e-3, 20e-3), (8, 12e-3, 8e-3, 20e-3)],
)
def test_requests_outside_of_steps_are_linear_in_busy_devices(
    busy: int, value: float, better: float, worse: float
) -> None:
    found = msgspec.structs.replace(CALIBRATION, requests=REQUESTS).request_s(busy)
    assert found is not None
    assert (found.value, found.better, found.worse) == pytest.approx((value, better, worse))
    assert found.provenance == "measured"
    assert found.at(Corner.IDEAL) == 0
    assert CALIBRATION.request_s(busy) is None


@pytest.mark.parametrize(("busy", "added"), [(0, 0.0), (1, 2.5e-3), (2, 5e-3), (8, 5e-3)])
def test_what_requests_add_to_steps_is_linear_in_busy_devices(busy: int, added: float) -> None:
    measured = msgspec.structs.replace(CALIBRATION, requests=REQUESTS)
    assert measured.request_added_s(busy) == pytest.approx(added)
    assert CALIBRATION.request_added_s(busy) == 0.0


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    whole = msgspec.structs.replace(CALIBRATION, requests=REQUESTS)
    whole.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == whole


def test_a_file_of_before_requests_were_measured_is_read(tmp_path: Path) -> None:
    old = '{"model": "m", "device": "d", "source": "s", "points": []}'
    (tmp_path / "c.json").write_text(old)
    assert Calibration.load(tmp_path / "c.json").requests == ()


def test_requests_out_of_order_are_refused(tmp_path: Path) -> None:
    msgspec.structs.replace(CALIBRATION, requests=REQUESTS[::-1]).save(tmp_path / "c.json")
    with pytest.raises(ConfigError, match="unusable"):
        Calibration.load(tmp_path / "c.json")


@pytest.mark.parametrize("text", ["", "{}", '{"model": 3}', "[]"])
def test_what_is_no_calibration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.json.*dynamictp calibrate"):
        Calibration.load(tmp_path / "c.json")
    with pytest.raises(ConfigError, match="missing"):
        Calibration.load(tmp_path / "missing.json")


@pytest.mark.parametrize("wrong", [{"seconds": -1e-3}, {"low_s": -1e-3}, {"added_s": -1e-3}])
def test_requests_that_take_less_than_no_time_are_refused(tmp_path: Path, wrong: dict[str, float]) -> None:
    point = msgspec.structs.replace(REQUESTS[0], **wrong)
    msgspec.structs.replace(CALIBRATION, requests=(point,)).save(tmp_path / "c.json")
    with pytest.raises(ConfigError, match="unusable"):
        Calibration.load(tmp_path / "c.json")
