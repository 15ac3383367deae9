"""Capacities and latencies of layouts, and the online calibration behind them."""

from __future__ import annotations

import math

import msgspec
import pytest

from dynamictp.control.calibrate import Online, corrected, expected_s, learn, provenance
from dynamictp.control.capacity import CostBook, Table
from dynamictp.control.config import Slo
from dynamictp.control.traffic import Profile
from dynamictp.control.values import StepSample
from dynamictp.cost.calibration import Calibration, CalibrationPoint, CrowdedPoint, RequestPoint
from dynamictp.cost.steps import StepModel
from tests.control.pools import CPU_LEGAL, GPU_LEGAL, cpu_facts, gpu_facts

CHAT = Profile(100, 180, 60, 110)
SLO = Slo(ttft_per_token_ms=2.0)


def cpu_table(shared_gbps: float = 36.0, profile: Profile = CHAT, slo: Slo = SLO) -> Table:
    return CostBook(cpu_facts(shared_gbps)).table(profile, (), slo, CPU_LEGAL)


@pytest.mark.parametrize("shared_gbps", [36.0, 60.0])
def test_two_narrow_domains_are_no_lever_on_a_shared_memory(shared_gbps: float) -> None:
    table = cpu_table(shared_gbps)
    tp1, tp2, both = (table.capacity(layout) for layout in CPU_LEGAL)
    assert 1.3 * tp1 < tp2 < 2.2 * tp1
    assert both < 1.15 * tp2, "no sideways move to tp1+tp1 for throughput"
    for part in (0.1, 0.5, 0.9):
        wide, narrow = (table.predict(layout, part * tp2) for layout in ("tp2", "tp1+tp1"))
        assert wide.tpot_s < narrow.tpot_s
        assert wide.ttft_s < narrow.ttft_s


def test_more_bandwidth_helps_wide_domains_at_low_load() -> None:
    slow, fast = (cpu_table(gbps).predict("tp2", 0.2) for gbps in (36.0, 60.0))
    assert fast.tpot_s < 0.8 * slow.tpot_s


def test_latency_rises_with_load_and_beyond_capacity() -> None:
    table = cpu_table()
    rates = [0.1, 1.0, 2.0, 4.0, table.entries["tp1"].full * 1.5, table.entries["tp1"].full * 3]
    times = [table.predict("tp1", rate).e2e_s for rate in rates]
    assert times == sorted(times)
    assert times[-1] > 1.8 * times[-2]


def test_a_tight_target_lowers_the_capacity_and_an_impossible_one_is_said() -> None:
    loose, tight = cpu_table(slo=Slo(tpot_p99_ms=100)), cpu_table(slo=Slo(tpot_p99_ms=20))
    assert 0 < tight.capacity("tp2") < loose.capacity("tp2")
    only_wide = cpu_table(60.0, slo=Slo(tpot_p99_ms=9))
    assert only_wide.capacity("tp1") == 0 < only_wide.capacity("tp2")
    assert only_wide.load("tp1", 0.1) == math.inf
    hopeless = cpu_table(slo=Slo(tpot_p99_ms=1))
    assert not hopeless.holds_slo
    assert hopeless.capacity("tp1") == hopeless.entries["tp1"].full > 0


def test_prefix_hits_and_shorter_prompts_raise_the_capacity() -> None:
    plain = cpu_table(profile=Profile(1000, 2000, 60, 110)).capacity("tp1")
    hits = cpu_table(profile=Profile(1000, 2000, 60, 110, hit_share=0.8)).capacity("tp1")
    assert hits > 1.5 * plain


def test_a_node_of_separate_memories_gains_by_replicas() -> None:
    table = CostBook(gpu_facts()).table(Profile(1000, 2000, 200, 400), (), Slo(), GPU_LEGAL)
    assert table.entries["4*tp2"].full > table.entries["tp8"].full
    assert table.predict("tp8", 0.5).e2e_s < table.predict("4*tp2", 0.5).e2e_s
    assert table.capacity("tp4+tp4") > 1.8 * table.capacity("tp4")


