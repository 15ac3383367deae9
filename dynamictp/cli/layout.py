"""`dynamictp layout`: look at and change the layout of a running server."""

from __future__ import annotations

from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

from dynamictp.cli.admin import admin_client, admin_options, refusal
from dynamictp.cli.numbers import FiniteRange
from dynamictp.errors import DynamicTPError, LayoutRefused
from dynamictp.layout import spec_of

WAIT_S = 75.0
"""The server answers within 60 s; the rest is for the way."""
UNPROCESSABLE = 422


@click.group()
def layout() -> None:
    """Show or set the layout of a running server."""


@layout.command()
@admin_options
def show(url: str, key: str | None) -> None:
    """Print domains and devices as they are now."""
    state = _call("GET", url, key)
    console = Console()
    if not state["domains"]:
        console.print("the server is still loading its model")
        return
    observed, target = state["observed"], state["target"]
    pending = "" if spec_of(target) == spec_of(observed) else f" (target {target})"
    console.print(
        f"mode {state['mode']}  layout {observed}{pending}  waiting {state['waiting']}"
        + ("  pinned" if state.get("pinned") else ""),
        highlight=False,
    )
    for bar in state.get("barred", ()):
        console.print(f"{bar['layout']} is barred for {bar['for_s']:.0f} s", highlight=False)
    several = "models" in state
    domains = Table("domain", "shape", "devices", "state", "running", "KV pages", box=None)
    for domain in state["domains"]:
        devices = ",".join(map(str, domain["devices"]))
        pages = f"{domain['kv_pages_used']} / {domain['kv_pages_cap']}"
        shape = f"{domain['model']}:tp{domain['tp']}" if several else f"tp{domain['tp']}"
        domains.add_row(domain["id"], shape, devices, domain["state"], str(domain["running"]), pages)
    console.print(domains)
    table = Table("device", "state", "cores", "pid", "domain or lease", box=None)
    if several:
        table.add_column("model")
    for device in state["devices"]:
        cores = ",".join(map(str, device.get("cores") or ()))
        table.add_row(
            str(device["id"]),
            device["state"],
            cores,
            str(device.get("pid") or ""),
            str(device.get("domain") or device.get("lease") or "free"),
            *((device["model"] or "",) if several else ()),
        )
    console.print(table)


@layout.command("set")
@click.argument("text", metavar="LAYOUT")
@admin_options
@click.option("--wait", type=click.Choice(["none", "commit", "closed"]), default="closed", show_default=True)
@click.option(
    "--drain-deadline-s",
    type=FiniteRange(0),
    help="how long old requests may stay before they are handed over",
)
@click.option("--ramp", is_flag=True, help="move requests step by step, and back if that is worse")
def set_layout(
    text: str, url: str, key: str | None, wait: str, drain_deadline_s: float | None, *, ramp: bool
) -> None:
    """Switch to LAYOUT, such as tp2 or tp1+tp1, with all requests running on."""
    if not text.isprintable():
        raise LayoutRefused(f"{text!r} is no layout; expected one such as tp2 or tp1+tp1")
    body: dict[str, Any] = {"layout": text, "wait": wait, "ramp": ramp}
    if drain_deadline_s is not None:
        body["drain_deadline_s"] = drain_deadline_s
    answer = _call("PUT", url, key, body)
    for switch in answer.get("switches") or (answer["switch"],):
        _print_switch(switch)


def _print_switch(switch: dict[str, Any]) -> None:
    phases = ", ".join(f"{name} {ms:.1f} ms" for name, ms in switch.get("phases_ms", {}).items())
    click.echo(f"{switch['from']} -> {switch['to']}: {switch.get('outcome') or 'started'}")
    if phases:
        click.echo(phases)
    click.echo(
        f"handovers {switch.get('handovers', 0)}, recomputes {switch.get('recomputes', 0)}, "
        f"weight bytes copied {switch.get('weight_bytes_copied', 0)}"
    )


@layout.command()
@admin_options
def auto(url: str, key: str | None) -> None:
    """Give the layout back to the planner (in dynamic mode)."""
    _call("PUT", url, key, {"layout": "auto"})
    state = _call("GET", url, key)
    click.echo(f"the planner has the layout again; it is {state['observed']} now")


def _call(method: str, url: str, key: str | None, body: dict[str, Any] | None = None) -> dict[str, Any]:
    with admin_client(url, key, WAIT_S) as http:
        try:
            response = http.request(method, "/admin/layout", json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DynamicTPError(
                f"no answer from {url}: {error}; is the server running, and is --url right?"
            ) from error
        if response.is_error:
            reason = refusal(http, response)
            raise LayoutRefused(str(reason)) if response.status_code == UNPROCESSABLE else reason
        return dict(response.json())
