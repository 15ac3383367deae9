"""A DynamicTP server's admin interface and tokenizer, as the bench needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from dynamictp.clock import Clock, SystemClock
from dynamictp.errors import FatalError

# A PUT waits up to 60 s on the server's side; the client must outlast it.
_TIMEOUT_S = 75.0


@dataclass(frozen=True, slots=True)
class Switch:
    """One change of layout. `started_s` to `ended_s` (this client's clock) spans prepare to close.

    `committed_ms`: from the server's decision to its news that the commit was done. `first_admitted_ms`:
    from the engine's receipt of the command to the first request that a new domain admitted; None while
    there was none, see `Admin.first_admitted_ms`.
    """

    before: str
    after: str
    outcome: str
    phases_ms: Mapping[str, float]
    handovers: int
    recomputes: int
    weight_bytes_copied: int
    started_s: float
    ended_s: float
    id: str = ""
    committed_ms: float | None = None
    first_admitted_ms: float | None = None


@dataclass(frozen=True, slots=True)
class LayoutView:
    """What `GET /admin/layout` says, as far as the bench uses it."""

    mode: str
    pinned: bool
    observed: str
    legal: tuple[str, ...] = ()
    """Layouts the server takes; empty when it does not say."""


class Admin:
    """Layout changes and tokenization over HTTP. Use it as an async context manager.

    Every method raises FatalError with the server's message when the server refuses or is gone.
    """

    def __init__(self, url: str, *, clock: Clock | None = None, key: str | None = None) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # No proxy from the environment: it would stand between us and a server on this machine.
        self._http = httpx.AsyncClient(
            base_url=base_url(url), headers=headers, timeout=_TIMEOUT_S, trust_env=False
        )
        self._clock = clock or SystemClock()

    async def __aenter__(self) -> Admin:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def served_model(self) -> str:
        """Id of the first model the server lists."""
        listed = await self._call("GET", "/v1/models")
        return str(listed["data"][0]["id"])

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`, no special tokens added."""
        body = {"prompt": text, "add_special_tokens": False}
        return tuple((await self._call("POST", "/tokenize", body))["tokens"])

    async def detokenize(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return str((await self._call("POST", "/detokenize", {"tokens": list(ids)}))["prompt"])

    async def layout(self) -> LayoutView:
        view = await self._call("GET", "/admin/layout")
        legal = tuple(map(str, view.get("legal_layouts", ())))
        return LayoutView(str(view["mode"]), bool(view["pinned"]), str(view["observed"]), legal)

    async def set_layout(self, layout: str) -> Switch:
        """Changes the layout and waits until the old domains are closed."""
        started_s = self._clock.now()
        answer = await self._call("PUT", "/admin/layout", {"layout": layout, "wait": "closed"})
        ended_s = self._clock.now()
        switch = answer["switch"]
        phases = {name: float(ms) for name, ms in (switch.get("phases_ms") or {}).items() if ms is not None}
        return Switch(
            before=str(switch["from"]),
            after=str(switch["to"]),
            outcome=str(switch["outcome"]),
            phases_ms=phases,
            handovers=int(switch.get("handovers", 0)),
            recomputes=int(switch.get("recomputes", 0)),
            weight_bytes_copied=int(switch.get("weight_bytes_copied", 0)),
            started_s=started_s,
            ended_s=ended_s,
            id=str(switch.get("id", "")),
            committed_ms=_committed_ms(switch),
            first_admitted_ms=switch.get("first_admitted_ms"),
        )

    async def first_admitted_ms(self, switch_id: str) -> float | None:
        """As known by now: it takes an arrival, often after the switch is closed."""
        shown = (await self._call("GET", f"/admin/switches/{switch_id}"))["switch"]
        waited_ms: float | None = shown.get("first_admitted_ms")
        return waited_ms

    async def release_layout(self) -> None:
        """Gives the layout back to the planner of a dynamic server."""
        await self._call("PUT", "/admin/layout", {"layout": "auto"})

    async def _call(self, method: str, path: str, body: object | None = None) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            where = str(self._http.base_url).rstrip("/")
            raise FatalError(f"no answer from {where}: {error or repr(error)}") from error
        if response.status_code >= 400:
            told = error_message(response) or response.text[:300]
            raise FatalError(f"{method} {path}: status {response.status_code}, {told}")
        try:
            decoded: dict[str, Any] = response.json()
        except ValueError as error:
            raise FatalError(f"{method} {path}: the answer is not JSON: {response.text[:100]!r}") from error
        return decoded


def base_url(url: str) -> str:
    """Without a trailing `/v1`, which people copy from their clients' settings; `host:port` is plain HTTP."""
    return (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


def error_message(response: httpx.Response) -> str:
    """What the server says of an error; empty when it does not say it as OpenAI's API does."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _committed_ms(switch: Mapping[str, Any]) -> float | None:
    began_s, committed_s = switch.get("began_at"), switch.get("committed_at")
    return None if began_s is None or committed_s is None else (committed_s - began_s) * 1e3
