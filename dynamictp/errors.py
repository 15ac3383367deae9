"""The exception tree, drawn once.

```
DynamicTPError
├── RequestError            the client's fault: answered with a 4xx
│   ├── BadRequest          400, names the field
│   ├── Unauthorized        401
│   ├── Forbidden           403
│   ├── NotFound            404
│   └── LayoutRefused       422, carries the legal layouts
├── CapacityError           429 / 503 with Retry-After
├── SwitchConflict          409, a switch is in flight
├── LeaseConflict           409, carries the free devices
├── DomainError             retried inside, never seen by a client
│   ├── CommunicatorBroken  aborted, closed, or past its deadline
│   └── ProtocolError       version or sequence gap
└── FatalError              ends the process; carries the exit code
    ├── ConfigError         2
    ├── ModelRefused        3
    └── ResourceError       4  port, memory, devices
```
Messages say what was wrong, what was expected and what to do.
"""

from __future__ import annotations

import re
from typing import Self

_MAX_MESSAGE_CHARS = 800


INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class DynamicTPError(Exception):
    """Root of every error this package raises on purpose."""


class RequestError(DynamicTPError):
    """A request that can't be served as it is. `param` names the field at fault."""

    status = 400
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class BadRequest(RequestError):
    """A field is malformed, out of range or unsupported."""


class Unauthorized(RequestError):
    """The key is missing or unknown."""

    status = 401
    kind = "authentication_error"


class Forbidden(RequestError):
    """The request comes in a way that this port does not take."""

    status = 403
    kind = "permission_error"


class NotFound(RequestError):
    """The model, switch or lease does not exist."""

    status = 404
    kind = "not_found_error"


class LayoutRefused(RequestError):
    """The layout does not fit the devices or the model. `legal` lists layouts that do."""

    status = 422
    kind = "layout_error"

    def __init__(self, message: str, *, legal: tuple[str, ...] = ()) -> None:
        super().__init__(message, param="layout", code="illegal_layout")
        self.legal = legal


class CapacityError(DynamicTPError):
    """No room now. Try again after `retry_after_s` seconds."""

    def __init__(
        self, message: str, *, status: int = 503, retry_after_s: float = 1.0, code: str = "capacity"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s
        self.code = code


class SwitchConflict(DynamicTPError):
    """A switch is in flight on this pool; `switch_id` names it."""

    status = 409

    def __init__(self, message: str, *, switch_id: str) -> None:
        super().__init__(message)
        self.message = message
        self.switch_id = switch_id


class LeaseConflict(DynamicTPError):
    """Devices are leased, or in use and can't be. `free` lists those that may be leased."""

    status = 409

    def __init__(self, message: str, *, free: tuple[int, ...]) -> None:
        super().__init__(message)
        self.message = message
        self.free = free


class DomainError(DynamicTPError):
    """A domain can't go on; its requests resume elsewhere."""


class CommunicatorBroken(DomainError):
    """The communicator was aborted, closed, or a peer missed the deadline. Final."""


class ProtocolError(DomainError):
    """A peer speaks another protocol version, or a message is missing from its sequence."""


class FatalError(DynamicTPError):
    """The process can't start or go on; the CLI prints the message and exits with `exit_code`."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        """The message may quote a file, which may hold anything: a long one is cut in the middle."""
        half = _MAX_MESSAGE_CHARS // 2
        cut = len(message) > _MAX_MESSAGE_CHARS
        super().__init__(f"{message[:half]} … {message[-half:]}" if cut else message)

    def of_model(self, name: str) -> Self:
        """The same of one of several models, whose parameters are keys of a file, not flags."""
        text = re.sub(r"^--[a-z-]+", lambda flag: flag[0][2:].replace("-", "_"), str(self))
        return type(self)(f"model {name}: {text}")


class ConfigError(FatalError):
    """A flag, key or combination of them is wrong."""

    exit_code = 2


class ModelRefused(FatalError):
    """The model is missing, corrupt, or of a kind this server does not run."""

    exit_code = 3


class ResourceError(FatalError):
    """A port, memory or device that is needed is not to be had."""

    exit_code = 4
