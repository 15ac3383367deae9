"""Key files: what is read, what is refused, and that a broken file never replaces a good one."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamictp.errors import ConfigError
from dynamictp.server.keys import Identity, KeyRing, read_keys


def test_a_line_is_a_key_a_tenant_and_a_priority(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-one\n\nsk-two acme   # a customer\nsk-three acme -3\n\t#x\nsk#4 #5\r\n")
    ring = KeyRing(str(file))
    assert ring.find("sk-one") == Identity()
    assert ring.find("sk-two") == Identity("acme")
    assert ring.find("sk-three") == Identity("acme", -3)
    assert ring.find("sk#4") == Identity()
    assert ring.find("sk") is None
    assert ring.find("sk-four") is None
    assert ring.find("sk-thre") is None
    assert ring.tenants == {"", "acme"}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "no keys"),
        ("# nothing\n", "no keys"),
        ("good\nsk-secret a b\n", "line 2.*priority"),
        ("sk-secret a 101\n", "line 1.*priority"),
        ("sk-secret a 1 more\n", "line 1.*expected key"),
        ("sk-secret ä\n", "line 1.*tenant"),
        ("sk-secret\nsk-secret other\n", "line 2.*twice"),
        ("sk-secr€t\n", "line 1.*ASCII"),
    ],
)
def test_a_wrong_line_is_named_and_not_shown(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ConfigError, match=named) as refused:
        read_keys(str(file))
    assert "secr" not in str(refused.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        read_keys(str(tmp_path / "none"))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not text"):
        read_keys(str(tmp_path / "bytes"))


def test_a_reload_takes_the_new_keys_or_keeps_the_old(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    ring = KeyRing(str(file))
    file.write_text("new a\n")
    assert ring.reload()
    assert (ring.find("old"), ring.find("new")) == (None, Identity("a"))
    file.write_text("new a b c d\n")
    assert not ring.reload()
    assert ring.find("new") == Identity("a")
    assert "old keys stay" in caplog.text
