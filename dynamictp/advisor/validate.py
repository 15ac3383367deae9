"""`scripts/check-advisor`: predictions against a real server of this machine.

Starts a server of the demo model, calibrates the cost model on it, then plays the four classes with a fixed
number of users on tp1, tp2 and 2*tp1, and compares throughput, time per token and time to first token.
Exit code 0 when all are within the criteria: 25 % for the first two, the band for the third. The band is the
model's, and the sampling error of a mean over as many waits as there were requests (90 %).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from dynamictp.advisor import local
from dynamictp.advisor.calibrate import Calibrator
from dynamictp.advisor.catalogue import open_shape
from dynamictp.advisor.search import Evaluation, Question
from dynamictp.advisor.workloads import FOUR_CLASSES, find_workload
from dynamictp.bench.client import run_lowered
from dynamictp.bench.live import Counters
from dynamictp.bench.machine import describe_machine, probe_memory
from dynamictp.bench.result import Result
from dynamictp.bench.server import ServerProcess, interrupts_deferred, serve_command
from dynamictp.bench.session import Options, look, play, prepare
from dynamictp.bench.workload.classes import CLASSES, Workload
from dynamictp.cost.batching import Targets
from dynamictp.cost.closed import closed_load
from dynamictp.cost.figures import Corner, Prediction
from dynamictp.cost.lengths import RequestClass
from dynamictp.cost.lengths import Workload as CostWorkload
from dynamictp.errors import FatalError

LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "2*tp1": (1, 2)}
TOLERANCE = 0.25
_REQUESTS_PER_S = 40.0
"""More than are answered: a run that ends early measures its own end."""
BUSY_CORES = 0.3
"""Above this, other work decides what is measured."""


_Z90 = statistics.NormalDist().inv_cdf(0.95)


class Predicted(msgspec.Struct, frozen=True):
    """What the model says of one class on one layout; means. Rates per second, times in seconds."""

    tokens_per_s: float
    tpot: float
    ttft: Prediction
    wait_sigma: float
    """Standard deviation of the wait of one request."""

    def ttft_of(self, requests: int) -> Prediction:
        """Where the mean of that many requests is expected. Their lengths are known, their waits are drawn: a
        mean of n has the standard error sigma ÷ √n, independent of the model's own.
        """
        error, band = _Z90 * self.wait_sigma / math.sqrt(requests), self.ttft
        low = band.estimate - math.hypot(band.estimate - band.low, error)
        high = band.estimate + math.hypot(band.high - band.estimate, error)
        return Prediction(band.bound, max(low, band.bound), band.estimate, high)


class Comparison(msgspec.Struct, frozen=True):
    """One class on one layout. Rates per second, times in seconds, all of them means."""

    layout: str
    workload: str
    requests: int
    tokens_per_s: float
    predicted_tokens_per_s: float
    tpot: float
    predicted_tpot: float
    ttft: float
    predicted_ttft: Prediction

    @property
    def throughput_error(self) -> float:
        return self.predicted_tokens_per_s / self.tokens_per_s - 1

    @property
    def tpot_error(self) -> float:
        return self.predicted_tpot / self.tpot - 1

    @property
    def holds(self) -> bool:
        close = abs(self.throughput_error) <= TOLERANCE and abs(self.tpot_error) <= TOLERANCE
        return close and self.predicted_ttft.contains(self.ttft)


class Setup(msgspec.Struct, frozen=True):
    """What is measured and how long."""

    users: int
    seconds: float
    scale: float
    layouts: tuple[str, ...] = tuple(LAYOUTS)


def played(results: Sequence[Result], workload: str, setup: Setup) -> CostWorkload:
    """The class with the mean lengths of the requests that were sent, and its own spread.

    The mean of a few dozen log-normal draws is off by a tenth or two, which would count as the model's error.
    """
    (kind,) = find_workload(workload, setup.scale).classes
    sent = [r.request for r in results]
    prompt = statistics.fmean(request.prompt_tokens or 1 for request in sent)
    output = statistics.fmean(request.max_tokens for request in sent)
    prompts = kind.prompt.scaled(prompt / kind.prompt.typical)
    outputs = kind.output.scaled(output / kind.output.typical)
    drawn = RequestClass(kind.name, prompts, outputs)
    return CostWorkload(workload, (drawn,))


def predict(question: Question, layout: str, workload: CostWorkload, setup: Setup) -> Predicted:
    """What `setup.users` users see on that layout.

    `question` names model, machine, limits, assumptions and calibration.
    """
    tp, replicas = LAYOUTS[layout]
    mix = workload.capped(question.shape.max_context)
    question = msgspec.structs.replace(question, workload=mix)
    evaluation = Evaluation(question, tp, 1)
    found = {
        corner: closed_load(evaluation.model(corner, replicas), setup.users, replicas, Targets())
        for corner in Corner
    }
    rate, latency = found[Corner.EXPECTED]
    unloaded = evaluation.model(Corner.IDEAL, replicas).latency(1.0, replicas, Targets()).ttft_mean
    ttft = Prediction.of(lambda c: unloaded if c is Corner.IDEAL else found[c][1].ttft_mean)
    return Predicted(rate * mix.mean_output, latency.tpot_mean, ttft, latency.wait_sigma)


def measure(url: str, layout: str, workload: str, setup: Setup) -> list[Result]:
    """Results of the class played by `setup.users` users; those cut at the end are left out by the caller."""
    traffic = Workload(
        classes=(CLASSES[workload],),
        arrivals=f"closed:users={setup.users},requests={setup.seconds * _REQUESTS_PER_S:.0f}",
        duration_s=setup.seconds,
        scale=setup.scale,
        endpoint="completions",
        # Other prompts on each layout: the prefix cache would know those of the one before.
        seed=10 * tuple(LAYOUTS).index(layout),
    )

    async def run() -> list[Result]:
        options = Options(warmup=4, drain_s=0.0, changes=((0.0, layout),))
        facts = await look(url, options)
        prepared = await prepare(traffic, facts, options)
        return list((await play(layout, facts, prepared, options, Counters())).results)

    return run_lowered(run)


def compare(
    results: Sequence[Result],
    predicted: Predicted,
    layout: str,
    workload: str,
    setup: Setup,
) -> Comparison:
    """Measured figures of the middle of the run: its first fifth fills the batch."""
    begin = setup.seconds / 5
    stamps = [
        (at, tokens)
        for result in results
        for at, tokens in zip(result.chunk_s, result.chunk_tokens, strict=True)
        if begin <= at <= setup.seconds
    ]
    whole = [r for r in results if r.failure is None and r.sent_s >= begin / 2]
    tpots = [r.tpot_s for r in whole if r.tpot_s is not None]
    ttfts = [r.chunk_s[0] - r.sent_s for r in results if r.chunk_s and r.sent_s >= begin / 2]
    if not tpots or not ttfts:
        raise FatalError(f"{layout}, {workload}: no request finished in {setup.seconds:g} s")
    weights = [r.output_tokens - 1 for r in whole if r.tpot_s is not None]
    return Comparison(
        layout=layout,
        workload=workload,
        requests=len(whole),
        tokens_per_s=sum(tokens for _, tokens in stamps) / (setup.seconds - begin),
        predicted_tokens_per_s=predicted.tokens_per_s,
        tpot=sum(t * w for t, w in zip(tpots, weights, strict=True)) / sum(weights),
        predicted_tpot=predicted.tpot,
        ttft=statistics.fmean(ttfts),
        predicted_ttft=predicted.ttft_of(len(ttfts)),
    )


def render(rows: Sequence[Comparison]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("layout", "class", "requests", "tokens/s", "predicted", "TPOT ms", "predicted",
                 "TTFT s", "predicted (band)", ""):  # fmt: skip
        table.add_column(name, justify="left" if name in ("layout", "class", "") else "right", no_wrap=True)
    for row in rows:
        band = row.predicted_ttft
        table.add_row(
            row.layout,
            row.workload,
            str(row.requests),
            f"{row.tokens_per_s:.0f}",
            f"{row.predicted_tokens_per_s:.0f} ({row.throughput_error:+.0%})",
            f"{row.tpot * 1e3:.1f}",
            f"{row.predicted_tpot * 1e3:.1f} ({row.tpot_error:+.0%})",
            f"{row.ttft:.3f}",
            f"{band.estimate:.3f} ({band.low:.3f}-{band.high:.3f})",
            "holds" if row.holds else "OFF",
        )
    return table


def run(setup: Setup, out: Path | None, console: Console) -> int:
    """Everything; 0 when all comparisons hold. Each layout is calibrated just before it is compared: the
    speed of a shared machine drifts within minutes.
    """
    machine, limits = local.local_machine(2)
    question = Question(
        open_shape("demo"), machine, find_workload("qa"), limits=limits, assumptions=local.ASSUMPTIONS
    )
    rows: list[Comparison] = []
    before = probe_memory(0.5)
    server: ServerProcess | None = None
    try:
        with interrupts_deferred():
            server = ServerProcess(serve_command("tp1"))
        url = server.wait_ready()
        calibrator = Calibrator(
            url, question.shape, machine, limits=limits, assumptions=local.ASSUMPTIONS, say=console.print
        )
        for layout in setup.layouts:
            console.print(f"{layout}: calibrating tp{LAYOUTS[layout][0]}")
            calibration = calibrator.calibrate((LAYOUTS[layout][0],))
            if out is not None:
                calibration.save(out.with_stem(f"{out.stem}-{layout.replace('*', 'x')}"))
            for point in calibration.requests:
                console.print(
                    f"a request takes {point.seconds * 1e3:.1f} ms ({point.low_s * 1e3:.1f}-"
                    f"{point.high_s * 1e3:.1f}) outside of steps beside {point.busy_devices} busy cores, and "
                    f"adds {point.added_s * 1e3:.1f} ms to those beside it"
                )
            for crowd in calibration.crowded:
                console.print(
                    f"memory is {crowd.slowdown:.2f} times as slow with {crowd.busy_devices} busy cores"
                )
            calibrated = msgspec.structs.replace(question, calibration=calibration)
            for workload in FOUR_CLASSES:
                results = measure(url, layout, workload, setup)
                predicted = predict(calibrated, layout, played(results, workload, setup), setup)
                try:
                    rows.append(compare(results, predicted, layout, workload, setup))
                except FatalError as error:
                    console.print(f"not compared: {error}")
            console.print(render(rows[-len(FOUR_CLASSES) :]))
    finally:
        if server is not None:
            server.stop()
    console.print(f"{describe_machine()}; before: {before}; after: {probe_memory(0.5)}")
    console.print(f"{setup.users} users, {setup.seconds:g} s each, lengths x {setup.scale:g}")
    console.print(render(rows))
    held = sum(row.holds for row in rows)
    wanted = len(setup.layouts) * len(FOUR_CLASSES)
    console.print(f"{held} of {wanted} hold: 25 % for tokens/s and TPOT, the band for TTFT")
    if before.busy_cores > BUSY_CORES:
        console.print(f"{before.busy_cores:.1f} cores were busy with other work: these figures say little")
    return 0 if held == wanted else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/check-advisor", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--users", type=int, default=6, help="requests always in the system")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each of the 12 runs")
    parser.add_argument("--scale", type=float, default=0.25, help="multiplies the lengths of the classes")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="comma-separated")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the calibration")
    arguments = parser.parse_args(argv)
    console = Console(width=110, highlight=False)
    try:
        layouts = tuple(arguments.layouts.split(","))
        if unknown := set(layouts) - set(LAYOUTS):
            parser.error(f"--layouts knows {', '.join(LAYOUTS)}; got {', '.join(sorted(unknown))}")
        setup = Setup(arguments.users, arguments.seconds, arguments.scale, layouts)
        return run(setup, arguments.save, console)
    except KeyboardInterrupt:
        return 130
    except FatalError as error:
        Console(stderr=True).print(f"check-advisor: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
