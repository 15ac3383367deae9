"""Calibration files and the ratios between their points."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamictp.cost.calibration import CLAMP, Calibration, CalibrationPoint
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


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    CALIBRATION.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == CALIBRATION


@pytest.mark.parametrize("text", ["", "{}", '{"model": 3}', "[]"])
def test_what_is_no_calibration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.json.*dynamictp calibrate"):
        Calibration.load(tmp_path / "c.json")
    with pytest.raises(ConfigError, match="missing"):
        Calibration.load(tmp_path / "missing.json")
