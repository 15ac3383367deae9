"""Arrivals, lengths and latencies of the last seconds, as the planner wants them.

Fed by the engine client in the event loop; a request costs three appends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from dynamictp.clock import Clock
from dynamictp.control.config import ControlConfig
from dynamictp.control.values import Arrivals, Digest, Outputs

WINDOW_S = 10.0
SHORT_S = 2.0
MOST = 20_000
"""Entries of a kind that are kept, the latest."""
OUTPUTS = 200
"""Finished requests whose lengths count."""
FEW_TOKENS = 8
"""A running stream's time per token counts from so many tokens on."""


class Traffic:
    """Owner of the samples. `config` is read at every call: it may be replaced while the server runs."""

    def __init__(self, clock: Clock, config: ControlConfig) -> None:
        self.config = config
        self._clock = clock
        self._began_s = clock.now()
        self.last_commit_s: float | None = None
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=MOST)
        self._outputs: deque[int] = deque(maxlen=OUTPUTS)
        self._ttft: deque[tuple[float, float]] = deque(maxlen=MOST)
        self._tpot: deque[tuple[float, float]] = deque(maxlen=MOST)

    # ------------------------------------------------------------ what happens

    def arrived(self, prompt_tokens: int) -> None:
        self._arrivals.append((self._clock.now(), prompt_tokens))

    def first_token(self, prompt_tokens: int, seconds: float) -> None:
        """`seconds` after the arrival."""
        target_s = self.config.slo.of().ttft_target_s(prompt_tokens)
        self._ttft.append((self._clock.now(), seconds / target_s))

    def finished(self, tokens: int, first_token_s: float, last_token_s: float) -> None:
        """A request ended well after `tokens` tokens."""
        self._outputs.append(tokens)
        since = self.last_commit_s
        if tokens > 1 and (since is None or first_token_s >= since):
            mean_s = (last_token_s - first_token_s) / (tokens - 1)
            self._tpot.append((self._clock.now(), mean_s / self.config.slo.of().tpot_target_s))

    def committed(self) -> None:
        """A new layout serves: latencies of before say nothing about it."""
        self.last_commit_s = self._clock.now()
        self._ttft.clear()
        self._tpot.clear()

    # ------------------------------------------------------------ what the planner sees

    def arrivals(self, window_s: float) -> Arrivals:
        """Of the last `window_s` seconds, at most `WINDOW_S`."""
        now = self._clock.now()
        _drop(self._arrivals, now - WINDOW_S)
        prompts = sorted(prompt for at, prompt in self._arrivals if at > now - window_s)
        if not prompts:
            return Arrivals(min(window_s, max(now - self._began_s, 1e-3)))
        return Arrivals(
            min(window_s, max(now - self._began_s, 1e-3)),
            len(prompts),
            sum(prompts) / len(prompts),
            quantile(prompts, 0.9),
        )

    def outputs(self) -> Outputs:
        lengths = sorted(self._outputs)
        if not lengths:
            return Outputs()
        return Outputs(len(lengths), sum(lengths) / len(lengths), quantile(lengths, 0.9))

    def ttft(self) -> Digest:
        _drop(self._ttft, self._clock.now() - self.config.feedback_window_s)
        return _digest(ratio for _, ratio in self._ttft)

    def tpot(self, running: Iterable[tuple[int, float, float]]) -> Digest:
        """`running`: (tokens, first token, last token) of live requests."""
        _drop(self._tpot, self._clock.now() - self.config.feedback_window_s)
        target_s, since = self.config.slo.of().tpot_target_s, self.last_commit_s
        streams = (
            (last_s - first_s) / (tokens - 1) / target_s
            for tokens, first_s, last_s in running
            if tokens >= FEW_TOKENS and (since is None or first_s >= since)
        )
        return _digest([*(ratio for _, ratio in self._tpot), *streams])


def quantile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank of an ascending sequence."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _drop(samples: deque[tuple[float, int]] | deque[tuple[float, float]], before_s: float) -> None:
    while samples and samples[0][0] < before_s:
        samples.popleft()


def _digest(ratios: Iterable[float]) -> Digest:
    ordered = sorted(ratios)
    if not ordered:
        return Digest()
    return Digest(len(ordered), *(quantile(ordered, share) for share in (0.5, 0.9, 0.99)))
