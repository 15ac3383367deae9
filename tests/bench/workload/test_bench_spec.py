from __future__ import annotations

import pytest

from dynamictp.bench.workload.spec import (
    FORMS,
    KINDS,
    ClosedArrivals,
    OpenArrivals,
    ReplayArrivals,
    parse_arrivals,
)
from dynamictp.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected", "cv"),
    [
        ("constant:4", 240.0, 0.0),
        ("poisson:rate=4", 240.0, 1.0),
        ("gamma:4,cv=3", 240.0, 3.0),
        ("onoff:base=1,burst=8,every=20,for=4", 144.0, 1.0),
        ("steps:0=1,30=5,cv=2", 180.0, 2.0),
        ("ramp:0=1,60=8", 270.0, 1.0),
        ("spikes:base=2,peak=10,every=30,for=5", 160.0, 1.0),
        ("daynight:mean=4,day=60", 240.0, 1.0),
        ("rates:servegen-day,speed=600,mean=3", 180.0, 1.0),
        ("rates:servegen-bursts,start=3600,speed=600,mean=2,cv=0", 120.0, 0.0),
    ],
)
def test_open_arrivals(text: str, expected: float, cv: float) -> None:
    parsed = parse_arrivals(text, 60.0)
    assert isinstance(parsed, OpenArrivals)
    assert parsed.curve.duration_s == 60.0
    assert parsed.curve.expected == pytest.approx(expected)
    assert parsed.cv == cv


def test_replay_and_closed_loops() -> None:
    assert parse_arrivals("replay:azure-conv,keep=0.5", 60.0) == ReplayArrivals("azure-conv", 0.0, 1.0, 0.5)
    assert parse_arrivals("closed:users=8,think=0.5", 60.0) == ClosedArrivals(8, 0.5, 200)


def test_every_listed_form_is_of_a_kind_and_parses() -> None:
    kinds = set()
    for form in FORMS:
        text = form.split()[0].partition("[")[0]
        text = text.replace("TRACE", "azure-conv" if text.startswith("replay") else "servegen-day")
        parse_arrivals(text.replace("RATE", "2"), 60.0)
        kinds.add(text.partition(":")[0])
    assert kinds == set(KINDS)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("sometimes:4", "sometimes"),
        ("poisson", "rate="),
        ("poisson:0", "more than 0"),
        ("poisson:x", "a number"),
        ("poisson:inf", "a number"),
        ("poisson:4,burst=2", "burst"),
        ("poisson:4,cv=1,cv=2", "each key once"),
        ("gamma:4,cv", "KEY=VALUE"),
        ("onoff:base=1,burst=8,every=20,for=30", "period"),
        ("steps:30=5", "start at 0"),
        ("steps", "at least one level"),
        ("replay:", "NAME_OR_FILE"),
        ("replay:azure-conv,keep=2", "at most 1"),
        ("rates:no-such-trace", "servegen-day"),
        ("closed:think=1", "users="),
        ("closed:users=2.5", "whole"),
    ],
)
def test_what_makes_no_sense_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_arrivals(text, 60.0)
