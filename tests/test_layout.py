"""Layouts: text forms, placement, and the list of legal layouts."""

from __future__ import annotations

import doctest
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamictp.errors import LayoutRefused
from dynamictp.layout import (
    MAX_DEVICES,
    Layout,
    LayoutSpec,
    PlacedShape,
    Shape,
    legal_specs,
    parse_layout,
    place,
    planned_specs,
)

MODELS = st.one_of(st.just(""), st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,8}", fullmatch=True))
SHAPES = st.builds(Shape, tp=st.integers(1, 16), pp=st.integers(1, 3), model=MODELS)
SPECS = st.lists(SHAPES, min_size=1, max_size=6).map(lambda shapes: LayoutSpec(tuple(shapes)))
SMALL_SPECS = st.lists(st.builds(Shape, tp=st.integers(1, 4)), max_size=5).map(lambda s: LayoutSpec(tuple(s)))


@st.composite
def placed_layouts(draw: st.DrawFn) -> Layout:
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
    total = sum(shape.devices for shape in shapes)
    ids = draw(st.permutations(range(total + draw(st.integers(0, 5)))))
    domains = []
    for shape in shapes:
        domains.append(PlacedShape(shape, tuple(ids[: shape.devices])))
        ids = ids[shape.devices :]
    return Layout(tuple(domains))


# ---------------------------------------------------------------- text forms


@given(SPECS)
def test_the_text_of_a_spec_parses_to_the_same_spec(spec: LayoutSpec) -> None:
    assert LayoutSpec.parse(str(spec)) == spec
    assert str(LayoutSpec.parse(str(spec))) == str(spec)


@given(placed_layouts())
def test_the_text_of_a_placed_layout_parses_to_the_same_layout(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout


@given(st.data(), st.lists(SHAPES, min_size=1, max_size=6))
def test_a_spec_does_not_depend_on_the_order_of_its_shapes(data: st.DataObject, shapes: list[Shape]) -> None:
    shuffled = data.draw(st.permutations(shapes))
    spec = LayoutSpec(tuple(shapes))
    assert LayoutSpec(tuple(shuffled)) == spec
    assert str(LayoutSpec(tuple(shuffled))) == str(spec)
    assert LayoutSpec.parse("+".join(map(str, shuffled))) == spec
    assert [s.devices for s in spec.shapes] == sorted((s.devices for s in shapes), reverse=True)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("tp2", "tp2"),
        ("tp1+tp1", "tp1+tp1"),
        ("2*tp1", "tp1+tp1"),
        ("3*tp1", "3*tp1"),
        ("tp1+tp1+tp1", "3*tp1"),
        ("tp2+tp6", "tp6+tp2"),
        (" tp6 + tp2 ", "tp6+tp2"),
        ("tp2pp2", "tp2pp2"),
        ("tp2pp1", "tp2"),
        ("tp2pp2+tp4", "tp4+tp2pp2"),
        ("small:tp2+big:tp6", "big:tp6+small:tp2"),
        ("2*b:tp1+a:tp1", "a:tp1+b:tp1+b:tp1"),
        ("SmolLM2-135M.q8:tp1", "SmolLM2-135M.q8:tp1"),
        ("tp2:tp2", "tp2:tp2"),
    ],
)
def test_canonical_text_of_a_spec(text: str, canonical: str) -> None:
    assert str(LayoutSpec.parse(text)) == canonical


def test_a_count_is_the_same_as_writing_the_shape_out() -> None:
    assert LayoutSpec.parse("2*tp1") == LayoutSpec.parse("tp1+tp1")
    assert LayoutSpec.parse("2*m:tp2pp2") == LayoutSpec.parse("m:tp2pp2+m:tp2pp2")
    assert LayoutSpec.parse("2*tp2pp2").devices == 8


def test_a_placed_layout_is_ordered_by_first_device_and_keeps_the_order_of_ranks() -> None:
    layout = Layout.parse("tp1@3+tp2@1,0")
    assert str(layout) == "tp2@1,0+tp1@3"
    assert layout.domains[0].devices == (1, 0)
    assert layout.devices == {0, 1, 3}
    assert layout.spec == LayoutSpec.parse("tp2+tp1")
    assert str(Layout.parse("big:tp2pp2@4,5,6,7")) == "big:tp2pp2@4,5,6,7"


