"""A planner in a hurry: what takes minutes in service takes seconds, for runs that must see it act."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

CONFIG = """
mode: dynamic
shrink_after_s: 5
min_interval_s: 1
slow_window_s: 4
sideways_after_s: 5
switches_per_hour: 3600
ramp_observe_s: 0.3
ramp_settle_s: 0.3
reserve_ahead_s: 1
bar_s: 1
journal_entries: 100
slo: {ttft_p99_s: 2, ttft_per_token_ms: 2, tpot_p99_ms: 40}
"""
"""The journal is short, so that its ring is full soon."""


@contextmanager
def config_files(**more: str) -> Iterator[Path]:
    """A folder with `planner.yaml` and other files by name, removed afterwards."""
    with TemporaryDirectory() as folder:
        for name, content in {"planner.yaml": CONFIG, **more}.items():
            (Path(folder) / name).write_text(content, encoding="utf-8")
        yield Path(folder)
