"""Plays a study of switches on one running server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from dynamictp.bench.admin import Admin, Switch
from dynamictp.bench.client import Client, run_lowered
from dynamictp.bench.machine import MemoryState
from dynamictp.bench.player import quiet_collector, run_closed, run_schedule
from dynamictp.bench.prompts import LONG_TEXT
from dynamictp.bench.record import relative
from dynamictp.bench.result import Result
from dynamictp.bench.schedule import Request
from dynamictp.bench.switches.outcome import RoundSeen
from dynamictp.bench.switches.study import Study, Tour, endless, schedule_of
from dynamictp.bench.switching import play_switches
from dynamictp.clock import SystemClock
from dynamictp.errors import FatalError

USERS = 16
"""Streams at once while the rate that `tp1` can finish is measured."""
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Played:
    """A play on the schedule's time."""

    results: tuple[Result, ...]
    switches: tuple[Switch, ...] = ()


class Player:
    """One server under measurement. Each method plays on a thread of lower priority and returns when the
    server is idle again. Raises FatalError when the server refuses a layout, fails a switch or is gone.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._clock = SystemClock()
        self._model, self._ids = run_lowered(self._describe)

    async def _describe(self) -> tuple[str, tuple[int, ...]]:
        async with Admin(self._url) as admin:
            return await admin.served_model(), await admin.tokenize(LONG_TEXT)

    def saturated_per_s(self, requests: int) -> float:
        """Requests per second that `tp1` finishes of the study's mix while `USERS` never pause."""

        async def main() -> list[Result]:
            async with Admin(self._url) as admin:
                await admin.set_layout("tp1")
            schedule = endless(requests, self._ids)
            return await run_closed(schedule, self._client(), self._clock, users=USERS, think_s=0.0)

        return finished_per_s(run_lowered(main))

    def round(
        self,
        study: Study,
        tour: Tour,
        probe: Callable[[], MemoryState],
        note: Callable[[str], None] = lambda text: None,
    ) -> RoundSeen:
        """The round with its switches, and its schedule without on each control, in an order that differs
        from round to round.
        """
        schedule = schedule_of(study, tour, self._ids)
        before = probe()
        switching = Played(())
        controls: dict[str, tuple[Result, ...]] = {}
        for layout in _rotated(("", *study.controls), tour.number):
            note(f"round {tour.number + 1} of {len(study.tours)}, {layout or 'with switches'}")
            if layout:
                controls[layout] = self._play(schedule, layout, (), ()).results
            else:
                times = [study.every_s * (i + 1) for i in range(len(tour.layouts))]
                switching = self._play(schedule, tour.start, times, tour.layouts)
        return RoundSeen(tour, switching.switches, switching.results, controls, before, probe())

    def _play(
        self, schedule: Sequence[Request], start: str, times_s: Sequence[float], layouts: Sequence[str]
    ) -> Played:
        async def main() -> tuple[list[Result], list[Switch]]:
            async with Admin(self._url, clock=self._clock) as admin:
                await admin.set_layout(start)
                with quiet_collector():
                    if not layouts:
                        return await run_schedule(schedule, self._client(), self._clock), []
                    changes = list(zip(times_s, layouts, strict=True))
                    results, switches = await play_switches(
                        self._client(), admin, schedule, changes, self._clock
                    )
                # What took effect after its switch was closed is known by now.
                told = [
                    replace(switch, first_admitted_ms=await admin.first_admitted_ms(switch.id))
                    for switch in switches
                ]
                return results, told

        return on_schedule_time(*run_lowered(main))

    def _client(self) -> Client:
        return Client(self._url, self._model, timeout_s=_TIMEOUT_S, return_token_ids=True)


def on_schedule_time(results: Sequence[Result], switches: Sequence[Switch]) -> Played:
    """The clock's times as seconds after the schedule's origin. Raises FatalError when nothing was sent."""
    if not results:
        raise FatalError("the round's schedule brought no request; play a higher rate or longer rounds")
    origin_s = results[0].intended_s - results[0].request.intended_s
    moved = [
        replace(switch, started_s=switch.started_s - origin_s, ended_s=switch.ended_s - origin_s)
        for switch in switches
    ]
    return Played(relative(results, origin_s), tuple(moved))


def finished_per_s(results: Sequence[Result]) -> float:
    """Of a closed loop: requests that ended until the last one was sent, while every user was busy.

    Raises FatalError when a request failed or none ended by then.
    """
    for result in results:
        if result.failure is not None:
            raise FatalError(f"a request failed on tp1 under full load: {result.failure}")
    first_s, last_s = min(r.sent_s for r in results), max(r.sent_s for r in results)
    ended = sum(result.end_s <= last_s for result in results)
    if not ended:
        raise FatalError(f"no request ended before the last of {len(results)} was sent; play more")
    return ended / (last_s - first_s)


def _rotated(items: Sequence[str], by: int) -> Iterator[str]:
    for i, _ in zip(count(by), items, strict=False):
        yield items[i % len(items)]