BAD_TEXTS = [
    "", " ", "+", "tp1+", "+tp1", "tp", "tp0", "tp01", "tp-1", "tp1.5", "tp1 tp1", "TP2", "tp2tp2", "2tp1",
    "0*tp1", "-1*tp1", "*tp1", "2 * tp1", "2*2*tp1", "tp2pp0", "tp2pp", "pp2", "tp1025", "tp1pp1025",
    "tp10000", "10000*tp1", ":tp1", "a b:tp1", "a:b:tp1", "1a:tp1", "tp2@", "tp2@0", "tp2@0,", "tp2@0 ,1",
    "tp2@0,0", "tp2@0,1,2", "tp1@-1", "tp1@10000", "tp²", "tp２", "tp٣", "２*tp1", "tp1@０", "ｔp1", "é:tp1",
    "tp1\n+tp1\x00", "auto", "null",
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(LayoutRefused):
        LayoutSpec.parse(text)
    with pytest.raises(LayoutRefused):
        Layout.parse(text)


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (LayoutSpec.parse, Layout.parse):
        try:
            layout = parse(text)
        except LayoutRefused:
            continue
        assert parse(str(layout)) == layout


@pytest.mark.parametrize("text", ["9999*tp1024", "tp1024pp1024", "+".join(["9999*tp1"] * 1000)])
def test_huge_layouts_are_refused_before_they_are_expanded(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(LayoutRefused, match=str(MAX_DEVICES)):
            LayoutSpec.parse(text)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1_000_000


def test_a_spec_names_no_devices_and_a_placed_layout_names_all() -> None:
    with pytest.raises(LayoutRefused, match="names devices"):
        LayoutSpec.parse("tp1@0")
    with pytest.raises(LayoutRefused, match="not placed"):
        Layout.parse("tp1@0+tp1")
    with pytest.raises(LayoutRefused, match="not placed"):
        Layout.parse("2*tp1@0")


def test_text_is_placed_if_it_names_devices() -> None:
    assert parse_layout("tp2@1,0") == Layout.parse("tp2@1,0")
    assert parse_layout("2*tp1") == LayoutSpec.parse("2*tp1")
    with pytest.raises(LayoutRefused, match="not placed"):
        parse_layout("tp1+tp1@0")


@pytest.mark.parametrize("text", ["tp1@0+tp1@0", "tp2@0,1+tp2@1,2", "a:tp1@3+b:tp1@3"])
def test_a_device_in_two_domains_is_refused(text: str) -> None:
    with pytest.raises(LayoutRefused, match="in two domains"):
        Layout.parse(text)


def test_degrees_out_of_bounds_are_refused() -> None:
    for tp, pp in ((0, 1), (1, 0), (-1, 1), (1025, 1), (1, 1025)):
        with pytest.raises(LayoutRefused):
            Shape(tp, pp)


# ---------------------------------------------------------------- placement


@given(SMALL_SPECS, SMALL_SPECS, st.integers(0, 4), st.data())
def test_placement(old: LayoutSpec, new: LayoutSpec, spare: int, data: st.DataObject) -> None:
    devices = max(old.devices, new.devices) + spare
    live = list(place(old, devices, ()).domains)
    live = data.draw(st.permutations(live))
    layout = place(new, devices, live)

    assert layout.spec == new
    assert layout.devices <= set(range(devices))
    assert sum(len(domain.devices) for domain in layout.domains) == len(layout.devices)
    # The live domains do not overlap, so as many are kept as both layouts have of a shape.
    common = Counter(old.shapes) & Counter(new.shapes)
    kept = [domain for domain in live if domain in layout.domains]
    assert Counter(domain.shape for domain in kept) >= common
    assert place(new, devices, live) == layout


@given(SMALL_SPECS, st.integers(0, 10), st.lists(st.tuples(st.integers(1, 4), st.permutations(range(12)))))
def test_any_spec_that_fits_is_placed_whatever_is_live(
    spec: LayoutSpec, devices: int, live: list[tuple[int, list[int]]]
) -> None:
    """Draining domains may overlap serving ones and lie beyond a pool that shrank."""
    domains = [PlacedShape(Shape(tp), tuple(order[:tp])) for tp, order in live]
    if spec.devices > devices:
        with pytest.raises(LayoutRefused, match=f"the pool has {devices}"):
            place(spec, devices, domains)
    else:
        layout = place(spec, devices, domains)
        assert layout.spec == spec
        assert layout.devices <= set(range(devices))


def placed(text: str) -> tuple[PlacedShape, ...]:
    """Domains in the order of the text, overlapping or not."""
    return tuple(Layout.parse(term).domains[0] for term in text.split("+"))


@pytest.mark.parametrize(
    ("spec", "devices", "live", "expected"),
    [
        ("tp2+tp1", 4, "tp1@0", "tp1@0+tp2@1,2"),
        ("tp1+tp1", 2, "tp2@0,1", "tp1@0+tp1@1"),
        ("tp2", 4, "tp2@2,3", "tp2@2,3"),
        ("tp2", 4, "tp2@3,1", "tp2@3,1"),  # the order of ranks is part of a domain
        ("3*tp1", 4, "tp1@3+tp1@1", "tp1@0+tp1@1+tp1@3"),
        ("tp1", 2, "tp1@1+tp1@0", "tp1@1"),  # the first listed is wanted most
        ("a:tp1+b:tp1", 2, "b:tp1@0", "b:tp1@0+a:tp1@1"),
        ("tp1", 1, "tp1@1", "tp1@0"),  # beyond the pool
    ],
)
def test_live_domains_stay(spec: str, devices: int, live: str, expected: str) -> None:
    assert str(place(LayoutSpec.parse(spec), devices, placed(live))) == expected


def test_a_draining_domain_is_revived_unless_a_serving_one_needs_its_devices() -> None:
    serving, draining = placed("tp1@0"), placed("tp2@1,2+tp2@0,1")
    assert str(place(LayoutSpec.parse("tp2+tp1"), 3, serving + draining)) == "tp1@0+tp2@1,2"
    # Without the tp1, the draining domain that stands on its device comes second.
    assert str(place(LayoutSpec.parse("tp2"), 3, serving + draining)) == "tp2@1,2"
    # tp2@0,1 overlaps the serving tp1@0, which is kept.
    assert str(place(LayoutSpec.parse("tp2+tp1"), 4, serving + draining[1:])) == "tp1@0+tp2@1,2"


def test_no_shapes_place_to_no_domains() -> None:
    assert place(LayoutSpec(()), 2, placed("tp1@0")) == Layout(())


# ---------------------------------------------------------------- legal layouts


def test_legal_specs_of_three_devices() -> None:
    assert [str(spec) for spec in legal_specs((1, 2, 3), 3)] == [
        "tp1", "tp2", "tp1+tp1", "tp3", "tp2+tp1", "3*tp1",
    ]  # fmt: skip


def partition_count(total: int, widest: int) -> int:
    if total == 0:
        return 1
    return sum(partition_count(total - part, part) for part in range(1, min(total, widest) + 1))


@pytest.mark.parametrize("devices", [1, 4, 8, 10])
def test_legal_specs_are_complete(devices: int) -> None:
    specs = legal_specs(range(1, devices + 1), devices, limit=10_000)
    assert len(set(specs)) == len(specs) == sum(partition_count(n, n) for n in range(1, devices + 1))
    assert [(s.devices, len(s.shapes)) for s in specs] == sorted((s.devices, len(s.shapes)) for s in specs)


def test_the_default_limit_holds_every_layout_of_a_node_of_eight() -> None:
    specs = legal_specs(range(1, 9), 8)
    assert len(specs) == 66
    assert str(specs[-1]) == "8*tp1"


@given(st.sets(st.integers(1, 12), max_size=5), st.integers(0, 12), st.integers(0, 40))
def test_a_limit_keeps_the_smallest(degrees: set[int], devices: int, limit: int) -> None:
    everything = legal_specs(sorted(degrees), devices, limit=100_000)
    assert legal_specs(sorted(degrees, reverse=True), devices, limit=limit) == everything[:limit]
    assert all(spec.devices <= devices and {s.tp for s in spec.shapes} <= degrees for spec in everything)


def test_large_pools_do_not_enumerate_everything() -> None:
    assert len(legal_specs(range(1, 1001), 1000)) == 128
    assert [str(spec) for spec in legal_specs((64,), 1000, limit=3)] == ["tp64", "tp64+tp64", "3*tp64"]


@given(st.sets(st.integers(1, 20), max_size=6), st.integers(0, 20), st.integers(1, 200))
def test_a_planner_s_choice_spans_the_pool(degrees: set[int], devices: int, limit: int) -> None:
    chosen = planned_specs(sorted(degrees), devices, limit=limit)
    everything = legal_specs(sorted(degrees), devices, limit=100_000)
    kept = set(chosen)
    assert [spec for spec in everything if spec in kept] == list(chosen)
    equal = {spec for spec in everything if len(set(spec.shapes)) == 1}
    assert equal <= kept
    assert len(chosen) == min(len(everything), max(limit, len(equal)))
    # No number of devices has two mixed layouts more than another one that has some left.
    mixed = Counter(spec.devices for spec in kept - equal)
    left = {spec.devices for spec in everything if spec not in kept}
    assert all(mixed[few] >= most - 1 for few in left for most in mixed.values())


@pytest.mark.parametrize("devices", [16, 64])
def test_a_planner_of_a_large_pool_may_use_all_of_it(devices: int) -> None:
    chosen = [str(spec) for spec in planned_specs(range(1, 17), devices)]
    assert {f"{devices}*tp1", f"{devices // 4}*tp4", "tp16", "tp8+tp8"} <= set(chosen)
    assert {LayoutSpec.parse(text).devices for text in chosen} == set(range(1, devices + 1))


def test_the_only_models_name_can_be_left_out() -> None:
    assert LayoutSpec.parse("big:tp1+tp2").without_models() == LayoutSpec.parse("tp2+tp1")
    assert Layout.parse("big:tp2@1,0").without_models() == Layout.parse("tp2@1,0")


# ---------------------------------------------------------------- documentation


def test_the_examples_in_the_documentation_hold() -> None:
    page = Path(__file__).parents[1] / "docs" / "layouts.md"
    test = doctest.DocTestParser().get_doctest(page.read_text(encoding="utf-8"), {}, page.name, str(page), 0)
    assert len(test.examples) > 10
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert not report, "".join(report)
