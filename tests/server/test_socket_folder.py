"""The folder of sockets: the owner's alone, removed, and removed for those that could not."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamictp.errors import ResourceError
from dynamictp.server.socket_folder import SocketFolder


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Paths of sockets are short: a test's own folder may be too deep.
    with tempfile.TemporaryDirectory(prefix="sf-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_a_folder_is_the_owner_s_and_goes_with_it(parent: Path) -> None:
    folder = SocketFolder(4)
    assert folder.path.parent == parent
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "engine-1.sock").touch()
    folder.close()
    assert list(parent.iterdir()) == []


@pytest.mark.usefixtures("parent")
def test_files_of_an_engine_that_ended_are_removed() -> None:
    folder = SocketFolder(2)
    gone = ("engine-1.json", "engine-1.sock", "worker-0.1-1.sock", "worker-1.12-1.sock")
    kept = (
        "lock",
        "engine-11.json",
        "engine-2.sock",
        "worker-0.1-2.sock",
        "worker-1.1-11.sock",
        "worker-0.1.json",
    )
    for name in (*gone, *kept):
        (folder.path / name).touch()
    folder.remove_of_engine(1)
    assert {file.name for file in folder.path.iterdir()} == set(kept)
    folder.close()


def test_only_folders_whose_server_is_gone_are_removed(parent: Path) -> None:
    living = SocketFolder(1)
    stale = parent / "dynamictp-stale"
    stale.mkdir()
    (stale / "lock").touch()
    (stale / "worker-0.1-1.sock").touch()
    starting = parent / "dynamictp-starting"
    starting.mkdir()
    other = parent / "else"
    other.mkdir()
    (other / "lock").touch()
    link = parent / "dynamictp-link"
    link.symlink_to(other)
    folder = SocketFolder(1)
    assert set(parent.iterdir()) == {living.path, folder.path, starting, other, link}
    assert (other / "lock").exists()
    living.close()
    folder.close()


def test_a_place_that_can_not_be_is_refused(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = parent / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ResourceError, match="too long for sockets"):
        SocketFolder(1)
    assert list(deep.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(parent / "missing"))
    with pytest.raises(ResourceError, match="set TMPDIR"):
        SocketFolder(1)
