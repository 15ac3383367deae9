"""Where the admin interface is, who asks, and what its refusals mean: for the commands that talk to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click
import httpx

from dynamictp.bench.admin import base_url, error_message
from dynamictp.errors import DynamicTPError

_URL = click.option(
    "--url", default="http://127.0.0.1:8000", show_default=True, help="address of the admin interface"
)
_KEY = click.option(
    "--admin-key",
    "key",
    envvar="DYNAMICTP_ADMIN_KEY",
    help="key of the admin interface; better in DYNAMICTP_ADMIN_KEY",
)


def admin_options(command: Callable[..., None]) -> Callable[..., None]:
    """`--url` and `--admin-key`, as `url` and `key`."""
    return _URL(_KEY(command))


def headers_of(key: str | None) -> dict[str, str]:
    """Headers that carry the key, if there is one."""
    return {"authorization": f"Bearer {key}"} if key else {}


def admin_client(url: str, key: str | None, timeout_s: float) -> httpx.Client:
    """For the admin interface at `url`. No proxy: it would stand before a server on this machine.

    Raises `DynamicTPError` for what is no address.
    """
    try:
        return httpx.Client(
            base_url=base_url(url), headers=headers_of(key), timeout=timeout_s, trust_env=False
        )
    except httpx.InvalidURL as error:
        raise DynamicTPError(
            f"'{url}' is no address ({error}): is the URL (--url) right? Expected http://HOST:PORT"
        ) from error


def get(http: httpx.Client, path: str) -> httpx.Response:
    """The page, whatever its status, except where the server is out of reach or out of order: then raises
    `DynamicTPError`.
    """
    try:
        response = http.get(path)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DynamicTPError(f"no answer from {http.base_url}: {error or type(error).__name__}") from error
    if response.is_server_error:
        raise DynamicTPError(f"{http.base_url.join(path)}: status {response.status_code}")
    return response


def refusal(http: httpx.Client, response: httpx.Response) -> DynamicTPError:
    """Why a page of the admin interface was not to be had, and what to do."""
    where = str(http.base_url).rstrip("/")
    match response.status_code:
        case 401 if "authorization" in http.headers:
            return DynamicTPError(f"{where} does not know this admin key: see the server's --admin-key-file")
        case 401:
            return DynamicTPError(f"{where} wants its admin key: --admin-key or DYNAMICTP_ADMIN_KEY")
        case 404 if _error(response).get("code") == "model_not_found":
            return DynamicTPError(error_message(response))
        case 404 if _is_ours(http):
            return DynamicTPError(
                f"{where} is the API of a DynamicTP server, and its admin interface is elsewhere: on the "
                "--admin-port that the server was started with, if any (its log says so)"
            )
        case 404:
            return DynamicTPError(f"{where} is no DynamicTP server: it has no {response.url.path}")
    return DynamicTPError(error_message(response) or f"{response.url}: status {response.status_code}")


def _is_ours(http: httpx.Client) -> bool:
    try:
        return bool(http.get("/version").json()["server"] == "dynamictp")
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return False


def _error(response: httpx.Response) -> Mapping[str, Any]:
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, Mapping) else {}
