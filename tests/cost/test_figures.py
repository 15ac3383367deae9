"""Figures with ranges, and predictions in order."""

from __future__ import annotations

from dynamictp.cost.figures import Corner, Figure, Prediction


def test_a_figure_is_taken_at_its_corner() -> None:
    figure = Figure(0.5, "assumed", "x", better=0.6, worse=0.4, ideal=1.0)
    assert [figure.at(corner) for corner in Corner] == [1.0, 0.6, 0.5, 0.4]
    assert Figure(2.0, "data sheet", "x").at(Corner.SLOW) == 2.0


def test_predictions_are_in_order_even_where_a_formula_is_not() -> None:
    values = {Corner.IDEAL: 3.0, Corner.FAST: 5.0, Corner.EXPECTED: 4.0, Corner.SLOW: 2.0}
    found = Prediction.of(values.__getitem__)
    assert found.bound <= found.low <= found.estimate <= found.high
    assert found.estimate == 4.0
    rate = Prediction.rate(values.__getitem__)
    assert rate.low <= rate.estimate <= rate.high <= rate.bound


def test_the_band_contains_its_ends() -> None:
    found = Prediction(1.0, 2.0, 3.0, 4.0)
    assert found.contains(2.0)
    assert found.contains(4.0)
    assert not found.contains(1.5)
    assert found.scaled(1000).estimate == 3000
