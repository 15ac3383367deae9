"""Progress of a simulation on the terminal."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from dynamictp.sim.scenario import Scenario


class ProgressBar:
    """Owner of one bar over all runs of a scenario."""

    def __init__(self, scenario: Scenario, console: Console) -> None:
        self._runs = len(scenario.expanded().configurations) * len(scenario.seeds)
        self._shares: dict[tuple[str, int], float] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("simulating", total=self._runs)

    def tell(self, configuration: str, seed: int, share: float) -> None:
        """A run is so far."""
        self._shares[configuration, seed] = share
        text = f"{configuration}, seed {seed}"
        self._progress.update(self._task, completed=sum(self._shares.values()), description=text)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
