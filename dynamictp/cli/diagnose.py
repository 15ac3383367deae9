"""`dynamictp diagnose`: what limits a server, and what to try."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec
from rich.console import Console
from rich.markup import escape

from dynamictp.cli.admin import admin_client, get, refusal
from dynamictp.cli.numbers import FiniteRange
from dynamictp.errors import ConfigError, DynamicTPError
from dynamictp.observe.diagnose import Diagnosis, diagnose
from dynamictp.observe.figures import Figures, figures_of
from dynamictp.observe.findings import HEADLINES
from dynamictp.observe.samples import Samples, parse_samples

TIMEOUT_S = 10.0
LOOK_S = 1.0


@click.command("diagnose")
@click.argument("target", metavar="[URL|REPORT.json]", default="http://127.0.0.1:8000")
@click.option(
    "--seconds",
    type=FiniteRange(min=1, max=3600),
    default=10.0,
    show_default=True,
    help="how long to watch a server",
)
@click.option("--admin-key", envvar="DYNAMICTP_ADMIN_KEY", help="admin key, where the server wants one")
@click.option("--json", "as_json", is_flag=True, help="print figures and findings as JSON")
def diagnose_command(target: str, seconds: float, admin_key: str | None, as_json: bool) -> None:
    """Say what limits a running server, or the server of a benchmark's result: memory, communication,
    arithmetic, the host, the queue or KV memory, with the evidence and what to try."""
    if not (target.endswith(".json") or Path(target).is_file()):
        looks = watch(target, seconds, admin_key)
        runs = list(of_models(target, looks, seconds))
    else:
        runs = list(read_report(Path(target)))
    for label, figures in runs:
        diagnosis = diagnose(figures)
        if as_json:
            click.echo(msgspec.json.encode(plain(label, figures, diagnosis)).decode())
        else:
            show(label, figures, diagnosis)


def of_models(
    url: str, looks: Sequence[Mapping[str, float]], seconds: float
) -> Iterator[tuple[str, Figures]]:
    """The figures of a server's only model, or of each."""
    for model in Samples(looks[-1]).models or ("",):
        label = f"{url}, model {model}" if model else url
        yield label, figures_of(looks[0], looks[-1], seconds, looks[1:], model)


def watch(url: str, seconds: float, admin_key: str | None) -> list[dict[str, float]]:
    """Looks at `/metrics`, one a second and one at the end. Raises `DynamicTPError`."""
    looks: list[dict[str, float]] = []
    with admin_client(url, admin_key, TIMEOUT_S) as http:
        began = time.monotonic()
        while True:
            looks.append(_look(http, url))
            left_s = began + seconds - time.monotonic()
            if left_s <= 0 and len(looks) > 1:
                return looks
            time.sleep(min(LOOK_S, max(left_s, 0.0)))


def _look(http: httpx.Client, url: str) -> dict[str, float]:
    response = get(http, "/metrics")
    if response.is_error:
        raise refusal(http, response)
    try:
        samples = parse_samples(response.text)
    except ValueError as error:
        raise DynamicTPError(f"{url} has a page /metrics, but not in Prometheus' format: {error}") from error
    if not any(name.startswith("dtp_num_requests_running") for name in samples):
        raise DynamicTPError(f"{url} has metrics, but it is no DynamicTP server")
    return samples


def read_report(path: Path) -> Iterator[tuple[str, Figures]]:
    """The runs of a benchmark's result that were against a server of ours. Raises `ConfigError`."""
    from dynamictp.bench.record import read_json  # noqa: PLC0415  (it takes a second to import)

    found = False
    for run in read_json(path).runs:
        before, after = run.server.metrics_before, run.server.metrics_after
        if "dtp_num_requests_running" not in after:
            continue
        found = True
        # Before and after the load the queue is empty: it counts as it was in between.
        queue = [
            {"dtp_num_requests_running": float(s.running), "dtp_num_requests_waiting": float(s.waiting)}
            for s in run.samples
        ]
        yield run.label, figures_of(before, after, run.end_s, queue)
    if not found:
        raise ConfigError(f"{path} has no run with metrics of a DynamicTP server")


def plain(label: str, figures: Figures, diagnosis: Diagnosis) -> dict[str, Any]:
    """For a program: the main verdict first, then all findings in their order."""
    return {
        "target": label,
        "verdict": diagnosis.verdict,
        "diagnosis": {
            "findings": [
                {
                    "verdict": finding.verdict,
                    "evidence": finding.evidence,
                    "advice": [advice.text for advice in finding.advice],
                }
                for finding in diagnosis.findings
            ],
            "split": diagnosis.split,
        },
        "figures": figures,
    }


def show(label: str, figures: Figures, diagnosis: Diagnosis) -> None:
    """For a person."""
    console = Console(highlight=False)
    console.print(
        f"[bold]{escape(label)}[/]: [bold]{diagnosis.verdict.value}[/], {HEADLINES[diagnosis.verdict]}"
    )
    for finding in diagnosis.findings:
        if finding is not diagnosis.findings[0]:
            console.print(f"\nbeside it, {finding.verdict.value}: {HEADLINES[finding.verdict]}")
        for line in finding.evidence:
            console.print(f"  - {escape(line)}")
        for advice in finding.advice:
            console.print(f"  [dim]try:[/] {escape(advice.text)}")
    if diagnosis.split:
        parts = ", ".join(f"{part} {100 * share:.0f} %" for part, share in diagnosis.split.items())
        console.print(f"\ntime of steps: {parts}")
    console.print(
        f"in {figures.interval_s:.0f} s: {figures.tokens:.0f} tokens, {figures.steps:.0f} steps, "
        f"{figures.running:.1f} running, {figures.waiting:.1f} waiting, KV {100 * figures.kv_usage:.0f} %"
    )
