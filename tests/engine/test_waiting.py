"""Whose turn it is: tenants and HTTP requests share, priorities go first, nobody starves."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamictp.clock import ManualClock
from dynamictp.engine.request import Request
from dynamictp.engine.waiting import AGEING_S, WaitingQueue
from dynamictp.messages import SamplingParams, SubmitRequest, pack_tokens

_ages = count()


def request(
    tenant: str = "", *, tokens: int = 10, group: str = "", priority: int = 0, arrival_s: float = 0.0
) -> Request:
    age = next(_ages)
    message = SubmitRequest(
        f"r{age}",
        1,
        pack_tokens(range(tokens)),
        tokens,
        SamplingParams(0, 4),
        arrival_s,
        tenant=tenant,
        group=group,
        priority=priority,
    )
    return Request(message, age, 10_000)


def take(queue: WaitingQueue, number: int = 1) -> list[Request]:
    """The next ones, each taken before the next one is looked for, as admission does."""
    taken = []
    for each in queue:
        queue.take(each)
        taken.append(each)
        if len(taken) == number:
            break
    return taken


def fill(queue: WaitingQueue, requests: list[Request]) -> list[Request]:
    for each in requests:
        queue.add(each)
    return requests


def test_one_tenant_is_first_come_first_served_however_long_the_prompts() -> None:
    queue = WaitingQueue(ManualClock())
    requests = fill(queue, [request(tokens=n, arrival_s=n) for n in (1, 900, 901, 902, 903)])
    requests += fill(queue, [request(tokens=3, arrival_s=950)])
    assert take(queue, 6) == requests
    assert len(queue) == 0


def test_a_list_of_a_thousand_long_prompts_does_not_hold_up_others() -> None:
    """Neither other tenants nor, without keys, other requests of the same one."""
    for tenant in ("", "other"):
        queue = WaitingQueue(ManualClock())
        fill(queue, [request(tokens=4000, group="list") for _ in range(1000)])
        take(queue, 3)
        (mine,) = fill(queue, [request(tenant, tokens=100, arrival_s=1.0)])
        assert mine in take(queue, 2)
        others = fill(queue, [request(tenant, tokens=100, arrival_s=2.0) for _ in range(20)])
        taken = take(queue, 24)
        assert set(others) <= set(taken)
        assert any(each.group == "list" for each in take(queue, 1000))


def test_a_list_gets_its_share_while_others_keep_coming() -> None:
    queue = WaitingQueue(ManualClock())
    fill(queue, [request(tokens=100, group="list") for _ in range(200)])
    served: Counter[bool] = Counter()
    for turn in range(300):
        fill(queue, [request(tokens=100, arrival_s=turn)])
        (taken,) = take(queue)
        served[taken.group == "list"] += 1
    # The share of one among those that wait, who become more.
    assert 15 <= served[True] <= 60


@given(seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_busy_tenants_are_served_alike_in_tokens(seed: int) -> None:
    rng = random.Random(seed)
    queue = WaitingQueue(ManualClock())
    sizes = {"small": (10, 40), "mixed": (10, 1000), "large": (800, 1000)}
    served: Counter[str] = Counter()
    for tenant, (low, high) in sizes.items():
        fill(queue, [request(tenant, tokens=rng.randint(low, high)) for _ in range(3000 // (low // 10))])
    for _ in range(400):
        (each,) = take(queue)
        served[each.tenant] += len(each.tokens)
        # Outputs count as well.
        for _ in range(20):
            queue.charge(each.tenant)
            served[each.tenant] += 2
    assert max(served.values()) - min(served.values()) <= 2 * (1000 + 40)


def test_who_comes_back_after_a_pause_has_no_credit() -> None:
    queue = WaitingQueue(ManualClock())
    fill(queue, [request("busy", tokens=100) for _ in range(100)])
    take(queue, 50)
    fill(queue, [request("back", tokens=100, arrival_s=1.0) for _ in range(100)])
    tenants = Counter(each.tenant for each in take(queue, 40))
    assert abs(tenants["busy"] - tenants["back"]) <= 1


def test_higher_priorities_go_first_and_lower_ones_do_not_starve() -> None:
    clock = ManualClock(100.0)
    queue = WaitingQueue(clock)
    (low,) = fill(queue, [request(priority=-100, arrival_s=100.0)])
    for _ in range(60):
        fill(queue, [request("vip", priority=5, arrival_s=clock.now()) for _ in range(2)])
        (taken,) = take(queue)
        if taken is low:
            break
        clock.advance(0.1)
    assert taken is low
    assert AGEING_S <= clock.now() - low.arrival_s <= AGEING_S + 0.5


def test_one_that_is_passed_over_stays_and_the_others_come() -> None:
    queue = WaitingQueue(ManualClock())
    first, second, third = fill(queue, [request(arrival_s=n) for n in range(3)])
    seen = []
    for each in queue:
        seen.append(each)
        if each is not first:
            queue.take(each)
    assert seen == [first, second, third]
    assert list(queue) == [first]
    queue.remove(first)
    with pytest.raises(KeyError):
        queue.take(first)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_comes_and_goes_every_request_is_there_once(data: st.DataObject) -> None:
    clock = ManualClock()
    queue = WaitingQueue(clock)
    waiting: set[Request] = set()
    for _ in range(data.draw(st.integers(1, 60))):
        match data.draw(st.sampled_from(("add", "add", "resume", "take", "cancel", "time"))):
            case "add":
                waiting.update(
                    fill(
                        queue,
                        [
                            request(
                                data.draw(st.sampled_from("ab")),
                                tokens=data.draw(st.integers(1, 50)),
                                group=data.draw(st.sampled_from(("", "g"))),
                                priority=data.draw(st.integers(-1, 1)),
                                arrival_s=clock.now(),
                            )
                        ],
                    )
                )
            case "take":
                waiting.difference_update(take(queue, 2))
            case "resume":
                for each in take(queue):
                    each.resumed = True
                    queue.add(each)
                    assert next(iter(queue)).resumed
            case "cancel" if waiting:
                gone = sorted(waiting, key=lambda each: each.age)[0]
                queue.remove(gone)
                waiting.remove(gone)
            case _:
                clock.advance(2.0)
        assert len(queue) == len(waiting)
        listed = list(queue)
        assert len(listed) == len(waiting)
        assert set(listed) == waiting
