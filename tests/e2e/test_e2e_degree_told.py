"""Header, last chunk, log line and metrics tell the same degree, over drains, handovers and ramps (C11)."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from dynamictp.testing.server_process import ServerProcess
from tests.e2e.live import Api, until

pytestmark = pytest.mark.e2e

_LOG = re.compile(r"request_id=(\S+) id=\S+ tp_domain_id=(\S+) tp=(\d+) ")


def degrees(api: Api) -> Counter[int]:
    """Requests finished so far by the degree that the metrics say."""
    below, counts = 0.0, Counter[int]()
    for tp in (1, 2):
        upto = api.metric("dtp_request_tp_degree_bucket", le=f"{tp:.1f}")
        counts[tp] = int(upto - below)
        below = upto
    return counts


def logged(server: ServerProcess) -> dict[str, tuple[str, int]]:
    """Request id → (domain, degree) by the log."""
    found = (_LOG.search(line) for line in list(server.lines))
    return {match[1]: (match[2], int(match[3])) for match in found if match}


def test_everyone_tells_the_same_degree(api: Api, demo_server: ServerProcess) -> None:
    before = degrees(api)
    told: dict[str, dict[str, Any]] = {}
    for drain_s, ramp in ((0.0, False), (30.0, False), (0.0, True)):
        api.set_layout("tp1")
        # Long enough to be there at the commit, however slowly that comes.
        with api.stream("Rain fell on", 160, ignore_eos=True) as (old, old_events):
            next(old_events)
            put = api.put_layout(
                "tp2", wait="commit" if not ramp else "none", drain_deadline_s=drain_s, ramp=ramp
            )
            assert put.status_code in (200, 202), put.text
            if ramp:
                path = f"/admin/switches/{put.json()['switch']['id']}"
                until(lambda: api.http.get(path).json()["switch"]["ramp_share"] > 0, "the ramp begins")  # noqa: B023
            with api.stream("The recipe begins with", 8, ignore_eos=True) as (new, new_events):
                list(new_events)
            list(old_events)
        whole = api.http.post("/v1/completions", json={"prompt": "A", "max_tokens": 3})
        (told[whole.headers["x-request-id"]],) = whole.json()["dynamictp"]["choices"]
        assert whole.headers["x-dynamictp-tp"] == str(told[whole.headers["x-request-id"]]["tp"])
        for stream in (old, new):
            told[stream.headers["x-request-id"]] = stream.served
        # The first token of the old stream was tp1's; the first request after the switch is the new side's.
        assert (old.headers["x-dynamictp-tp"], new.headers["x-dynamictp-tp"]) == ("1", "2")
        assert new.served["tp_min"] == new.served["tp_max"] == 2
        handed_over = drain_s == 0.0 and not ramp
        assert (old.served["tp"], old.served["handovers"]) == ((2, 1) if handed_over else (1, 0))
        if ramp:
            assert api.http.delete(path).status_code == 200
            until(lambda: api.layout()["switch"] is None, "the ramp is taken back")
    until(lambda: told.keys() <= logged(demo_server).keys(), "every request is logged")
    log = logged(demo_server)
    for request_id, served in told.items():
        assert log[request_id] == (served["domain"], served["tp"])
    assert degrees(api) - before == Counter(served["tp"] for served in told.values())
