"""`dynamictp export`: what other tools import to watch a server."""

from __future__ import annotations

from importlib import resources

import click
import msgspec


@click.command()
@click.argument("what", type=click.Choice(["alerts", "alert-tests", "grafana"]))
def export(what: str) -> None:
    """Print alert rules for Prometheus (alerts), their unit tests for promtool (alert-tests), or a Grafana
    dashboard (grafana)."""
    if what == "grafana":
        from dynamictp.observe.grafana import dashboard  # noqa: PLC0415  (help stays instant)

        click.echo(msgspec.json.format(msgspec.json.encode(dashboard()), indent=2).decode())
        return
    name = {"alerts": "alerts.yml", "alert-tests": "alerts_test.yml"}[what]
    file = resources.files("dynamictp.observe") / "data" / name
    click.echo(file.read_text(encoding="utf-8"), nl=False)
