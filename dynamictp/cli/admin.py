"""Where the admin interface is, and who asks: the flags of the commands that talk to it."""

from __future__ import annotations

from collections.abc import Callable

import click

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
