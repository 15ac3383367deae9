"""The exception tree is the one drawn in the module's docstring, and its members say what they promise."""

from __future__ import annotations

import inspect
import re

import pytest

from dynamictp import errors
from dynamictp.errors import (
    BadRequest,
    CapacityError,
    CommunicatorBroken,
    ConfigError,
    DomainError,
    DynamicTPError,
    FatalError,
    LayoutRefused,
    ModelRefused,
    NotFound,
    ProtocolError,
    RequestError,
    ResourceError,
    SwitchConflict,
    Unauthorized,
)


def drawn_tree() -> dict[str, str | None]:
    """Name of each class in the drawing → name of its parent."""
    drawing = (errors.__doc__ or "").split("```")[1]
    path: list[str] = []
    tree: dict[str, str | None] = {}
    for line in drawing.strip().splitlines():
        match = re.match(r"(?P<branch>[│├└─ ]*)(?P<name>\w+)", line)
        assert match is not None, line
        depth = len(match["branch"]) // 4
        path[depth:] = [match["name"]]
        tree[match["name"]] = path[depth - 1] if depth else None
    return tree


def test_the_tree_is_the_one_drawn() -> None:
    classes = {
        name: cls
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, BaseException) and cls.__module__ == errors.__name__
    }
    actual = {name: cls.__mro__[1].__name__ for name, cls in classes.items()}
    assert actual.pop("DynamicTPError") == "Exception"
    drawn = drawn_tree()
    assert drawn.pop("DynamicTPError") is None
    assert actual == drawn


@pytest.mark.parametrize(
    ("cls", "status", "kind"),
    [
        (RequestError, 400, "invalid_request_error"),
        (BadRequest, 400, "invalid_request_error"),
        (Unauthorized, 401, "authentication_error"),
        (NotFound, 404, "not_found_error"),
    ],
)
def test_request_errors_carry_status_kind_and_field(cls: type[RequestError], status: int, kind: str) -> None:
    error = cls("temperature must be ≥ 0, not -1", param="temperature", code="out_of_range")
    assert (error.status, error.kind) == (status, kind)
    assert (error.message, error.param, error.code) == (str(error), "temperature", "out_of_range")
    assert cls("x").param is None


def test_a_refused_layout_lists_the_legal_ones() -> None:
    error = LayoutRefused("tp4 takes 4 devices; the pool has 2", legal=("tp1", "tp2"))
    assert (error.status, error.kind, error.param, error.code) == (
        422,
        "layout_error",
        "layout",
        "illegal_layout",
    )
    assert error.legal == ("tp1", "tp2")
    assert LayoutRefused("x").legal == ()


def test_capacity_errors_say_when_to_come_back() -> None:
    error = CapacityError("the queue is full", status=429, retry_after_s=2.5)
    assert (error.status, error.retry_after_s, error.message) == (429, 2.5, "the queue is full")
    assert CapacityError("no domain serves").status == 503
    assert CapacityError("x").retry_after_s > 0


def test_a_switch_conflict_names_the_switch_in_flight() -> None:
    error = SwitchConflict("a switch is in flight", switch_id="s3")
    assert (error.status, error.switch_id, error.message) == (409, "s3", "a switch is in flight")


@pytest.mark.parametrize(
    ("cls", "exit_code"), [(FatalError, 1), (ConfigError, 2), (ModelRefused, 3), (ResourceError, 4)]
)
def test_fatal_errors_carry_the_exit_code(cls: type[FatalError], exit_code: int) -> None:
    assert cls("no").exit_code == exit_code


def test_what_a_client_may_see_and_what_not() -> None:
    """Domain failures are retried inside: nothing in them looks like an answer to a client."""
    for cls in (DomainError, CommunicatorBroken, ProtocolError):
        assert issubclass(cls, DynamicTPError)
        assert not hasattr(cls, "status")
