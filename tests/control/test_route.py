"""Routing: predicted completion, lean of length and priority, ramp sides."""

from __future__ import annotations

import pytest

from dynamictp.control.route import DomainLoad, Ramp, RequestNeed, RouteState, Side, ramp_side, route


def domain(epoch: int, devices: int, *, running: int = 0, backlog: int = 0, side: Side = "old") -> DomainLoad:
    """Steps take 10 ms on one device and less on more; a prompt token 1 ms ÷ devices."""
    return DomainLoad(
        epoch,
        devices,
        running,
        rows_free=8 - running,
        blocks_free=100,
        step_s=0.010 / devices**0.5 * (1 + 0.02 * running),
        token_s=1e-3 / devices,
        backlog_tokens=backlog,
        side=side,
    )


def request(prompt: int = 100, output: int = 100, *, priority: int = 0, name: str = "r") -> RequestNeed:
    return RequestNeed([1, 1, 1], [prompt] * 3, name, prompt, output, priority)


def epoch(need: RequestNeed, domains: list[DomainLoad], state: RouteState | None = None) -> int | None:
    chosen = route(need, domains, state or RouteState())
    return None if chosen is None else chosen.epoch


WIDE_AND_NARROW = [domain(1, 6), domain(2, 2)]


def test_long_and_important_requests_take_the_widest_domain() -> None:
    assert epoch(request(4000), WIDE_AND_NARROW) == 1
    assert epoch(request(100, priority=5), WIDE_AND_NARROW) == 1


def test_short_and_unimportant_requests_leave_it_free() -> None:
    balanced = [domain(1, 3), domain(2, 2)]
    assert epoch(request(100), balanced) == 2
    assert epoch(request(600, priority=-1), balanced) == 2
    # A request of middling length takes the sooner completion.
    assert epoch(request(600), balanced) == 1


def test_a_lean_gives_way_to_a_much_longer_completion() -> None:
    busy = [domain(1, 3, backlog=20_000), domain(2, 2)]
    assert epoch(request(4000), busy) == 2
    assert epoch(request(100), [domain(1, 3), domain(2, 2, backlog=3000)]) == 1


def test_among_equals_the_queue_decides_then_turns() -> None:
    twins = [domain(1, 1, backlog=500), domain(2, 1)]
    assert epoch(request(), twins) == 2
    idle = [domain(1, 1), domain(2, 1)]
    state = RouteState()
    chosen = []
    for _ in range(4):
        found = route(request(), idle, state)
        assert found is not None
        chosen.append(found.epoch)
        state = state.after(found)
    assert chosen == [1, 2, 1, 2]


def test_cached_tokens_draw_a_request_to_where_they_are() -> None:
    idle = [domain(1, 1), domain(2, 1)]
    assert epoch(RequestNeed([5, 1], [800, 32], "r", 800, 20), idle) == 2


def test_no_room_means_no_domain() -> None:
    assert epoch(RequestNeed([200], [10], "r", 10, 10), [domain(1, 1)]) is None
    assert epoch(RequestNeed([1], [10], "r", 10, 10), [domain(1, 1, running=8)]) is None
    assert epoch(RequestNeed([]), []) is None


def test_the_first_request_of_a_ramp_goes_to_the_new_side_then_a_share_does() -> None:
    sides = [domain(1, 1), domain(2, 2, side="new")]
    state = RouteState(ramp=Ramp(0.1))
    new = 0
    for number in range(1000):
        found = route(request(name=f"req-{number}"), sides, state)
        assert found is not None
        assert number or found.side == "new"
        new += found.side == "new"
        state = state.after(found)
    assert 70 <= new <= 130


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_request_on_the_new_side_stays_there_as_the_share_grows(share: float) -> None:
    ids = [f"r{number}" for number in range(500)]
    early = {name for name in ids if ramp_side(name, share) == "new"}
    later = {name for name in ids if ramp_side(name, min(1.0, 2 * share)) == "new"}
    assert early < later
    assert all(ramp_side(name, 1.0) == "new" for name in ids)


def test_a_side_without_room_does_not_hold_a_request_back() -> None:
    sides = [domain(1, 1), domain(2, 2, running=8, side="new")]
    found = route(request(), sides, RouteState(ramp=Ramp(1.0, begun=True)))
    assert found is not None
    assert found.epoch == 1
    assert RouteState(ramp=Ramp(1.0)).after(found).ramp == Ramp(1.0), "the ramp has not begun"