def test_tables_are_kept_and_equal_whoever_asks() -> None:
    book = CostBook(cpu_facts())
    first = book.table(CHAT, (), SLO, CPU_LEGAL)
    assert book.table(CHAT, (), SLO, CPU_LEGAL) is first
    other = CostBook(cpu_facts()).table(CHAT, (), SLO, CPU_LEGAL)
    assert other.entries == first.entries
    learnt = book.table(CHAT, ((1, "decode", 2.0), (1, "prefill", 2.0)), SLO, CPU_LEGAL)
    assert learnt.entries["tp1"].full == pytest.approx(first.entries["tp1"].full / 2, rel=0.05)


# ---------------------------------------------------------------- calibration


def sample(book: CostBook, tp: int, slower: float, *, rows: int = 4, prefill: int = 0) -> StepSample:
    """A step that took `slower` times what the model expects."""
    blank = StepSample(tp, 1.0, rows, 200.0, prefill, 0.0, active_devices=tp)
    return msgspec.structs.replace(blank, seconds=slower * expected_s(blank, book.steps(tp, tp)))


def test_the_median_is_learnt_and_outliers_are_not() -> None:
    book = CostBook(cpu_facts())
    good = [sample(book, 1, 1.5) for _ in range(20)]
    stalls = [sample(book, 1, 30.0) for _ in range(5)]
    online = learn(Online(), good + stalls, book.steps, clamp=4.0)
    ((tp, phase, ratio),) = online.ratios
    assert (tp, phase) == (1, "decode")
    assert ratio == pytest.approx(1.5, rel=0.05)
    assert not online.pegged({1})
    assert learn(online, [sample(book, 1, 1.52)], book.steps, clamp=4.0).ratios == online.ratios


def test_few_samples_and_shared_devices_teach_nothing() -> None:
    book = CostBook(cpu_facts())
    few = [sample(book, 1, 2.0) for _ in range(3)]
    assert learn(Online(), few, book.steps, clamp=4.0).ratios == ()
    shared = [msgspec.structs.replace(sample(book, 1, 2.0), exclusive=False)] * 20
    assert learn(Online(), shared, book.steps, clamp=4.0) == Online()


def test_a_correction_at_its_clamp_is_pegged() -> None:
    book = CostBook(cpu_facts())
    online = learn(Online(), [sample(book, 1, 9.0) for _ in range(31)], book.steps, clamp=4.0)
    assert online.pegged({1})
    assert online.ratios[0][2] == pytest.approx(4.0, rel=0.05)


def test_untried_degrees_inherit_and_say_so() -> None:
    ratios = ((1, "decode", 1.5), (1, "prefill", 0.5))
    calibration = corrected(None, ratios, 512)
    assert calibration is not None
    for tp in (1, 2):
        decode, prefill = calibration.correction("base", tp, 4), calibration.correction("base", tp, 400)
        assert decode is not None
        assert prefill is not None
        assert (decode.ratio, prefill.ratio) == (pytest.approx(1.5), pytest.approx(0.5))
        assert decode.inherited == (tp == 2)
    assert provenance(ratios, None, 1, "decode") == "measured online"
    assert provenance(ratios, None, 2, "decode") == "inherited from tp1"
    assert provenance((), None, 2, "decode") == "data sheet and assumptions"


def test_what_is_learnt_comes_on_top_of_a_calibration_file() -> None:
    points = [CalibrationPoint("base", 1, size, 2.0) for size in (1, 16, 384)]
    measured = RequestPoint(0, 0.004, 0.003, 0.005), CrowdedPoint(1, 2, 1.3)
    base = Calibration(
        "m", "d", "file", tuple(points), 1e9, requests=measured[:1], crowded=measured[1:]
    )  # fmt: skip
    combined = corrected(base, ((1, "decode", 1.5), (1, "prefill", 1.0)), 512)
    assert combined is not None
    kept = msgspec.structs.replace(combined, points=base.points, source=base.source)
    assert kept == base, "what is not a step's time stays as it was measured"
    facts = cpu_facts()
    plain, after = (StepModel(facts.domain(1, 1, c)) for c in (None, combined))
    assert after.base(1, 1).total_s == pytest.approx(3.0 * plain.base(1, 1).total_s)
    assert after.base(384, 1).total_s == pytest.approx(2.0 * plain.base(384, 1).total_s)
    assert corrected(base, (), 512) is base
