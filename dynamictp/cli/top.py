"""`dynamictp top`: the live page in a terminal."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

import click
import httpx
from rich.console import Console
from rich.live import Live

from dynamictp.cli.admin import admin_client, get, refusal
from dynamictp.cli.numbers import FiniteRange
from dynamictp.errors import DynamicTPError
from dynamictp.observe.top import View, screen

TIMEOUT_S = 5.0
MOST_POINTS = 2500
ASKS_KEY = (401, 403)


@click.command()
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--interval", type=FiniteRange(min=0.2), default=1.0, show_default=True, help="seconds")
@click.option("--once", is_flag=True, help="print one screen and exit")
@click.option("--model", help="whose history and decisions to show, of several (default: the first)")
@click.option("--admin-key", envvar="DYNAMICTP_ADMIN_KEY", help="admin key, where the server wants one")
def top(url: str, interval: float, once: bool, model: str | None, admin_key: str | None) -> None:
    """Watch a running server: devices and domains, degree, traffic, latency, switches and their reasons."""
    console = Console(highlight=False)
    view = View(model=model or "")
    with admin_client(url, admin_key, TIMEOUT_S) as http:
        look(http, view)
        if once or not console.is_terminal:
            console.print(screen(view, console.width))
            return
        with Live(screen(view, console.width), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    look(http, view)
                    view.trouble = ""
                except DynamicTPError as error:
                    view.trouble = f"{error}; what is shown is old"
                live.update(screen(view, console.width), refresh=True)


def look(http: httpx.Client, view: View) -> None:
    """Bring the view up to date. Raises `DynamicTPError` when the server does not answer."""
    since = view.points["t"][-1] if view.points.get("t") else 0
    which = f"&model={quote(view.model)}" if view.model else ""
    history = _page(http, f"/admin/history?since={since}{which}")
    view.layout = _page(http, "/admin/layout")
    view.model, view.now, view.crashes = history["model"], history["now"], history.get("crashes", {})
    which = f"&model={quote(view.model)}"
    for name, values in history["points"].items():
        view.points[name] = (view.points.get(name, []) + values)[-MOST_POINTS:]
    view.switches = _page(http, "/admin/switches", optional=True).get("switches", ())
    view.decisions = _page(http, f"/admin/decisions?last=120{which}", optional=True).get("decisions", ())


def _page(http: httpx.Client, path: str, *, optional: bool = False) -> dict[str, Any]:
    """A body; an empty one where the server has none though it may, such as decisions without a planner."""
    response = get(http, path)
    if response.is_error:
        if optional and response.status_code not in ASKS_KEY:
            return {}
        raise refusal(http, response)
    return dict(response.json())
