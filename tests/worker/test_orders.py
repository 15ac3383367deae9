"""Orders on a pipe, in pieces and at once; faults on purpose."""

from __future__ import annotations

import fcntl
import os
import resource
import signal

import pytest

from dynamictp.errors import ConfigError
from dynamictp.messages import NewRow, SamplingParams, StepPlan, pack_tokens
from dynamictp.worker.fault import FAULT_ENV, InjectedFault, fault_from_environment, no_fault
from dynamictp.worker.orders import Begin, Connect, Go, Orders, encode_order


def test_orders_arrive_whole_and_in_order() -> None:
    theirs, ours = os.pipe()
    orders = Orders(theirs)
    assert orders.next(0.0) is None
    sent = [Begin("/tmp/a b.json", "ipc:///x"), Go(), Connect("ipc:///y")]
    data = b"".join(map(encode_order, sent))
    os.write(ours, data[:9])
    assert orders.next(0.0) is None
    os.write(ours, data[9:])
    assert [orders.next(0.0) for _ in range(4)] == [*sent, None]
    os.write(ours, encode_order(Go()))
    os.close(ours)
    assert orders.next() == Go()
    with pytest.raises(EOFError):
        orders.next()
    os.close(theirs)


def test_the_pipe_may_have_a_large_number() -> None:
    """As it has when the server holds 1,000 connections of clients."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    low, ours = os.pipe()
    try:
        theirs = fcntl.fcntl(low, fcntl.F_DUPFD, 1100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    orders = Orders(theirs)
    assert orders.next(0.0) is None
    os.write(ours, encode_order(Go()))
    assert orders.next() == Go()
    for descriptor in (low, ours, theirs):
        os.close(descriptor)


def plan(*tokens: int) -> StepPlan:
    row = NewRow(0, "r", 1, pack_tokens(tokens), len(tokens), SamplingParams(1, 1))
    return StepPlan(1, 7, (), (row,))


def test_no_fault_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAULT_ENV, raising=False)
    assert fault_from_environment() is no_fault


@pytest.mark.parametrize("value", ["stop", "raise-on", "raise-on:x", "exit-on:"])
def test_a_fault_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(FAULT_ENV, value)
    with pytest.raises(ConfigError, match=FAULT_ENV):
        fault_from_environment()


def test_a_poison_token_fails_the_step_that_begins_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULT_ENV, "raise-on:42")
    before_step = fault_from_environment()
    before_step(plan(1, 2, 3))
    with pytest.raises(InjectedFault, match="token 42"):
        before_step(plan(1, 42))


def test_a_signal_fails_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAULT_ENV, "signal")
    previous = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        before_step = fault_from_environment()
        before_step(plan(1))
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(InjectedFault, match="step 7"):
            before_step(plan(1))
        before_step(plan(1))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
