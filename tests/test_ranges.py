"""Cuts, heads per rank, legal degrees, and what a device must hold."""

from __future__ import annotations

from collections import Counter
from itertools import permutations, product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamictp.facts import PANEL_ROWS, ModelFacts, RopeFacts
from dynamictp.ranges import (
    HeadRanges,
    Range,
    can_serve,
    cut,
    head_ranges,
    hull,
    legal_degrees,
    member_order,
    panels,
    residency,
    shard_ranges,
    surplus,
)

SMOLLM2 = ModelFacts(
    family="llama", layers=30, hidden=576, query_heads=9, kv_heads=3, head_dim=64, intermediate=1536,
    vocab=49152, max_context=8192, norm_eps=1e-5, rope=RopeFacts(theta=100_000.0),
)  # fmt: skip


def model(query_heads: int, kv_heads: int, **sizes: int) -> ModelFacts:
    return msgspec.structs.replace(SMOLLM2, query_heads=query_heads, kv_heads=kv_heads, **sizes)


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    kv_heads = draw(st.integers(1, 12))
    rows = st.integers(1, 3000)
    return model(
        kv_heads * draw(st.integers(1, 8)),
        kv_heads,
        head_dim=draw(st.sampled_from((16, 64, 80, 128))),
        hidden=draw(rows),
        intermediate=draw(rows),
        vocab=draw(rows),
    )


RANGES = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: Range(min(pair), max(pair)))


def assert_tiles(parts: list[Range], whole: int) -> None:
    """The parts follow each other without gap or overlap and cover [0, whole)."""
    ends = [0, *(part.stop for part in parts)]
    assert [part.start for part in parts] == ends[:-1]
    assert all(len(part) >= 0 for part in parts)
    assert ends[-1] == whole


# ---------------------------------------------------------------- ranges and cuts


@given(RANGES, RANGES)
def test_contains_is_the_subset_relation(outer: Range, inner: Range) -> None:
    members = set(range(outer.start, outer.stop))
    assert outer.contains(inner) == (set(range(inner.start, inner.stop)) <= members)
    assert can_serve(outer, inner) == outer.contains(inner)


@given(RANGES, st.integers(1, 64), st.integers(0, 3000))
def test_scaled_ranges_end_at_the_limit(units: Range, unit: int, limit: int) -> None:
    assert units.scaled(unit) == Range(units.start * unit, units.stop * unit)
    scaled = units.scaled(unit, limit)
    assert 0 <= scaled.start <= scaled.stop <= limit
    assert len(scaled) == max(0, min(units.stop * unit, limit) - units.start * unit)


@given(st.integers(0, 5000), st.integers(1, 200))
def test_a_cut_covers_everything_in_parts_that_differ_by_at_most_one(units: int, count: int) -> None:
    parts = [cut(units, count, part) for part in range(count)]
    assert_tiles(parts, units)
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 500), st.integers(1, 40), st.data())
def test_a_part_of_a_larger_cut_begins_no_earlier(units: int, count: int, data: st.DataObject) -> None:
    part = data.draw(st.integers(0, count - 1))
    smaller, larger = cut(units, count, part), cut(units + 1, count, part)
    assert smaller.start <= larger.start
    assert smaller.stop <= larger.stop


@given(st.integers(1, 10_000))
def test_panels_hold_all_rows_and_no_panel_is_empty(rows: int) -> None:
    assert (panels(rows) - 1) * PANEL_ROWS < rows <= panels(rows) * PANEL_ROWS


# ---------------------------------------------------------------- shared memory


@given(models(), st.data())
def test_shards_tile_every_tensor_class(facts: ModelFacts, data: st.DataObject) -> None:
    legal = legal_degrees(facts, devices=64)
    tp = data.draw(st.sampled_from(legal))
    shards = [shard_ranges(facts, tp, rank) for rank in range(tp)]
    assert_tiles([shard.qkv for shard in shards], facts.qkv_units * facts.head_dim)
    assert_tiles([shard.hidden for shard in shards], facts.hidden)
    assert_tiles([shard.mlp for shard in shards], facts.intermediate)
    assert_tiles([shard.vocab for shard in shards], facts.vocab)
    for shard in shards:
        assert len(shard.qkv) % facts.head_dim == 0
        for rows, whole in (
            (shard.hidden, facts.hidden),
            (shard.mlp, facts.intermediate),
            (shard.vocab, facts.vocab),
        ):
            assert len(rows) > 0
            assert rows.start % PANEL_ROWS == 0
            assert rows.stop % PANEL_ROWS == 0 or rows.stop == whole
        assert len(shard.qkv) > 0


