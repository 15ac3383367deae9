"""What is at an address: model, kind of server, and what of its admin interface answers."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from dynamictp.bench.admin import base_url, error_message
from dynamictp.bench.record import ServerFacts
from dynamictp.errors import FatalError

_TIMEOUT_S = 30.0
_REFUSED = (401, 403)


def http_client(url: str, api_key: str | None) -> httpx.AsyncClient:
    """For everything but the load itself. No proxy: it would stand before a server on this machine."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(base_url=base_url(url), headers=headers, timeout=_TIMEOUT_S, trust_env=False)


async def probe(
    http: httpx.AsyncClient, model: str | None = None, admin: httpx.AsyncClient | None = None
) -> ServerFacts:
    """Facts of the server behind `http`; `model` chooses among those it lists. `admin` is for its admin
    interface and its metrics, where they are elsewhere or behind another key.

    Raises FatalError when `/v1/models` doesn't answer or has no such model.
    """
    cards = await _models(http)
    names = [str(card["id"]) for card in cards]
    if not names or (model is not None and model not in names):
        raise FatalError(f"{http.base_url} serves {', '.join(names) or 'no model'}, not '{model or 'any'}'")
    card = cards[names.index(model) if model else 0]
    admin = admin or http
    version = await _optional_json(http, "/version")
    return ServerFacts(
        url=str(http.base_url).rstrip("/"),
        model=str(card["id"]),
        owned_by=str(card.get("owned_by", "")),
        version=str(version.get("version", "")) if version else "",
        max_model_len=card.get("max_model_len"),
        tokenizes=await _tokenizes(http, str(card["id"])),
        layout=await _optional_json(admin, "/admin/layout"),
        metrics_before=await scrape(admin),
    )


async def _models(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    """What `/v1/models` lists. Raises FatalError that says what is wrong with the address or the key."""
    where = str(http.base_url).rstrip("/")
    try:
        response = await http.get("/v1/models")
    except httpx.HTTPError as error:
        raise FatalError(f"no answer from {where}: {error or repr(error)}") from error
    if response.status_code in _REFUSED:
        told = f"status {response.status_code}, {error_message(response) or 'no reason given'}"
        if "authorization" in http.headers:
            raise FatalError(f"{where} does not take this API key ({told})")
        raise FatalError(
            f"{where} does not answer without an API key ({told}): set DYNAMICTP_API_KEY or OPENAI_API_KEY, "
            "or give --api-key-file"
        )
    if response.is_error:
        raise FatalError(
            f"{where} doesn't answer as an OpenAI-compatible server: /v1/models has status "
            f"{response.status_code}"
        )
    try:
        return [dict(card) for card in response.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise FatalError(f"{where} doesn't answer as an OpenAI-compatible server: {error!r}") from error


async def scrape(http: httpx.AsyncClient) -> dict[str, float]:
    """Samples of `/metrics` by name and labels, without histogram buckets; empty where there are none."""
    try:
        response = await http.get("/metrics")
        if response.is_error:
            return {}
        families = list(text_string_to_metric_families(response.text))
    except (httpx.HTTPError, ValueError):
        return {}
    return {
        sample.name + "".join(f"{{{name}={value}}}" for name, value in sorted(sample.labels.items())): float(
            sample.value
        )
        for family in families
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


async def _tokenizes(http: httpx.AsyncClient, model: str) -> bool:
    try:
        response = await http.post("/tokenize", json={"model": model, "prompt": "one two"})
        return not response.is_error and isinstance(response.json().get("count"), int)
    except (httpx.HTTPError, ValueError, AttributeError):
        return False


async def _optional_json(http: httpx.AsyncClient, path: str) -> dict[str, Any] | None:
    """An object, or None where the server has no such page."""
    try:
        response = await http.get(path)
        decoded = None if response.is_error else response.json()
    except (httpx.HTTPError, ValueError):
        return None
    return decoded if isinstance(decoded, dict) else None
