"""Who is taken: bounds, predicted waits, and whose fault it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from dynamictp.control.admission import (
    MAX_RETRY_S,
    Ahead,
    Ask,
    Bounds,
    Capacity,
    Queue,
    Share,
    admit,
    ahead_of,
    predict_wait_s,
)

ASK = Ask("a", 0, requests=1, tokens=100, longest=100, patience_s=1.5)
FAST = Capacity(1000.0, rows=64, decoding=0, output_tokens=50.0, tpot_s=0.05)
WIDE = Bounds(10_000, 1_000_000)


def ask(**changes: Any) -> Ask:
    return dataclasses.replace(ASK, **changes)


def share(tenant: str, requests: int, tokens: int, *, priority: int = 0, one_list: bool = False) -> Share:
    """Requests of one prompt each, or all of them one list."""
    heads = (1, tokens // requests) if one_list else (requests, tokens)
    return Share(tenant, priority, requests, tokens, *heads)


def queue(*shares: Share, tenant: str = "a") -> Queue:
    own = [each for each in shares if each.tenant == tenant]
    requests, tokens = sum(each.requests for each in shares), sum(each.tokens for each in shares)
    mine = sum(each.requests for each in own), sum(each.tokens for each in own)
    return Queue(requests, tokens, *mine, requests, tokens, shares)


def test_ahead_is_what_comes_first() -> None:
    assert ahead_of(ASK, ()) == Ahead(0, 0)
    assert ahead_of(ASK, (share("a", 5, 500),)) == Ahead(5, 500)
    # Of a list only its next prompt.
    assert ahead_of(ASK, (share("a", 1000, 400_000, one_list=True),)) == Ahead(1, 400)
    # Another tenant gets no more turns than one's own.
    assert ahead_of(ASK, (share("b", 1000, 400_000),)) == Ahead(1, 100)
    assert ahead_of(ASK, (share("a", 3, 300), share("b", 1000, 400_000))) == Ahead(7, 700)
    # Priorities.
    assert ahead_of(ASK, (share("b", 10, 4000, priority=1),)) == Ahead(10, 4000)
    assert ahead_of(ASK, (share("a", 10, 4000, priority=-1), share("b", 9, 90, priority=-2))) == Ahead(0, 0)
    mixed = (
        share("a", 2, 20),
        share("b", 9, 9000),
        share("a", 1, 7, priority=1),
        share("b", 1, 5, priority=1),
    )
    assert ahead_of(ASK, mixed, own_only=True) == Ahead(3, 27)


def test_the_wait_is_that_for_prefill_or_for_rows() -> None:
    assert predict_wait_s(Ahead(0, 0), FAST) == 0
    assert predict_wait_s(Ahead(10, 2000), FAST) == 2.0
    full = dataclasses.replace(FAST, decoding=64)
    # 64 rows, each free after 50 tokens of 50 ms: one in 2.5 s ÷ 64.
    assert predict_wait_s(Ahead(0, 0), full) == pytest.approx(2.5 / 64)
    assert predict_wait_s(Ahead(63, 64), full) == pytest.approx(2.5)
    assert predict_wait_s(Ahead(9, 10), dataclasses.replace(FAST, decoding=60)) == pytest.approx(6 * 2.5 / 64)
    assert predict_wait_s(Ahead(1, 100), dataclasses.replace(FAST, prefill_tokens_per_s=0.0)) == 100


def test_a_short_wait_is_taken_and_a_long_one_refused_until_it_is_short() -> None:
    assert admit(ASK, queue(share("a", 15, 1500)), FAST, WIDE) is None
    refused = admit(ASK, queue(share("a", 60, 6000)), FAST, WIDE)
    assert refused is not None
    assert (refused.reason, refused.status, refused.retry_after_s) == ("wait_too_long", 503, 4.5)
    endless = admit(ASK, queue(share("a", 600, 6_000_00)), FAST, WIDE)
    assert endless is not None
    assert endless.retry_after_s == MAX_RETRY_S


def test_who_is_ready_to_wait_is_taken() -> None:
    waiting = queue(share("a", 60, 6000))
    assert admit(ask(patience_s=10.0), waiting, FAST, WIDE) is None
    assert admit(ask(patience_s=None), waiting, FAST, WIDE) is None
    assert admit(ask(patience_s=0.1), queue(share("a", 2, 200)), FAST, WIDE) is not None


def test_an_empty_queue_takes_anything() -> None:
    full = dataclasses.replace(FAST, rows=1, decoding=1, output_tokens=1000.0)
    huge = ask(requests=1024, tokens=4_000_000, longest=4000)
    assert admit(huge, queue(), full, Bounds(10, 1000)) is None
    assert admit(huge, queue(share("a", 1, 1)), FAST, Bounds(10, 1000)) is not None


def test_a_tenant_with_enough_waiting_is_told_so_and_others_are_taken() -> None:
    greedy = queue(share("a", 60, 6000), tenant="a")
    assert admit(ask(tenant="b"), queue(share("a", 60, 6000), tenant="b"), FAST, WIDE) is None
    both = queue(share("a", 60, 6000), share("b", 1, 100))
    refused = admit(ASK, both, FAST, WIDE)
    assert refused is not None
    assert (refused.reason, refused.status) == ("tenant_wait_too_long", 429)
    # Alone on the server it is not the tenant's fault.
    alone = admit(ASK, greedy, FAST, WIDE)
    assert alone is not None
    assert alone.status == 503


@pytest.mark.parametrize(
    ("bounds", "reason", "status"),
    [
        (Bounds(21, 1_000_000), None, 0),
        (Bounds(20, 1_000_000), "server_full", 503),
        (Bounds(100, 299), "server_full", 503),
        (Bounds(22, 1_000_000, tenant_share=0.5), None, 0),
        (Bounds(21, 1_000_000, tenant_share=0.5), "tenant_full", 429),
        (Bounds(100, 300, tenant_share=0.5), "tenant_full", 429),
        (Bounds(22, 1_000_000, class_share=0.5), "class_full", 503),
        (Bounds(100, 310, class_share=0.5), "class_full", 503),
    ],
)
def test_bounds(bounds: Bounds, reason: str | None, status: int) -> None:
    waiting = queue(share("a", 10, 100), share("b", 10, 100))
    refused = admit(ASK, waiting, FAST, bounds)
    if reason is None:
        assert refused is None
    else:
        assert refused is not None
        assert (refused.reason, refused.status) == (reason, status)
        assert refused.retry_after_s >= 1
