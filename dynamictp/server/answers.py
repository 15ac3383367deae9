"""Errors as HTTP answers, in OpenAI's envelope: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dynamictp.errors import (
    CapacityError,
    DynamicTPError,
    LayoutRefused,
    LeaseConflict,
    RequestError,
    SwitchConflict,
)
from dynamictp.server.generation import GenerationFailed
from dynamictp.server.schema import to_json

log = logging.getLogger(__name__)


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, media_type="application/json")


def envelope(
    message: str,
    kind: str,
    *,
    param: str | None = None,
    code: str | None = None,
    **more: object,
) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code, **more}}


def error_response(error: Exception) -> Response:
    """The answer to any exception. One that nobody foresaw becomes a 500 without its text."""
    match error:
        case LayoutRefused():
            body = envelope(
                error.message, error.kind, param=error.param, code=error.code, legal_layouts=error.legal
            )
            return json_response(body, error.status)
        case RequestError():
            # Unread body: the connection can't carry another request.
            headers = {"connection": "close"} if error.status in (408, 413) else None
            if error.status == 401:
                headers = {"www-authenticate": "Bearer"}
            body = envelope(error.message, error.kind, param=error.param, code=error.code)
            return json_response(body, error.status, headers)
        case SwitchConflict() | LeaseConflict():
            return _conflict(error)
        case CapacityError():
            kind = "rate_limit_error" if error.status == 429 else "service_unavailable"
            headers = {"retry-after": str(math.ceil(error.retry_after_s))}
            return json_response(envelope(error.message, kind, code=error.code), error.status, headers)
        case GenerationFailed():
            kinds = {400: "invalid_request_error", 503: "service_unavailable"}
            kind = kinds.get(error.status, "server_error")
            headers = {"retry-after": "1"} if error.status == 503 else None
            return json_response(envelope(error.message, kind, code=error.code), error.status, headers)
        case _:
            return _framework_error(error)


def _conflict(error: SwitchConflict | LeaseConflict) -> Response:
    if isinstance(error, SwitchConflict):
        body = envelope(error.message, "conflict_error", code="switch_conflict")
        return json_response({**body, "switch": {"id": error.switch_id}}, error.status)
    body = envelope(error.message, "conflict_error", code="devices_leased")
    return json_response({**body, "free": error.free}, error.status)


def _framework_error(error: Exception) -> Response:
    status, kind, message, param, code = 500, "server_error", "internal server error", None, None
    headers = None
    match error:
        case RequestValidationError():
            first = error.errors()[0]
            status, kind, param = 400, "invalid_request_error", ".".join(map(str, first["loc"]))
            message = f"{param}: {first['msg']}"
        case HTTPException(status_code=404):
            status, kind, message, code = 404, "not_found_error", "there is no such path here", "unknown_path"
        case HTTPException():
            status, kind, headers = error.status_code, "invalid_request_error", error.headers
            message = str(error.detail)
            if status == 405:
                allowed, code = (headers or {}).get("Allow", ""), "method_not_allowed"
                message = f"the method is not allowed here; allowed: {allowed}"
        case ClientDisconnect():
            # Nobody reads it; 499 is what proxies log for this.
            status, kind, message = 499, "client_closed_request", "the client has gone"
        case DynamicTPError():
            log.error("request failed", exc_info=error)
            message = str(error)
    return json_response(envelope(message, kind, param=param, code=code), status, headers)


async def on_error(request: Request, error: Exception) -> Response:
    """The application's only exception handler."""
    return error_response(error)