@given(models(), st.integers(1, 64))
def test_the_path_of_each_class_is_as_short_as_an_even_cut_allows(facts: ModelFacts, tp: int) -> None:
    """Every class is cut by itself: no rank makes up in one class for another."""
    for units, name in (
        (panels(facts.hidden), "hidden"),
        (panels(facts.intermediate), "mlp"),
        (panels(facts.vocab), "vocab"),
    ):
        longest = max(len(getattr(shard_ranges(facts, tp, rank), name)) for rank in range(tp))
        assert longest <= -(-units // tp) * PANEL_ROWS


def test_smollm2_has_15_head_units_and_tp2_takes_8_and_7() -> None:
    assert SMOLLM2.qkv_units == 15
    first, second = shard_ranges(SMOLLM2, 2, 0), shard_ranges(SMOLLM2, 2, 1)
    assert (first.qkv, second.qkv) == (Range(0, 8 * 64), Range(8 * 64, 15 * 64))
    assert (first.hidden, second.hidden) == (Range(0, 288), Range(288, 576))
    assert (first.mlp, second.mlp) == (Range(0, 768), Range(768, 1536))
    assert (first.vocab, second.vocab) == (Range(0, 24576), Range(24576, 49152))


def test_smollm2_runs_at_every_degree_from_1_to_9() -> None:
    assert legal_degrees(SMOLLM2, devices=64) == tuple(range(1, 10))
    for tp in range(1, 10):
        for rank in range(tp):
            shard = shard_ranges(SMOLLM2, tp, rank)
            assert all(len(rows) for rows in (shard.qkv, shard.hidden, shard.mlp, shard.vocab))


# ---------------------------------------------------------------- separate memories


@given(models(), st.data())
def test_ranks_own_whole_heads(facts: ModelFacts, data: st.DataObject) -> None:
    tp = data.draw(st.integers(1, facts.query_heads))
    ranks = [head_ranges(facts, tp, rank) for rank in range(tp)]
    assert_tiles([rank.query for rank in ranks], facts.query_heads)
    for index, rank in enumerate(ranks):
        assert len(rank.query) > 0
        # The query heads of a rank use exactly the KV heads that it has.
        assert {q // facts.group for q in range(rank.query.start, rank.query.stop)} == set(
            range(rank.kv.start, rank.kv.stop)
        )
        if tp <= facts.kv_heads:
            start, stop = (-(-i * facts.kv_heads // tp) for i in (index, index + 1))
            assert rank == HeadRanges(Range(start * facts.group, stop * facts.group), Range(start, stop))
        else:
            assert len(rank.kv) == 1
    if tp > facts.kv_heads:
        sharers = Counter(rank.kv.start for rank in ranks)
        assert set(sharers) == set(range(facts.kv_heads))
        assert max(sharers.values()) - min(sharers.values()) <= 1


def test_heads_at_odd_degrees() -> None:
    """64 query heads, 8 KV heads (a 70B model): 3 ranks have whole KV heads, 11 share them."""
    large = model(64, 8)
    assert [head_ranges(large, 3, rank).kv for rank in range(3)] == [Range(0, 3), Range(3, 6), Range(6, 8)]
    assert [head_ranges(large, 11, rank).kv.start for rank in range(11)] == [0, 0, 1, 2, 2, 3, 4, 5, 5, 6, 7]
    assert head_ranges(large, 11, 1) == HeadRanges(Range(4, 8), Range(0, 1))
    assert head_ranges(large, 11, 2) == HeadRanges(Range(8, 16), Range(1, 2))


def test_smollm2_at_tp2_in_separate_memories_is_6_and_3_query_heads() -> None:
    assert [len(head_ranges(SMOLLM2, 2, rank).query) for rank in range(2)] == [6, 3]


# ---------------------------------------------------------------- legal degrees


@given(models(), st.sampled_from(("exact", "fast")), st.integers(1, 100))
def test_legal_degrees_are_1_up_to_the_last_at_which_every_rank_has_work(
    facts: ModelFacts, numerics: str, devices: int
) -> None:
    legal = legal_degrees(facts, numerics, devices=devices)  # type: ignore[arg-type]
    assert legal == tuple(range(1, len(legal) + 1))
    assert 1 <= len(legal) <= min(devices, facts.query_heads)
    beyond = len(legal) + 1
    if beyond <= devices:
        units = [facts.query_heads, panels(facts.intermediate), panels(facts.vocab)]
        if numerics == "exact":
            units.append(panels(facts.hidden))
        assert any(len(cut(count, beyond, rank)) == 0 for count in units for rank in range(beyond))


def test_without_communicators_only_1_is_legal() -> None:
    assert legal_degrees(SMOLLM2, devices=8, communicators=False) == (1,)
    assert legal_degrees(SMOLLM2, "fast", devices=8, communicators=False) == (1,)


def test_hidden_rows_bound_exact_numerics_only() -> None:
    """Fast numerics cuts the output and down projections along K, so every rank has all hidden rows."""
    narrow = model(8, 2, hidden=48)
    assert legal_degrees(narrow, "exact", devices=8) == (1, 2, 3)
    assert legal_degrees(narrow, "fast", devices=8) == tuple(range(1, 9))


# ---------------------------------------------------------------- residency


@given(st.lists(RANGES, max_size=6))
def test_the_hull_is_the_smallest_interval_that_covers(ranges: list[Range]) -> None:
    covered = {i for r in ranges for i in range(r.start, r.stop)}
    whole = hull(ranges)
    assert all(whole.contains(r) for r in ranges)
    assert (whole.start, whole.stop) == ((min(covered), max(covered) + 1) if covered else (0, 0))


@given(st.integers(24, 200), st.dictionaries(st.integers(1, 12), st.integers(0, 11), min_size=1))
def test_residency_serves_every_planned_rank(units: int, wanted: dict[int, int]) -> None:
    ranks = {degree: rank % degree for degree, rank in wanted.items()}
    resident = residency(units, ranks)
    assert all(can_serve(resident, cut(units, degree, rank)) for degree, rank in ranks.items())


# Ranks of devices 0-7 at the degrees 4, 6, 8. Two devices hold each quarter (4 and 8 need no more). Of the
# sixths, four lie inside a quarter; the two that straddle one (ranks 1 and 4) widen one device each.
RANKS_4_6_8: tuple[dict[int, int], ...] = (
    {4: 0, 8: 0, 6: 0},
    {4: 0, 8: 1},
    {4: 1, 8: 2, 6: 1},
    {4: 1, 8: 3, 6: 2},
    {4: 2, 8: 4, 6: 3},
    {4: 2, 8: 5, 6: 4},
    {4: 3, 8: 6},
    {4: 3, 8: 7, 6: 5},
)


def test_degrees_4_6_8_on_8_devices_take_27_percent_on_average_and_33_at_most() -> None:
    units = 2400
    resident = [residency(units, ranks) for ranks in RANKS_4_6_8]
    shares = [len(held) / units for held in resident]
    assert sum(shares) / 8 == pytest.approx(0.27, abs=0.005)
    assert max(shares) == pytest.approx(1 / 3)
    assert sum(surplus(units, held, 8) for held in resident) / 8 == pytest.approx(0.27 - 0.125, abs=0.005)
    for degree in (4, 6, 8):
        order = member_order(units, degree, resident)
        assert order is not None
        assert_serves(units, resident, order)
    assert member_order(units, 5, resident) is None
    assert member_order(units, 7, resident) is None


def assert_serves(units: int, resident: list[Range], order: tuple[int, ...]) -> None:
    assert len(set(order)) == len(order)
    for rank, device in enumerate(order):
        assert can_serve(resident[device], cut(units, len(order), rank))


QUARTERS = [cut(2400, 4, device % 4) for device in range(8)]


def test_quarters_serve_4_and_8_and_not_5_6_7() -> None:
    assert member_order(2400, 4, QUARTERS) == (0, 1, 2, 3)
    assert member_order(2400, 8, QUARTERS) == (0, 4, 1, 5, 2, 6, 3, 7)
    for degree in (1, 2, 3, 5, 6, 7):
        assert member_order(2400, degree, QUARTERS) is None


def test_devices_that_hold_everything_are_taken_in_order() -> None:
    everything = [Range(0, 36)] * 12
    for degree in range(1, 13):
        assert member_order(36, degree, everything) == tuple(range(degree))
    assert member_order(36, 13, everything) is None


def test_a_degree_beyond_the_units_has_no_order() -> None:
    assert member_order(3, 4, [Range(0, 3)] * 4) is None


def test_surplus_is_the_share_beyond_static_tp() -> None:
    assert surplus(2400, Range(0, 600), 4) == 0
    assert surplus(2400, Range(0, 600), 8) == pytest.approx(0.125)
    assert surplus(2400, Range(0, 2400), 1) == 0


@given(st.integers(1, 5), st.integers(5, 12), st.lists(RANGES, max_size=6))
def test_an_order_is_found_exactly_when_there_is_one(degree: int, units: int, resident: list[Range]) -> None:
    resident = [Range(min(r.start, units), min(r.stop, units)) for r in resident]
    order = member_order(units, degree, resident)
    exists = any(
        all(can_serve(resident[d], cut(units, degree, rank)) for rank, d in enumerate(candidate))
        for candidate in permutations(range(len(resident)), degree)
    )
    assert (order is not None) == exists
    if order is not None:
        assert_serves(units, resident, order)


def test_any_two_halves_and_the_whole() -> None:
    """Small and complete: three devices, each with nothing, a half or all; degree 2."""
    for held in product((Range(0, 0), Range(0, 4), Range(4, 8), Range(0, 8)), repeat=3):
        firsts = {d for d in range(3) if can_serve(held[d], Range(0, 4))}
        seconds = {d for d in range(3) if can_serve(held[d], Range(4, 8))}
        exists = any(a != b for a in firsts for b in seconds)
        assert (member_order(8, 2, held) is not None) == exists
