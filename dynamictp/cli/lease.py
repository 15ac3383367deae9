"""`dynamictp lease`: run a command on devices that the server does not need now."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import click
import httpx

from dynamictp.cli.admin import admin_client, admin_options, refusal
from dynamictp.cli.numbers import FiniteRange
from dynamictp.errors import DynamicTPError

NONE_FREE = 75
"""Exit code when no device is free (EX_TEMPFAIL)."""
REVOKED = 76
"""Exit code when the lease was revoked, or lost, before the command ended."""
RENEW_S = 5.0
LOOK_S = 0.25
LOST_S = 15.0
"""Without an answer for so long the server has given the devices to someone else."""
ANSWER_S = 5.0
_PR_SET_PDEATHSIG = 1


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@admin_options
@click.option("--devices", type=click.IntRange(1), default=1, show_default=True, help="devices to lease")
@click.option(
    "--level",
    type=click.Choice(["standby", "released"]),
    default="standby",
    show_default=True,
    help="standby: the server is back in ms; released: it also gives its memory back",
)
@click.option(
    "--notice",
    type=FiniteRange(0, 3600),
    default=10.0,
    show_default=True,
    help="seconds that the server waits for devices it calls back",
)
@click.option(
    "--grace",
    type=FiniteRange(0, 3600),
    default=10.0,
    show_default=True,
    help="seconds from SIGTERM to SIGKILL when they are called back",
)
@click.option(
    "--wait", type=FiniteRange(0, 600), default=0.0, show_default=True, help="seconds to wait for them"
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def lease(url: str, key: str | None, wait: float, command: tuple[str, ...], **given: Any) -> None:
    """Run COMMAND on the cores of leased devices, and on no others.

    When the server wants them back, COMMAND's process group gets SIGTERM, and SIGKILL after the grace. Exit
    code: COMMAND's; 75 when no devices are free; 76 when they were called back.
    """
    asked = {
        "devices": given["devices"],
        "level": given["level"],
        "notice_s": given["notice"],
        "grace_s": given["grace"],
        "wait_s": wait,
    }
    with admin_client(url, key, ANSWER_S) as http:
        granted = _ask(http, asked, url, wait)
        if granted is None:
            sys.exit(NONE_FREE)
        holder = Holder(http, granted, given["grace"])
        try:
            code = holder.run(command)
        finally:
            holder.give_back()
    sys.exit(code)


def _ask(http: httpx.Client, asked: dict[str, Any], url: str, wait_s: float) -> dict[str, Any] | None:
    """The lease; None when there are no free devices."""
    try:
        response = http.post("/admin/leases", json=asked, timeout=ANSWER_S + wait_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DynamicTPError(
            f"no answer from {url}: {error}; is the server running, and is --url right?"
        ) from error
    if response.status_code == 409:
        click.echo(f"dynamictp: {refusal(http, response)}", err=True)
        return None
    if response.is_error:
        raise refusal(http, response)
    return dict(response.json())


class Holder:
    """Owner of a lease and of the command that runs on it."""

    def __init__(
        self,
        http: httpx.Client,
        granted: dict[str, Any],
        grace_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._http = http
        self._path = f"/admin/leases/{granted['id']}"
        self._cores = granted["cores"]
        self._devices = granted["devices"]
        self._grace_s = grace_s
        self._now = now
        self._heard_s = self._renewed_s = now()
        self._told_s: float | None = None
        self._interrupted: signal.Signals | None = None

    def run(self, command: Sequence[str]) -> int:
        """The exit code."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        try:
            process = self._start(command)
        except OSError as error:
            click.echo(f"dynamictp: {command[0]}: {error.strerror}", err=True)
            return 127 if isinstance(error, FileNotFoundError) else 126
        watch = os.pidfd_open(process.pid)
        try:
            revoked = self._watch(process, watch)
        finally:
            os.close(watch)
            # What it left behind in its group would go on using the cores. Before it is reaped, because
            # until then no other group can have its number.
            _signal_group(process.pid, signal.SIGKILL)
            code = process.wait()
        if revoked:
            return REVOKED
        return code if code >= 0 else 128 - code

    def give_back(self) -> None:
        """The server finds out by itself when it can't be told."""
        with suppress(httpx.HTTPError):
            self._http.delete(self._path)

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        cores = self._cores

        def bind() -> None:
            """In the child: on these cores only, and not beyond the life of who renews the lease."""
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if cores:
                os.sched_setaffinity(0, cores)

        environment = {
            **os.environ,
            "DYNAMICTP_DEVICES": ",".join(map(str, self._devices)),
            "DYNAMICTP_CORES": ",".join(map(str, cores)),
        }
        return subprocess.Popen(command, env=environment, process_group=0, preexec_fn=bind)  # noqa: PLW1509

    def _watch(self, process: subprocess.Popen[bytes], watch: int) -> bool:
        """Until the command has ended, by itself or not. True when the lease was revoked or lost."""
        revoked = False
        while not _ended(watch, LOOK_S):
            now = self._now()
            why = "" if revoked else self._over(now)
            if why:
                revoked, self._told_s = True, now
                click.echo(
                    f"dynamictp: {why}; the command is told to end, and killed after {self._grace_s:g} s",
                    err=True,
                )
                _signal_group(process.pid, signal.SIGTERM)
            if self._interrupted is not None:
                _signal_group(process.pid, self._interrupted)
                self._interrupted = None
                self._told_s = self._told_s if self._told_s is not None else now
            if self._told_s is not None and now - self._told_s >= self._grace_s:
                _signal_group(process.pid, signal.SIGKILL)
            elif revoked:
                self._over(now)  # keeps the lease until its deadline
        return revoked

    def _over(self, now: float) -> str:
        """Ask for the lease's state, and renew it when it is time. Why it is over; empty while it is not."""
        try:
            if now - self._renewed_s >= RENEW_S:
                self._renewed_s = now
                response = self._http.put(self._path)
            else:
                response = self._http.get(self._path)
            answer = response.json()
        except (httpx.HTTPError, ValueError):
            return self._silence(now)
        if response.status_code == 404:
            return "the server does not know the lease any more"
        if response.is_error:
            return self._silence(now)
        self._heard_s = now
        if answer["state"] != "revoking":
            return ""
        devices = ", ".join(map(str, self._devices))
        return f"device {devices} is called back: {answer.get('reason') or 'the server needs it'}"

    def _silence(self, now: float) -> str:
        silent_s = now - self._heard_s
        return f"the server has not answered for {silent_s:.0f} s" if silent_s >= LOST_S else ""

    def _on_signal(self, number: int, _frame: object) -> None:
        self._interrupted = signal.Signals(number)


def _ended(watch: int, timeout_s: float) -> bool:
    """The process behind the pidfd has ended; it is not reaped yet."""
    poller = select.poll()
    poller.register(watch, select.POLLIN)
    return bool(poller.poll(timeout_s * 1e3))


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
