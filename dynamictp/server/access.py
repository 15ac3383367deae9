"""Who may use which path: keys, and the names by which a port without keys may be called."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dynamictp.errors import Forbidden, RequestError, Unauthorized
from dynamictp.server.answers import error_response
from dynamictp.server.keys import ANYONE, Identity, KeyRing

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/dashboard"})
"""Probes and load balancers have no keys. The page holds no figures: it asks its reader for the key."""


@dataclass(frozen=True)
class Access:
    """Rules of one port. Without a key ring the paths behind it are open to whoever reaches the port."""

    api_keys: KeyRing | None = None
    admin_keys: KeyRing | None = None
    public_metrics: bool = False
    names: frozenset[str] = field(default_factory=frozenset)
    """Host names that the port may be called by besides addresses and localhost; `*` for any."""

    def admit(self, path: str, headers: Headers) -> Identity:
        """Who sends a request to `path`. Raises `Unauthorized`, `Forbidden`."""
        if path in OPEN_PATHS or (path == "/metrics" and self.public_metrics):
            return ANYONE
        ring = self.admin_keys if is_admin(path) else self.api_keys
        if ring is not None:
            return _identify(ring, headers.get("authorization", ""), admin=is_admin(path))
        self._check_names(headers)
        return ANYONE

    def _check_names(self, headers: Headers) -> None:
        """A page of another site must not use a port without keys through its reader's browser.

        The browser says in `Host` what it was told to call: with DNS rebinding that is the page's own site,
        though the address is this server's. An address can't be rebound. A page that calls this server by
        its address is named in `Origin`.
        """
        host = _host_name(headers.get("host", ""))
        if not self._known(host):
            raise Forbidden(
                f"this server does not answer to the name '{host[:64]}': call it by address or as localhost, "
                "or start it with --allowed-hosts",
                code="unknown_host",
            )
        origin = headers.get("origin")
        if origin is not None and not self._known(_origin_name(origin)):
            raise Forbidden("pages of other sites may not use this server", code="foreign_origin")

    def _known(self, name: str) -> bool:
        lowered = name.lower().removesuffix(".")
        if (
            "*" in self.names
            or lowered == "localhost"
            or lowered.endswith(".localhost")
            or lowered in self.names
        ):
            return True
        try:
            ipaddress.ip_address(lowered)
        except ValueError:
            return False
        return True


def is_admin(path: str) -> bool:
    """The operator's paths."""
    return path == "/metrics" or path.startswith(("/admin/", "/dashboard")) or path == "/admin"


def host_names(*names: str) -> frozenset[str]:
    """Names as `Access.names` holds them; empty ones are left out."""
    return frozenset(name.strip().lower().removesuffix(".") for name in names if name.strip())


class Gate:
    """Asks `Access` before anything of a request's body is read; the identity goes into the scope's state."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                identity = self._access.admit(scope["path"], Headers(scope=scope))
            except RequestError as error:
                response = error_response(error)
                # The body stays unread: the connection can't carry another request.
                response.headers["connection"] = "close"
                await response(scope, receive, send)
                return
            scope.setdefault("state", {})["identity"] = identity
        await self._app(scope, receive, send)


def identity_of(scope: Scope) -> Identity:
    """Who sends the request, as `Gate` found it."""
    identity: Identity = scope.get("state", {}).get("identity", ANYONE)
    return identity


def _identify(ring: KeyRing, authorization: str, *, admin: bool) -> Identity:
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise Unauthorized(
            f"{'the admin key' if admin else 'an API key'} is needed: send the header "
            "'Authorization: Bearer KEY'",
            code="missing_api_key",
        )
    identity = ring.find(key.strip())
    if identity is None:
        raise Unauthorized("the key is not known here", code="invalid_api_key")
    return identity


def _origin_name(origin: str) -> str:
    """The host that an Origin header names; empty for one that names none (`null`, nonsense)."""
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def _host_name(host: str) -> str:
    """The name in a Host header, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
