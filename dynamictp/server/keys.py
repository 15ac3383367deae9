"""Keys of the API and of the admin interface: read from files, compared in constant time.

A key file has a line per key: `key [tenant [priority]]`; `#` at the beginning of a word begins a comment.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dynamictp.config import ServeConfig
from dynamictp.errors import ConfigError
from dynamictp.server.sender import MAX_PRIORITY

log = logging.getLogger(__name__)

_MAX_FILE_BYTES = 16 << 20
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_COMMENT = re.compile(r"(^|\s)#.*")
"""Within a word `#` is a part of it: a key must not be cut short."""
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Who sends a request. Requests of one tenant share its part of the queue; higher priorities go first."""

    tenant: str = ""
    priority: int = 0


ANYONE = Identity()
"""Whoever sends a request where no key is asked for."""


def read_keys(file: str) -> dict[bytes, Identity]:
    """SHA-256 of each key of a key file, and whose it is. Raises `ConfigError` that names the line."""
    try:
        with Path(file).open("rb") as stream:
            content = stream.read(_MAX_FILE_BYTES + 1)
        lines = content.decode().splitlines()
    except OSError as error:
        raise ConfigError(f"can't read the key file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the key file {file} is not text") from error
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"the key file {file} is larger than {_MAX_FILE_BYTES} bytes")
    keys: dict[bytes, Identity] = {}
    for number, line in enumerate(lines, 1):
        words = _COMMENT.sub("", line).split()
        if not words:
            continue
        digest = _digest(words[0])
        try:
            identity = _identity(words)
            if digest in keys:
                raise ValueError("the key is there twice")
        except ValueError as error:
            # Never the line itself: it holds a secret, and this goes to a log.
            raise ConfigError(f"line {number} of the key file {file}: {error}") from error
        keys[digest] = identity
    if not keys:
        raise ConfigError(f"the key file {file} has no keys; a line is: key [tenant [priority]]")
    return keys


def _identity(words: list[str]) -> Identity:
    if len(words) > 3:
        raise ValueError("expected key [tenant [priority]]")
    if not _KEY.fullmatch(words[0]):
        raise ValueError("a key has 1 to 512 visible ASCII characters")
    tenant = words[1] if len(words) > 1 else ""
    if tenant and not _TENANT.fullmatch(tenant):
        raise ValueError("a tenant's name has 1 to 64 letters, digits or ._-")
    if len(words) < 3:
        return Identity(tenant)
    try:
        priority = int(words[2])
    except ValueError:
        priority = MAX_PRIORITY + 1
    if abs(priority) > MAX_PRIORITY:
        raise ValueError(f"a priority is an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}")
    return Identity(tenant, priority)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class KeyRing:
    """Owner of the keys of one file. `reload` takes the file's new content over as a whole, or not at all."""

    def __init__(self, file: str) -> None:
        """Raises `ConfigError`."""
        self._file = file
        self._take(read_keys(file))

    def find(self, key: str) -> Identity | None:
        """Whose key it is, None for nobody's. The time does not depend on the key: every one is compared."""
        digest = _digest(key)
        found: Identity | None = None
        for known, identity in self._keys.items():
            if hmac.compare_digest(known, digest):
                found = identity
        return found

    @property
    def tenants(self) -> frozenset[str]:
        return self._tenants

    def reload(self) -> bool:
        """Read the file again. False when it can't be used: the old keys stay, and a log line says why."""
        try:
            keys = read_keys(self._file)
        except ConfigError as error:
            log.error("the old keys stay in force: %s", error)
            return False
        self._take(keys)
        log.info("%s: %d keys", self._file, len(keys))
        return True

    def _take(self, keys: dict[bytes, Identity]) -> None:
        self._keys = keys
        self._tenants = frozenset(identity.tenant for identity in keys.values())


@dataclass(frozen=True)
class KeyRings:
    """The keys of the API and of the admin interface, as far as there are any. False when there are none."""

    api: KeyRing | None = None
    admin: KeyRing | None = None

    @classmethod
    def of(cls, config: ServeConfig) -> Self:
        """Raises `ConfigError` for a file that can't be used."""
        return cls(
            KeyRing(config.api_key_file) if config.api_key_file else None,
            KeyRing(config.admin_key_file) if config.admin_key_file else None,
        )

    def __bool__(self) -> bool:
        return self.api is not None or self.admin is not None

    @property
    def tenants(self) -> int:
        """How many share the API."""
        return 1 if self.api is None else len(self.api.tenants)

    def reload(self) -> None:
        """Take over what the files hold now."""
        for ring in (self.api, self.admin):
            if ring is not None:
                ring.reload()
