"""The journal replays to the recorded decisions, from a file and from a ring that lost its beginning."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from dynamictp.control.config import build_control
from dynamictp.control.journal import Entry, Head, Journal, parse_journal, read_journal, replay
from dynamictp.control.state import PlannerState
from dynamictp.errors import ConfigError
from dynamictp.sim.pool import SimPool
from tests.control.pools import cpu_facts, cpu_setup, traffic


def recorded(**values: object) -> SimPool:
    """A pool that grew and shrank, calibrating a model that is wrong by 1.4."""
    setup = cpu_setup("tp1", facts=cpu_facts(slower=1.4), believed=cpu_facts())
    config = msgspec.structs.replace(setup.config, shrink_after_s=40.0, **values)
    pool = SimPool(msgspec.structs.replace(setup, config=config))
    pool.run(traffic("steps:0=0.5,60=8,120=0.5", 300), 300)
    return pool


def test_replay_gives_the_recorded_decisions() -> None:
    pool = recorded()
    lines = [*parse_journal(pool.journal.lines())]
    pairs = [*replay(lines)]
    assert len(pairs) == 600
    assert all(before == now for before, now in pairs)
    targets = [decision.target for decision, _ in pairs if decision.target]
    assert {"tp1", "tp2"} <= set(targets)


def test_a_ring_that_lost_its_beginning_replays_from_its_next_head() -> None:
    pool = recorded(journal_entries=250)
    lines = [*parse_journal(pool.journal.lines())]
    assert 125 <= sum(isinstance(line, Entry) for line in lines) <= 250
    assert all(before == now for before, now in replay(lines))


@pytest.mark.parametrize("kept", [1, 2, 100])
def test_a_short_ring_can_always_be_replayed(kept: int) -> None:
    entries = recorded().journal.last(300)
    journal = Journal(cpu_facts(), build_control({"journal_entries": kept}), PlannerState())
    for entry in entries:
        journal.add(entry.snapshot, entry.decision, PlannerState())
        lines = [*parse_journal(journal.lines())]
        assert isinstance(lines[0], Head)
        assert sum(isinstance(line, Entry) for line in lines) <= kept


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_ends_the_file_and_nothing_else() -> None:
    entries = recorded().journal.last(20)
    config = build_control({"journal_entries": 10})
    journal = Journal(cpu_facts(), config, PlannerState(), Path("/dev/full"))
    for entry in entries:
        journal.add(entry.snapshot, entry.decision, PlannerState())
    assert journal.error
    assert journal.last(20) == entries[10:]
    journal.close()


def test_other_policies_are_found_out() -> None:
    lines = [*parse_journal(recorded().journal.lines())]
    head = lines[0]
    assert isinstance(head, Head)
    stricter = msgspec.structs.replace(head, config=build_control({"target_utilisation": 0.9, "slo": {}}))
    assert any(before != now for before, now in replay([stricter, *lines[1:]]))


def test_file_reload_and_torn_end(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    source = recorded()
    entries = source.journal.last(20)
    journal = Journal(cpu_facts(), source.setup.config, PlannerState(), file)
    for entry in entries[:10]:
        journal.add(entry.snapshot, entry.decision, PlannerState())
    journal.reconfigured(build_control({}), PlannerState())
    journal.add(entries[10].snapshot, entries[10].decision, PlannerState())
    journal.close()
    lines = [*read_journal(file)]
    assert [isinstance(line, Head) for line in lines] == [True, *[False] * 10, True, False]
    assert [line.snapshot.time_s for line in lines if isinstance(line, Entry)] == [
        entry.snapshot.time_s for entry in entries[:11]
    ]
    file.write_bytes(file.read_bytes() + b'{"type":"entry","snap')
    assert len([*read_journal(file)]) == len(lines)
    assert all(a.snapshot.time_s < b.snapshot.time_s for a, b in pairwise(journal.last(5)))


def test_a_server_goes_on_after_a_torn_line_of_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    entry = recorded().journal.last(1)[0]
    config = build_control({})
    for _ in range(3):
        journal = Journal(cpu_facts(), config, PlannerState(), file)
        journal.add(entry.snapshot, entry.decision, PlannerState())
        journal.close()
        file.write_bytes(file.read_bytes() + b'{"type":"entry","snap')
    assert [isinstance(line, Head) for line in read_journal(file)] == [True, False] * 3
    good = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join((good[0], b"{\n", good[1])))
    with pytest.raises(ConfigError, match="line 2 is no line"):
        list(read_journal(file))


def test_a_whole_line_of_another_kind_is_not_taken_for_a_torn_one() -> None:
    """It would be left out without a word where a head follows, as one does every few hundred entries."""
    head = msgspec.json.encode(Head(cpu_facts(), build_control({}), PlannerState())) + b"\n"
    with pytest.raises(ConfigError, match="line 2 is no line"):
        list(parse_journal([head, b'{"type":"entry"}\n', head]))


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="version"):
        [*parse_journal([msgspec.json.encode(Head(cpu_facts(), build_control({}), PlannerState(), 99))])]
    with pytest.raises(ConfigError, match="line 1"):
        [*parse_journal([b"hello\n"])]
    with pytest.raises(ConfigError, match="can't read"):
        [*read_journal(tmp_path / "missing")]
    with pytest.raises(ConfigError, match="can't write"):
        Journal(cpu_facts(), build_control({}), PlannerState(), tmp_path / "missing" / "file")
