"""What the server does when its engine is lost: hold the requests, and hand them to the next one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynamictp.clock import Clock
from dynamictp.messages import Body
from dynamictp.server.engine_client import EngineClient
from dynamictp.transport import ZmqLink

log = logging.getLogger(__name__)

SILENCE = 2.0
"""The engine speaks every 0.25 s. It hangs when it is silent for so many times `hang_s`."""
START_S = 30.0
"""Longest silence of an engine that starts."""
CHECK_S = 0.25
OVERSLEPT_S = 1.0
"""A check so late means that this process did not run, so the engine may not have either."""


class Recovery:
    """The supervisor's `EngineUser`: joins it to the engine client."""

    def __init__(
        self,
        client: EngineClient,
        on_lost: Callable[[], None],
        clock: Clock,
        *,
        hang_s: float,
        core_wait_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`on_lost` is called when the engine is lost, after the client has let go of it. `core_wait_s`: how
        long the engine's process has waited for a core so far; that is not its fault, and does not count.
        """
        self._client = client
        self._on_lost = on_lost
        self._clock = clock
        self._silence_s = SILENCE * hang_s
        self._core_wait_s = core_wait_s
        self._mark = (0.0, 0.0)
        """When the engine was heard last, and how long it had waited for a core soon after."""
        self._started_s = clock.now()
        self._away = False

    @property
    def layout(self) -> str:
        return self._client.layout

    def send(self, body: Body) -> bool:
        return self._client.send(body)

    def engine_lost(self, reason: str) -> None:
        """Live requests are kept; what comes in meanwhile waits with them."""
        self._away = True
        self._client.detach()
        self._on_lost()
        log.warning("%s; %d requests wait for the next", reason, self._client.live)

    def engine_started(self, link: ZmqLink) -> None:
        self._away = False
        self._client.attach(link)
        self._started_s = self._client.heard_s
        self._client.resubmit_all()

    async def watch(self, kill: Callable[[str], None]) -> None:
        """Call `kill` with a reason whenever the engine hangs or the link to it broke, and watch deadlines
        while none serves. Never returns."""
        self._client.on_link_lost = kill
        checked_s = self._clock.now()
        while True:
            await asyncio.sleep(CHECK_S)
            if not self._client.is_ready:
                self._client.expire()
            now = self._clock.now()
            late, checked_s = now - checked_s > OVERSLEPT_S, now
            if late:
                self._client.heard_s = now
            limit_s = START_S if self._client.heard_s == self._started_s else self._silence_s
            silent_s = self._silent_s(now)
            if not self._away and silent_s > limit_s:
                kill(f"silent for {silent_s:.1f} s")
                self._client.heard_s = now

    def _silent_s(self, now: float) -> float:
        heard_s, waited_s = self._client.heard_s, self._core_wait_s()
        if self._mark[0] != heard_s:
            self._mark = (heard_s, waited_s)
        return now - heard_s - max(0.0, waited_s - self._mark[1])
