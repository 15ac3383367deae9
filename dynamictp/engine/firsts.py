"""When a switch takes effect for those who wait: the first request that its new domains admit."""

from __future__ import annotations

from dynamictp.engine.domain import Domain
from dynamictp.engine.switch import Switch
from dynamictp.messages import FirstAdmission


class FirstAdmissions:
    """Owner of the new domains whose switch has seen none of them admit a request from the queue yet.

    Handovers and shadow probes are no admissions. A switch that opens and revives nothing has none.
    """

    def __init__(self) -> None:
        self._awaited: dict[Domain, Switch] = {}

    def serve(self, switch: Switch) -> None:
        """The switch's new domains take requests from now on."""
        # What an earlier switch brought and a later one took away can't admit any more.
        self._awaited = {d: s for d, s in self._awaited.items() if d.state == "serving"}
        if switch.id:
            self._awaited |= dict.fromkeys((*switch.opening, *switch.reviving), switch)

    def admitted(self, domain: Domain, now: float) -> FirstAdmission | None:
        """A domain admitted a request: the news, if it is the first one of a switch."""
        switch = self._awaited.get(domain)
        if switch is None:
            return None
        self._awaited = {d: s for d, s in self._awaited.items() if s is not switch}
        return FirstAdmission(switch.id, (now - switch.began_s) * 1e3)
