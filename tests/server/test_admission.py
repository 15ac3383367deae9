"""The backlog counts what waits, and the pace is what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamictp.clock import ManualClock
from dynamictp.control.admission import Refusal, Share
from dynamictp.errors import CapacityError
from dynamictp.messages import Snapshot
from dynamictp.server.admission import (
    LOG_S,
    LONG_PROMPT_TOKENS,
    MAX_BIAS,
    SATURATED_TOKENS,
    WINDOW_S,
    AdmissionControl,
    Backlog,
    Pace,
    QueueLimits,
    RefusalLog,
    Waiting,
    class_of,
)
from dynamictp.server.sender import Sender


def test_refusals_are_told_the_first_at_once_and_then_together(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(0.0)
    log = RefusalLog(clock)
    log.say()
    for _ in range(3):
        log.add(Refusal("wait_too_long", 503, 1.0))
    log.add(Refusal("tenant_full", 429, 1.0))
    clock.advance(LOG_S - 0.1)
    log.say()
    assert [record.getMessage() for record in caplog.records] == ["requests refused in 1 s: wait_too_long 1"]
    clock.advance(0.1)
    log.say()
    log.say()
    assert caplog.records[1].getMessage() == "requests refused in 10 s: wait_too_long 2, tenant_full 1"
    assert len(caplog.records) == 2


_entries = st.builds(
    Waiting,
    sender=st.builds(Sender, st.just(0.0), tenant=st.sampled_from("ab"), priority=st.integers(0, 1)),
    tokens=st.integers(1, 600),
    group=st.sampled_from("xyz"),
)


@given(entries=st.lists(_entries, max_size=30), gone=st.lists(st.integers(0, 29), max_size=30, unique=True))
def test_the_backlog_is_the_sum_of_what_waits(entries: list[Waiting], gone: list[int]) -> None:
    backlog = Backlog()
    for entry in entries:
        backlog.add(entry)
    for index in gone:
        if index < len(entries):
            backlog.remove(entries[index])
    left = [entry for index, entry in enumerate(entries) if index not in gone]
    for tenant in "ab":
        for kind in ("short", "long"):
            seen = backlog.seen_by(tenant, kind)  # type: ignore[arg-type]
            mine = [entry for entry in left if entry.sender.tenant == tenant]
            alike = [entry for entry in left if class_of(entry.tokens) == kind]
            assert (seen.requests, seen.tokens) == (len(left), sum(e.tokens for e in left))
            assert (seen.tenant_requests, seen.tenant_tokens) == (len(mine), sum(e.tokens for e in mine))
            assert (seen.class_requests, seen.class_tokens) == (len(alike), sum(e.tokens for e in alike))
            for share in seen.shares:
                part = [
                    e for e in left if (e.sender.tenant, e.sender.priority) == (share.tenant, share.priority)
                ]
                assert share.requests == len(part)
                assert share.tokens == sum(e.tokens for e in part)
                assert share.heads == len({e.group for e in part})
                assert share.heads <= share.head_tokens <= share.tokens
    assert len({(s.tenant, s.priority) for s in backlog.seen_by("a", "short").shares}) == len(
        {(e.sender.tenant, e.sender.priority) for e in left}
    )


def test_of_a_list_one_prompt_is_in_the_way() -> None:
    backlog = Backlog()
    for tokens in (300, 500, 400):
        backlog.add(Waiting(Sender(0.0), tokens, "list"))
    backlog.add(Waiting(Sender(0.0), 20, "single"))
    assert backlog.seen_by("", "short").shares == (Share("", 0, 4, 1220, 2, 520),)


def waiting(tokens: int, arrival_s: float = 0.0, predicted_s: float | None = None) -> Waiting:
    return Waiting(Sender(arrival_s), tokens, "g", predicted_s)


def test_prefill_is_measured_while_it_is_saturated_and_forgotten() -> None:
    clock = ManualClock()
    pace = Pace(clock)
    assert pace.prefill_tokens_per_s(700.0) == 700.0
    for _ in range(41):
        pace.first_token(waiting(200), SATURATED_TOKENS)
        clock.advance(0.1)
    assert pace.prefill_tokens_per_s(700.0) == pytest.approx(2000, rel=0.2)
    for _ in range(20):
        pace.first_token(waiting(10), 20)
        clock.advance(0.1)
    assert pace.prefill_tokens_per_s(700.0) > 1000
    clock.advance(WINDOW_S)
    assert pace.prefill_tokens_per_s(700.0) == 700.0


def test_predictions_that_were_too_good_are_corrected_within_bounds() -> None:
    clock = ManualClock(100.0)
    pace = Pace(clock)
    for took_s in (1.0, 2.0, 2.0):
        pace.first_token(waiting(10, 100.0 - took_s, predicted_s=1.0), 20)
    slow = pace.bias
    assert 1.0 < slow < 2.0
    for _ in range(100):
        pace.first_token(waiting(10, 0.0, predicted_s=1.0), 20)
    assert pace.bias == MAX_BIAS
    for _ in range(100):
        pace.first_token(waiting(10, 99.9, predicted_s=1.0), 20)
    assert pace.bias == 1.0
    pace.first_token(waiting(10, 0.0, predicted_s=0.1), 20)
    pace.first_token(waiting(10, 0.0), 20)
    assert pace.bias == 1.0


def snapshot(rows: int, rate: float) -> Snapshot:
    return Snapshot(0.0, "tp1", 0, 0, 0, (), (), 0, 0, 0, rows_total=rows, prefill_tokens_per_s=rate)


def test_the_engine_s_figures_count_until_there_are_better_ones() -> None:
    control = AdmissionControl(ManualClock(), QueueLimits(wait_s=1.5))
    for _ in range(10):
        control.backlog.add(Waiting(Sender(0.0), 100, f"g{control.backlog.requests}"))
    ask = Sender(0.0)
    assert control.check(ask, [50], snapshot=snapshot(64, 1000.0), live=10) == pytest.approx(1.1)
    with pytest.raises(CapacityError) as slow:
        control.check(ask, [50], snapshot=snapshot(64, 500.0), live=10)
    assert (slow.value.status, slow.value.code, slow.value.retry_after_s) == (503, "wait_too_long", 1.0)
    control.pace.output_tokens, control.pace.tpot_s = 100.0, 0.1
    with pytest.raises(CapacityError):
        control.check(ask, [50], snapshot=snapshot(4, 1e6), live=14)
    assert control.refused == {"wait_too_long": 2}


def test_classes() -> None:
    assert [class_of(n) for n in (1, LONG_PROMPT_TOKENS - 1, LONG_PROMPT_TOKENS)] == [
        "short",
        "short",
        "long",
    ]
