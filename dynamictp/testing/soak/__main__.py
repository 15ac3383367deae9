"""Soak a server: `python -m dynamictp.testing.soak --minutes 30`."""

from __future__ import annotations

import asyncio
import random
import sys

import click

from dynamictp.testing.soak.run import run_soak


@click.command()
@click.option("--minutes", default=30.0, show_default=True)
@click.option("--seed", type=int, help="default: random, printed")
def main(minutes: float, seed: int | None) -> None:
    """Load a real server in every way for a while, and print whether anything grew."""
    seed = random.SystemRandom().randrange(1 << 20) if seed is None else seed
    click.echo(f"seed {seed}")
    report = asyncio.run(run_soak(seed, minutes, progress=click.echo))
    for line in report.lines():
        click.echo(line)
    sys.exit(bool(report.faults))


if __name__ == "__main__":
    main()
