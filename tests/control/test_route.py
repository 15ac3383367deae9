"""Routing: predicted completion, lean of length and priority, ramp sides."""

from __future__ import annotations

import pytest

from dynamictp.control.route import DomainLoad, RampSides, RequestNeed, RouteState, ramp_side, route


def domain(epoch: int, devices: int, *, running: int = 0, backlog: int = 0) -> DomainLoad:
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
        state = state.after()
    assert chosen == [1, 2, 1, 2]


def test_cached_tokens_draw_a_request_to_where_they_are() -> None:
    idle = [domain(1, 1), domain(2, 1)]
    assert epoch(RequestNeed([5, 1], [800, 32], "r", 800, 20), idle) == 2


def test_no_room_means_no_domain() -> None:
    assert epoch(RequestNeed([200], [10], "r", 10, 10), [domain(1, 1)]) is None
    assert epoch(RequestNeed([1], [10], "r", 10, 10), [domain(1, 1, running=8)]) is None
    assert epoch(RequestNeed([]), []) is None


def groups(sides: RampSides[str], name: str = "r", holding: str = "old new kept") -> list[list[str]]:
    return sides.groups(name, ["old", "new", "kept"], lambda domain: domain in holding)


def ramp(share: float, **values: bool) -> RampSides[str]:
    return RampSides(share, {"new"}, {"old"}, **values)


def test_the_first_request_of_a_ramp_goes_to_the_new_side_then_a_share_does() -> None:
    assert all(groups(ramp(0.1, first_due=True), f"req-{n}")[0] == ["new"] for n in range(100))
    first = [groups(ramp(0.1), f"req-{n}")[0] for n in range(1000)]
    assert 70 <= first.count(["new"]) <= 130
    assert all(side in (["new"], ["old", "kept"]) for side in first)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_request_on_the_new_side_stays_there_as_the_share_grows(share: float) -> None:
    ids = [f"r{number}" for number in range(500)]
    early = {name for name in ids if ramp_side(name, share) == "new"}
    later = {name for name in ids if ramp_side(name, min(1.0, 2 * share)) == "new"}
    assert early < later
    assert all(ramp_side(name, 1.0) == "new" for name in ids)


def test_a_side_without_room_leaves_the_request_to_the_other_one() -> None:
    assert groups(ramp(0.1, first_due=True)) == [["new"], ["old", "kept"]]
    assert groups(ramp(0.1, probing=True), "req-1") == [["old", "kept"]], "the new side gets nothing yet"


def test_at_the_whole_share_those_that_retire_take_only_what_no_other_can_hold() -> None:
    assert groups(ramp(1.0)) == [["new", "kept"]]
    assert groups(ramp(1.0), holding="old") == [["new", "kept"], ["old"]]
