"""Calibration from a running server: step times through HTTP, as corrections of the cost model.

Every operation is measured alone: decode steps as the median gap of streams of known number and length,
prompts as the time to the first token of an otherwise idle server. The ratio to the uncalibrated model goes
into the file.

What a request takes outside of steps is the time to the first token of a prompt of one token, less the step
that computes it (which is that of one decoding row), and beside running streams less the steps it waits for:
the rest of the one that runs and those planned. It goes into the file in seconds, with its quartiles, and
with it what a short prompt adds to the steps of running streams beyond what the model says of its tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise

import msgspec
import numpy as np

from dynamictp.advisor.machine import Machine
from dynamictp.advisor.placement import place_replicas
from dynamictp.bench.admin import Admin, base_url
from dynamictp.bench.client import Client, run_lowered
from dynamictp.bench.player import run_schedule
from dynamictp.bench.prompts import LONG_TEXT, exact_prompts
from dynamictp.bench.result import Result
from dynamictp.bench.schedule import Request, together
from dynamictp.clock import SystemClock
from dynamictp.cost.calibration import Calibration, CalibrationPoint, CrowdedPoint, RequestPoint
from dynamictp.cost.figures import Corner
from dynamictp.cost.hardware import Assumptions, EngineLimits
from dynamictp.cost.queueing import bisect
from dynamictp.cost.shape import ModelShape
from dynamictp.cost.steps import Domain, StepModel
from dynamictp.errors import FatalError

STREAMS = (1, 4, 16)
PROMPTS = (24, 96, 384)
SHORT_CONTEXT, LONG_CONTEXT = 32, 768
LONG_STREAMS = 4
LONG_PROMPT = 1400
_OUTPUT = 40
_LONG_OUTPUT = 160
"""Enough that the first stream still runs when the last prompt is done."""
_ROUNDS = 2
_PROBES = 24
"""Prompts of one token beside running streams."""
_PROBE_EVERY = 7.3
"""Steps between two of them: no whole number, so that they come at any moment of a step."""
_STREAM_OUTPUT = round(_PROBE_EVERY * (_PROBES + 2))
"""Tokens of the streams beside which they come."""
_SHORT_EVERY = 3.3
"""Steps between two short prompts: often enough that their effect on the steps can be measured."""
_MOST_SLOWDOWN = 4.0
_WHOLE = {"ignore_eos": True}


class Calibrator:
    """One running server of `shape` on `machine`. Owns the prompts' random generator.

    Raises `FatalError` when the server refuses a layout or a request fails.
    """

    def __init__(
        self,
        url: str,
        shape: ModelShape,
        machine: Machine,
        *,
        limits: EngineLimits,
        assumptions: Assumptions,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._url, self._shape, self._machine = base_url(url), shape, machine
        self._limits, self._assumptions = limits, assumptions
        self._say = say
        self._clock = SystemClock()
        self._rng = np.random.default_rng(0)
        self._model, self._ids = run_lowered(self._describe)

    async def _describe(self) -> tuple[str, tuple[int, ...]]:
        async with Admin(self._url) as admin:
            return await admin.served_model(), await admin.tokenize(LONG_TEXT)

    def calibrate(self, degrees: Sequence[int]) -> Calibration:
        """Measure each degree with one domain of it, and requests beside as many domains as fit, too.
        Takes about a minute a degree on two cores.
        """
        points: list[CalibrationPoint] = []
        requests: list[RequestPoint] = []
        crowded: list[CrowdedPoint] = []
        for tp in degrees:
            self._say(f"tp{tp}")
            self._set_layout(f"tp{tp}")
            steps, idle = self._degree(tp)
            points += steps
            alone = self._domain(tp, self._calibration(points), tp)
            requests += [idle, self._beside(alone, 1, self._streams_s(1))]
            if (most := self._machine.devices // tp) > 1:
                self._set_layout("+".join([f"tp{tp}"] * most))
                step_s = self._streams_s(most)
                if self._machine.device.shared_bandwidth is not None:
                    crowded += self._crowded(self._domain(tp, self._calibration(points), tp * most), step_s)
                beside_others = self._domain(tp, self._calibration(points, crowded), tp * most)
                requests.append(self._beside(beside_others, most, step_s))
        return msgspec.structs.replace(self._calibration(points, crowded), requests=merged(requests))

    def _calibration(
        self, points: Sequence[CalibrationPoint], crowded: Sequence[CrowdedPoint] = ()
    ) -> Calibration:
        device = self._machine.device
        return Calibration(
            model=self._shape.name,
            device=device.name,
            source=f"measured through HTTP on {datetime.now(UTC):%Y-%m-%d}",
            points=tuple(points),
            bandwidth=device.bandwidth.value,
            shared_bandwidth=0.0 if device.shared_bandwidth is None else device.shared_bandwidth.value,
            flops=device.bf16_flops.value,
            crowded=tuple(crowded),
        )

    def _domain(self, tp: int, calibration: Calibration | None = None, active_devices: int = 1) -> Domain:
        return Domain(
            self._shape,
            self._machine.device,
            tp,
            link=place_replicas(self._machine, tp, 1)[0].link,
            assumptions=self._assumptions,
            calibration=calibration,
            active_devices=active_devices,
        )

    def _crowded(self, domain: Domain, step_s: float) -> list[CrowdedPoint]:
        """What the other domains do to memory; nothing, said, where memory does not explain the step."""
        slowdown = memory_slowdown(domain, step_s)
        if slowdown is None:
            self._say(
                f"tp{domain.tp} beside others took {step_s * 1e3:.1f} ms a step, which memory up to "
                f"{_MOST_SLOWDOWN:g} times slower does not explain: left out"
            )
            return []
        return [CrowdedPoint(domain.tp, domain.active_devices, slowdown)]

    def _streams_s(self, domains: int) -> float:
        """A step of every domain with `LONG_STREAMS` short streams each."""
        return self._decode_s(LONG_STREAMS * domains, SHORT_CONTEXT)

    def _degree(self, tp: int) -> tuple[list[CalibrationPoint], RequestPoint]:
        """Steps of one domain, and a request on an idle server."""
        steps = StepModel(self._domain(tp), Corner.EXPECTED)
        self._first_tokens_s(PROMPTS[0], 1)  # first use of the communicator
        # Attention first: what it takes at the short context is part of the other measurements.
        short = self._decode_s(LONG_STREAMS, SHORT_CONTEXT)
        long = self._decode_s(LONG_STREAMS, LONG_CONTEXT, _LONG_OUTPUT)
        # The later half of either output is on average three quarters in.
        longer = LONG_CONTEXT + 0.75 * _LONG_OUTPUT - SHORT_CONTEXT - 0.5 * _OUTPUT
        expected = steps.decode_attention_s(LONG_STREAMS, longer)
        attention = max((long - short) / expected, 0.05)
        points = [CalibrationPoint("attention", tp, LONG_STREAMS, attention)]
        for streams in STREAMS:
            context = SHORT_CONTEXT + _OUTPUT / 2
            base = self._decode_s(streams, SHORT_CONTEXT)
            base -= attention * steps.decode_attention_s(streams, context)
            points.append(_base(tp, streams, base, steps.base(streams, streams).total_s))
        idle = outside_steps(0, self._first_tokens_s(1, _PROBES), self._decode_s(1, 1), 1.0)
        points += self._prompt_points(tp, steps, idle.seconds)
        return points, idle

    def _prompt_points(self, tp: int, steps: StepModel, outside_s: float) -> list[CalibrationPoint]:
        """`outside_s` is what a request takes beside the steps of its prompt."""

        def prompt_s(tokens: int) -> float:
            return statistics.median(self._first_tokens_s(tokens, _ROUNDS + 1)) - outside_s

        times = {tokens: prompt_s(tokens) for tokens in PROMPTS}
        chunk = self._limits.max_batched_tokens
        per_chunk = times[PROMPTS[-1]] / PROMPTS[-1]
        rest = prompt_s(LONG_PROMPT) - per_chunk * LONG_PROMPT
        expected = steps.prompt_attention_s(LONG_PROMPT) - LONG_PROMPT / PROMPTS[
            -1
        ] * steps.prompt_attention_s(PROMPTS[-1])
        attention = max(rest / expected, 0.05)
        points = [CalibrationPoint("prompt_attention", tp, LONG_PROMPT, attention)]
        for tokens, seconds in times.items():
            base = seconds - attention * steps.prompt_attention_s(tokens)
            points.append(_base(tp, tokens, base, steps.base(min(tokens, chunk), 1.0).total_s))
        return points

    def _decode_s(self, streams: int, context: int, output: int = _OUTPUT) -> float:
        """Median time of a step that decodes so many rows, of the later half of their tokens."""
        gaps: list[float] = []
        for _ in range(_ROUNDS):
            prompts = exact_prompts(self._ids, context, streams, self._rng)
            results = self._play(together(prompts, output, _WHOLE))
            last_start = max(result.chunk_s[0] for result in results)
            first_end = min(result.chunk_s[-1] for result in results)
            gaps += [
                gap
                for result in results
                for gap, at in zip(_gaps(result), result.chunk_s[1:], strict=True)
                if last_start < at <= first_end
            ]
        if not gaps:
            raise FatalError(
                f"{streams} streams were never decoding together; the server is too busy to calibrate"
            )
        return statistics.median(gaps)

    def _first_tokens_s(self, tokens: int, times: int) -> list[float]:
        """Times to the first token of an idle server."""
        found = []
        for _ in range(times):
            prompt = exact_prompts(self._ids, tokens, 1, self._rng)[0]
            (result,) = self._play([Request(0.0, prompt, 1, extra=_WHOLE)])
            found.append(result.chunk_s[0] - result.sent_s)
        return found

    def _beside(self, domain: Domain, domains: int, step_s: float) -> RequestPoint:
        """A request beside running streams on each of `domains` such domains, whose steps take `step_s`."""
        decode_s, first_tokens = self._probed(domains, step_s, _PROBE_EVERY, 1)
        # The rest of the step that runs, those planned, and its own.
        steps = 0.5 + self._limits.steps_ahead + 1
        found = outside_steps(domain.tp * domains, first_tokens, decode_s / (_STREAM_OUTPUT - 1), steps)
        return msgspec.structs.replace(found, added_s=self._added_s(domain, domains, step_s))

    def _added_s(self, domain: Domain, domains: int, step_s: float) -> float:
        """What a short prompt adds to the steps beside it, beyond what the model says of its tokens."""
        added = []
        for _ in range(_ROUNDS + 1):  # in turns: a shared machine changes its speed
            without, _ = self._probed(domains, step_s, math.inf, PROMPTS[0])
            beside, first_tokens = self._probed(domains, step_s, _SHORT_EVERY, PROMPTS[0])
            added.append((beside - without) * domains / len(first_tokens))
        return max(statistics.median(added) - short_prompt_s(domain), 0.0)

    def _probed(self, domains: int, step_s: float, every: float, tokens: int) -> tuple[float, list[float]]:
        """Plays streams on each domain, and beside them a prompt of `tokens` tokens every `every` steps (none
        for inf). Returns the mean seconds from a stream's first token to its last, and the seconds that each
        prompt took to its first token.
        """
        prompts = exact_prompts(self._ids, SHORT_CONTEXT, LONG_STREAMS * domains, self._rng)
        count = max(int(_STREAM_OUTPUT / every) - 2, 0)
        asked = exact_prompts(self._ids, tokens, count, self._rng) if count else []
        probes = [
            Request(step_s * every * (i + 1), prompt, 1, extra=_WHOLE) for i, prompt in enumerate(asked)
        ]
        results = self._play([*together(prompts, _STREAM_OUTPUT, _WHOLE), *probes])
        running = [result for result in results if result.request.max_tokens > 1]
        end = min(result.chunk_s[-1] for result in running)
        first_tokens = [
            result.chunk_s[0] - result.sent_s
            for result in results
            if result.request.max_tokens == 1 and result.chunk_s[0] < end
        ]
        if len(first_tokens) < count // 2:
            raise FatalError(
                "streams ended before the requests beside them; the server is too busy to calibrate"
            )
        return statistics.fmean(r.chunk_s[-1] - r.chunk_s[0] for r in running), first_tokens

    def _play(self, schedule: Sequence[Request]) -> list[Result]:
        client = Client(self._url, self._model, timeout_s=120.0, return_token_ids=True)
        results = run_lowered(lambda: run_schedule(schedule, client, self._clock), every_s=0.05)
        for result in results:
            if result.failure is not None:
                raise FatalError(f"a request of the calibration failed: {result.failure.message}")
        return results

    def _set_layout(self, layout: str) -> None:
        async def change() -> None:
            async with Admin(self._url) as admin:
                await admin.set_layout(layout)

        run_lowered(change, every_s=0.05)


def _gaps(result: Result) -> list[float]:
    return [later - earlier for earlier, later in pairwise(result.chunk_s)]


def _base(tp: int, size: int, measured: float, expected: float) -> CalibrationPoint:
    return CalibrationPoint("base", tp, size, max(measured / expected, 0.02))


def outside_steps(
    busy_devices: int, first_tokens: Sequence[float], step_s: float, steps: float
) -> RequestPoint:
    """What requests took beside `steps` steps of `step_s` seconds, from their times to the first token.

    The middle four fifths are averaged: a stall of the machine is not the host's usual time. Where a request
    waits for steps, the moment at which it meets one spreads the times uniformly over a step, and so their
    quartiles by half of one: that is not the host's either, and is taken out as an independent spread.
    """
    ordered = sorted(first_tokens)
    cut = len(ordered) // 10
    middle = max(statistics.fmean(ordered[cut : len(ordered) - cut]) - steps * step_s, 0.0)
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    moment = step_s / 2 if steps > 1 else 0.0
    spread = math.sqrt(max((high - low) ** 2 - moment**2, 0.0)) / 2
    return RequestPoint(busy_devices, middle, max(middle - spread, 0.0), middle + spread)


def short_prompt_s(domain: Domain) -> float:
    """What the model says that the tokens of a short prompt add to a step of `LONG_STREAMS` streams."""
    steps, rows, tokens = StepModel(domain), LONG_STREAMS, PROMPTS[0]
    shared = steps.base(rows + tokens, rows + 1).total_s - steps.base(rows, rows).total_s
    return shared + steps.prompt_attention_s(tokens)


def memory_slowdown(domain: Domain, step_s: float) -> float | None:
    """How many times slower memory must be for `LONG_STREAMS` short streams on that calibrated domain, beside
    others, to take `step_s` a step. None beyond 4 either way: something else was measured.
    """
    calibration = domain.calibration
    assert calibration is not None

    def too_fast(slowdown: float) -> bool:
        point = CrowdedPoint(domain.tp, domain.active_devices, slowdown)
        tried = msgspec.structs.replace(
            domain, calibration=msgspec.structs.replace(calibration, crowded=(point,))
        )
        step = StepModel(tried).decode(LONG_STREAMS, SHORT_CONTEXT + _OUTPUT / 2)
        return step.total_s < step_s

    if not too_fast(1 / _MOST_SLOWDOWN) or too_fast(_MOST_SLOWDOWN):
        return None
    return bisect(too_fast, 1 / _MOST_SLOWDOWN, _MOST_SLOWDOWN)


def merged(points: Sequence[RequestPoint]) -> tuple[RequestPoint, ...]:
    """One point for each number of busy devices: the mean of what was found, within all ranges."""
    out = []
    for busy in sorted({point.busy_devices for point in points}):
        same = [point for point in points if point.busy_devices == busy]
        out.append(
            RequestPoint(
                busy,
                statistics.fmean(point.seconds for point in same),
                min(point.low_s for point in same),
                max(point.high_s for point in same),
                statistics.fmean(point.added_s for point in same),
            )
        )
    return tuple(out)
