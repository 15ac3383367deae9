"""Faults on purpose, for tests: the environment variable `DYNAMICTP_FAULT` of the server.

- `signal`: on SIGUSR1 a worker's next step raises, on SIGUSR2 it never ends.
- `raise-on:TOKEN`: a step that begins a request with this token in it raises.
- `exit-on:TOKEN`: such a step ends the process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from dynamictp.errors import ConfigError
from dynamictp.messages import StepPlan, unpack_tokens

FAULT_ENV = "DYNAMICTP_FAULT"
EXIT_CODE = 66

BeforeStep = Callable[[StepPlan], None]


class InjectedFault(Exception):
    """Raised in a step because a test asked for it."""


def no_fault(plan: StepPlan) -> None:
    """What runs before a step when nobody asked for a fault."""


def fault_from_environment() -> BeforeStep:
    """What to call before each step. Raises `ConfigError` for a value that is no fault."""
    value = os.environ.get(FAULT_ENV, "")
    if not value:
        return no_fault
    kind, _, token = value.partition(":")
    if kind == "signal":
        return _FailOnSignal()
    if kind not in ("raise-on", "exit-on") or not token.isdecimal():
        raise ConfigError(f"{FAULT_ENV} is signal, raise-on:TOKEN or exit-on:TOKEN, not '{value}'")
    return _Poison(int(token), exits=kind == "exit-on")


class _FailOnSignal:
    """The handler only notes the signal: raised inside it, the error could hit any line of the worker."""

    def __init__(self) -> None:
        self._asked = 0
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._note)

    def __call__(self, plan: StepPlan) -> None:
        asked, self._asked = self._asked, 0
        if asked == signal.SIGUSR1:
            raise InjectedFault(f"step {plan.step} was asked to fail")
        while asked == signal.SIGUSR2:
            pass

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._asked = number


class _Poison:
    def __init__(self, token: int, *, exits: bool) -> None:
        self._token = token
        self._exits = exits

    def __call__(self, plan: StepPlan) -> None:
        if not any(self._token in unpack_tokens(row.tokens) for row in plan.new):
            return
        if self._exits:
            os._exit(EXIT_CODE)
        raise InjectedFault(f"step {plan.step} begins a request with token {self._token}")
