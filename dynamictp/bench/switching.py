"""A schedule and a series of layout changes played side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from dynamictp.bench.admin import Switch
from dynamictp.bench.client import Sender
from dynamictp.bench.player import run_schedule
from dynamictp.bench.result import Result
from dynamictp.bench.schedule import Request
from dynamictp.clock import Clock


class LayoutSetter(Protocol):
    """Changes a server's layout and returns when the old domains are closed (`Admin` does)."""

    async def set_layout(self, layout: str) -> Switch: ...


async def play_switches(
    sender: Sender,
    admin: LayoutSetter,
    schedule: Sequence[Request],
    changes: Sequence[tuple[float, str]],
    clock: Clock,
    *,
    on_start: Callable[[str], None] | None = None,
    on_switch: Callable[[Switch], None] | None = None,
) -> tuple[list[Result], list[Switch]]:
    """Plays `schedule` while each of `changes` (seconds after the start, layout) takes place in turn.

    A change that is due while the one before is still under way waits for it. Raises FatalError
    when a change is refused or the server is gone; the load is cancelled then.
    """
    origin_s = clock.now()
    switches: list[Switch] = []

    async def change_layouts() -> None:
        for at_s, layout in changes:
            await asyncio.sleep(max(origin_s + at_s - clock.now(), 0.0))
            if on_start is not None:
                on_start(layout)
            switches.append(await admin.set_layout(layout))
            if on_switch is not None:
                on_switch(switches[-1])

    load = asyncio.create_task(run_schedule(schedule, sender, clock, origin_s=origin_s))
    layout_changes = asyncio.create_task(change_layouts())
    try:
        # The first exception ends both: without the server there is nothing left to measure.
        results, _ = await asyncio.gather(load, layout_changes)
    finally:
        load.cancel()
        layout_changes.cancel()
        await asyncio.gather(load, layout_changes, return_exceptions=True)
    return results, switches
