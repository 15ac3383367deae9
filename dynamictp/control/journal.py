"""The journal: every snapshot and decision as a JSON line, in a ring in memory and, if wanted, a file.

The first line is a head (version, facts, parameters, planner state), and so is any line after which something
of these changed or the state can't be derived: a journal can be cut at any head. Replaying it gives the
recorded decisions again, since deciding is pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from os import SEEK_END
from pathlib import Path
from typing import BinaryIO

import msgspec

from dynamictp.control.capacity import CostBook
from dynamictp.control.config import ControlConfig
from dynamictp.control.facts import PoolFacts
from dynamictp.control.planner import decide
from dynamictp.control.state import PlannerState
from dynamictp.control.values import Decision, PoolSnapshot
from dynamictp.errors import ConfigError

VERSION = 1
_HEAD_EVERY = 600
"""Entries after which the state is written again, so that a ring that lost its beginning can be replayed;
in a short ring there are two heads at least."""


class Head(msgspec.Struct, frozen=True, tag="head"):
    """What the entries after it were decided with."""

    facts: PoolFacts
    config: ControlConfig
    state: PlannerState
    version: int = VERSION


class Entry(msgspec.Struct, frozen=True, tag="entry"):
    """One decision and what it was based on."""

    snapshot: PoolSnapshot
    decision: Decision


Line = Head | Entry
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Line)


class Journal:
    """Owner of the latest entries of one pool, and of its file if it has one.

    A file that can't be written to is given up (`error` says why); the ring goes on.
    """

    def __init__(
        self, facts: PoolFacts, config: ControlConfig, state: PlannerState, file: Path | None = None
    ) -> None:
        self.error: str | None = None
        self._facts, self._config = facts, config
        self._ring: deque[Line] = deque()
        self._entries = 0
        self._since_head = 0
        self._file: BinaryIO | None = None
        if file is not None:
            try:
                self._file = _opened(file)
            except OSError as error:
                raise ConfigError(f"can't write the journal {file}: {error.strerror}") from error
        self._append(Head(facts, config, state))

    def add(self, snapshot: PoolSnapshot, decision: Decision, state: PlannerState) -> None:
        """A decision was made; `state` is the planner's after it."""
        self._append(Entry(snapshot, decision))
        self._entries += 1
        self._since_head += 1
        if self._since_head >= min(_HEAD_EVERY, max(self._config.journal_entries // 2, 1)):
            self._append(Head(self._facts, self._config, state))
        while self._entries > self._config.journal_entries:
            self._entries -= isinstance(self._ring.popleft(), Entry)

    def reconfigured(self, config: ControlConfig, state: PlannerState) -> None:
        """Parameters were reloaded: entries from here on were decided with these."""
        self._config = config
        self._append(Head(self._facts, config, state))

    def last(self, count: int) -> list[Entry]:
        """The newest entries, the newest last."""
        entries = [line for line in self._ring if isinstance(line, Entry)]
        return entries[-count:] if count > 0 else []

    def lines(self) -> Iterator[bytes]:
        """The ring as JSON lines, from its first head on."""
        return map(_ENCODER.encode, _from_head(self._ring))

    def close(self) -> None:
        """What is still buffered for a file that can't be written to is lost with it."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _append(self, line: Line) -> None:
        self._ring.append(line)
        if isinstance(line, Head):
            self._since_head = 0
        if self._file is None:
            return
        try:
            self._file.write(_ENCODER.encode(line) + b"\n")
            self._file.flush()
        except OSError as error:
            self.error = error.strerror or str(error)
            self.close()


def _opened(path: Path) -> BinaryIO:
    """The file at its end. A line that an earlier writer could not finish is ended: its disk was full, or it
    was killed."""
    file = path.open("ab")
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as before:
            before.seek(-1, SEEK_END)
            if before.read() != b"\n":
                file.write(b"\n")
    return file


def read_journal(path: Path) -> Iterator[Line]:
    """Lines of a journal file. Raises `ConfigError` for one that is none, or of another version."""
    try:
        with path.open("rb") as file:
            yield from parse_journal(file)
    except OSError as error:
        raise ConfigError(f"can't read the journal {path}: {error.strerror}") from error


def parse_journal(lines: Iterable[bytes]) -> Iterator[Line]:
    """Raises `ConfigError` for a line that is none, or a head of another version. A torn line, whose writer
    was killed or had a full disk, is left out at the end and before the head of the next writer."""
    before: Line | None = None
    torn: ConfigError | None = None
    for number, text in enumerate(lines, 1):
        try:
            line = _DECODER.decode(text)
        except msgspec.DecodeError as error:
            torn = torn or ConfigError(f"line {number} is no line of a journal: {error}")
            whole = isinstance(error, msgspec.ValidationError)
            if whole or before is None:
                raise torn from error
            continue
        if torn is not None and not isinstance(line, Head):
            raise torn
        torn = None
        if isinstance(line, Head) and line.version != VERSION:
            raise ConfigError(f"the journal has version {line.version}, this program reads {VERSION}")
        yield line
        before = line
    if torn is not None and text.endswith(b"\n"):
        raise torn


def replay(lines: Iterable[Line]) -> Iterator[tuple[Decision, Decision]]:
    """(recorded decision, the decision that these policies make now) for every entry after the first head.

    They are equal while the policies are those that wrote it.
    """
    head: Head | None = None
    for line in _from_head(lines):
        if isinstance(line, Head):
            if head is None or (line.facts, line.config) != (head.facts, head.config):
                cost = CostBook(line.facts)
            head, state = line, line.state
            continue
        assert head is not None
        decision, state = decide(line.snapshot, state, head.config, cost)
        yield line.decision, decision


def _from_head(lines: Iterable[Line]) -> Iterator[Line]:
    begun = False
    for line in lines:
        begun = begun or isinstance(line, Head)
        if begun:
            yield line
