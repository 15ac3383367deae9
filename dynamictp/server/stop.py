"""Stop strings over token boundaries (Aho-Corasick).

The stop string that *completes* first in the text wins; of those that complete at the same character, the
longest. That rule does not depend on how the text is cut into tokens. What could still become a stop string
(the longest suffix of the text that begins one) is held back, so no part of one ever leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopSet:
    """Compiled stop strings of one request, shared by its choices. Immutable after construction."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are not empty strings."""
        self._next: list[dict[str, int]] = [{}]
        self._fail: list[int] = [0]
        self.depth: list[int] = [0]
        """Characters from the root: how much of the text's end the state remembers."""
        self.match: list[int] = [0]
        """Length of the longest stop string that ends in the state, 0 for none."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(0)
            state = self._next[state][char]
        self.match[state] = len(stop)

    def _link(self) -> None:
        """Failure links, breadth first: to the longest proper suffix that is a state too."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                queue.append(child)
                self._fail[child] = self.step(self._fail[state], char)
                self.match[child] = self.match[child] or self.match[self._fail[child]]


class StopScanner:
    """The text of one choice on its way through a `StopSet`."""

    def __init__(self, stops: StopSet, *, include: bool = False) -> None:
        """With `include` the stop string itself stays in the output."""
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Add text; returns what may leave now. After a match everything further is swallowed."""
        if self.matched:
            return ""
        if not self._stops:
            return text
        state = self._state
        for index, char in enumerate(text):
            state = self._stops.step(state, char)
            length = self._stops.match[state]
            if length:
                self.matched = True
                whole = self._held + text[: index + 1]
                self._held = ""
                return whole if self._include else whole[: len(whole) - length]
        self._state = state
        whole = self._held + text
        keep = len(whole) - self._stops.depth[state]
        self._held = whole[keep:]
        return whole[:keep]

    def flush(self) -> str:
        """The text has ended: what was held back was no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
