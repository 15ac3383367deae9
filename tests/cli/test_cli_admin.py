"""What the commands that talk to a server say when it is another one, elsewhere, or wants a key."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner

from dynamictp.cli import cli
from dynamictp.errors import DynamicTPError

KEY = "sesame"
NOTHING: dict[str, Any] = {}
OURS = {"/version": {"version": "1", "server": "dynamictp"}}
LAYOUT = {
    "mode": "static", "target": "tp1", "observed": "tp1", "waiting": 0, "domains": [], "devices": [],
}  # fmt: skip
HISTORY = {"now": 1.0, "model": "demo", "points": {"t": [1.0], "degree": [1]}}


@contextmanager
def serving(pages: Mapping[str, Any], *, key: str = "") -> Iterator[str]:
    """A server with these pages, JSON or text, all but `/version` behind the key, if there is one."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            path = self.path.partition("?")[0]
            status, body = 200, pages.get(path)
            if key and path != "/version" and self.headers["authorization"] != f"Bearer {key}":
                status, body = 401, {"error": {"message": "the admin key is needed"}}
            elif body is None:
                status, body = 404, {"detail": "Not Found"}
            elif "error" in body:
                status = 404
            self.rfile.read(int(self.headers["content-length"] or 0))
            encoded = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        do_GET = do_PUT = do_POST = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def commands(url: str) -> Iterator[list[str]]:
    yield ["top", url, "--once"]
    yield ["diagnose", url, "--seconds", "1"]
    yield ["layout", "show", "--url", url]
    yield ["lease", "--url", url, "--devices", "1", "--", "true"]


def said(arguments: list[str]) -> str:
    result = CliRunner().invoke(cli, arguments)
    assert isinstance(result.exception, DynamicTPError), (arguments, result.output, result.exception)
    assert "http" not in str(result.exception).replace(url_in(arguments), ""), "a foreign address"
    return str(result.exception)


def url_in(arguments: list[str]) -> str:
    return next(argument for argument in arguments if argument.startswith("http"))


def test_another_server_is_called_one() -> None:
    with serving(NOTHING) as url:
        for arguments in commands(url):
            assert f"{url} is no DynamicTP server" in said(arguments)


def test_the_api_without_an_admin_interface_says_where_to_look() -> None:
    with serving(OURS) as url:
        for arguments in commands(url):
            told = said(arguments)
            assert "is the API of a DynamicTP server" in told
            assert "--admin-port" in told


def test_a_missing_key_and_a_wrong_one_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(OURS | {"/admin/layout": LAYOUT, "/admin/history": HISTORY}, key=KEY) as url:
        for arguments in commands(url):
            assert "wants its admin key: --admin-key or DYNAMICTP_ADMIN_KEY" in said(arguments)
        monkeypatch.setenv("DYNAMICTP_ADMIN_KEY", "wrong")
        for arguments in commands(url):
            assert "does not know this admin key" in said(arguments)
        monkeypatch.setenv("DYNAMICTP_ADMIN_KEY", KEY)
        assert CliRunner().invoke(cli, ["layout", "show", "--url", url]).exit_code == 0
        shown = CliRunner().invoke(cli, ["top", url, "--once"])
        assert (shown.exit_code, "tp1" in shown.output) == (0, True)


def test_nobody_there_is_told_with_the_address() -> None:
    with serving(NOTHING) as gone:
        pass
    for arguments in commands(gone):
        assert f"no answer from {gone}" in said(arguments)


def test_the_warning_of_a_server_that_still_loads() -> None:
    with serving({"/admin/layout": LAYOUT | {"observed": "", "target": ""}}) as url:
        shown = CliRunner().invoke(cli, ["layout", "show", "--url", url])
    assert (shown.exit_code, shown.output) == (0, "the server is still loading its model\n")


def test_a_model_that_is_not_there_is_told_as_the_server_says_it() -> None:
    refused = {"error": {"message": "the model 'x' does not exist here", "code": "model_not_found"}}
    with serving(OURS | {"/admin/layout": LAYOUT, "/admin/history": refused}) as url:
        assert said(["top", url, "--once", "--model", "x"]) == "the model 'x' does not exist here"


@pytest.mark.parametrize(
    "arguments",
    [
        ["lease", "--notice", "nan", "--", "true"],
        ["diagnose", "--seconds", "nan"],
        ["top", "--interval", "inf"],
        ["layout", "set", "tp1", "--drain-deadline-s", "nan"],
        ["simulate", __file__, "--duration", "inf"],
        ["bench", "run", "http://127.0.0.1:9", "--dry-run", "--scale", "nan"],
    ],
)
def test_numbers_that_are_none_are_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, arguments)
    assert (result.exit_code, "is no finite number" in result.output) == (2, True)


def test_an_address_without_a_scheme_is_plain_http() -> None:
    pages = OURS | {"/admin/layout": LAYOUT, "/admin/history": HISTORY}
    with serving(pages) as url:
        host = url.removeprefix("http://")
        shown = CliRunner().invoke(cli, ["layout", "show", "--url", host])
        assert (shown.exit_code, "still loading" in shown.output) == (0, True)
        assert CliRunner().invoke(cli, ["top", host, "--once"]).exit_code == 0
        looked = CliRunner().invoke(cli, ["diagnose", host, "--seconds", "1"])
        assert str(looked.exception) == f"http://{host} is the API of a DynamicTP server, and its admin " + (
            "interface is elsewhere: on the --admin-port that the server was started with, if any (its log "
            "says so)"
        )


def test_diagnose_knows_a_server_of_several_models_before_its_first_step() -> None:
    page = "".join(
        f'dtp_num_requests_running{{model_name="{model}"}} 0.0\n'
        f'dtp_num_requests_waiting{{model_name="{model}"}} 0.0\n'
        for model in ("big", "small")
    )
    with serving({"/metrics": page}) as url:
        looked = CliRunner().invoke(cli, ["diagnose", url, "--seconds", "1"])
    assert looked.exit_code == 0, looked.exception
    assert f"{url}, model small: idle" in looked.output
