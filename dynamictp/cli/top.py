"""`dynamictp top`: the live page in a terminal."""

from __future__ import annotations

import time
from typing import Any

import click
import httpx
from rich.console import Console
from rich.live import Live

from dynamictp.errors import DynamicTPError
from dynamictp.observe.top import View, screen

TIMEOUT_S = 5.0
MOST_POINTS = 2500


@click.command()
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--interval", type=click.FloatRange(min=0.2), default=1.0, show_default=True, help="seconds")
@click.option("--once", is_flag=True, help="print one screen and exit")
@click.option("--model", help="whose history and decisions to show, of several (default: the first)")
@click.option("--admin-key", envvar="DYNAMICTP_ADMIN_KEY", help="admin key, where the server wants one")
def top(url: str, interval: float, once: bool, model: str | None, admin_key: str | None) -> None:
    """Watch a running server: devices and domains, degree, traffic, latency, switches and their reasons."""
    console = Console(highlight=False)
    headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
    view = View(model=model or "")
    with httpx.Client(
        base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=TIMEOUT_S, trust_env=False
    ) as http:
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
    which = {"model": view.model} if view.model else {}
    history = _get(http, "/admin/history", since=since, **which)
    view.layout = _get(http, "/admin/layout") or {}
    if history is None:
        whose = f" of model {view.model}" if view.model else ""
        raise DynamicTPError(f"{http.base_url} tells no history{whose}: an older server?")
    view.model = history["model"]
    for name, values in history["points"].items():
        view.points[name] = (view.points.get(name, []) + values)[-MOST_POINTS:]
    view.switches = (_get(http, "/admin/switches") or {}).get("switches", ())
    view.decisions = (_get(http, "/admin/decisions", last=120, model=view.model) or {}).get("decisions", ())


def _get(http: httpx.Client, path: str, **query: Any) -> dict[str, Any] | None:
    """A body; None where the server has none, such as decisions without a planner."""
    try:
        response = http.get(path, params=query)
    except httpx.HTTPError as error:
        raise DynamicTPError(f"no answer from {http.base_url}: {error}") from error
    if response.status_code in (401, 403):
        raise DynamicTPError(f"{http.base_url} wants its admin key: --admin-key or DYNAMICTP_ADMIN_KEY")
    if response.is_server_error:
        raise DynamicTPError(f"{http.base_url}{path}: status {response.status_code}")
    return None if response.is_error else dict(response.json())
