"""What accumulates between two looks of the planner."""

from __future__ import annotations

from dynamictp.control.config import ControlConfig
from dynamictp.control.windows import TrafficWindows
from dynamictp.messages import Snapshot
from dynamictp.server.pool_view import PoolView


def test_looks_without_prompts_are_no_cache_misses() -> None:
    """At a request in two seconds most looks see none; and a new engine counts from 0."""
    view = PoolView(("tp1",), 1, "dynamic", TrafficWindows(0.0, ControlConfig()))
    shares = []
    for time_s, (hits, queries) in enumerate(((0, 0), (80, 100), (80, 100), (110, 200), (0, 0), (10, 20))):
        snapshot = Snapshot(
            float(time_s), "tp1", 0, 0, 0, (), (), 1, 0, 1, prefix_hits=hits, prefix_queries=queries
        )
        seen = view.look(snapshot, (), now=float(time_s), available=1, pinned=False, switch=None, barred=())
        shares.append(seen.prefix_hit_share)
    assert shares == [0.0, 0.8, 0.8, 0.3, 0.3, 0.5]
