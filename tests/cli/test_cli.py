"""The command line: help, exit codes, and what it says when nothing answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dynamictp", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_print_config_can_be_read_back(tmp_path: Path) -> None:
    printed = run("serve", "--layout", "tp2", "--print-config")
    assert printed.returncode == 0
    assert "mode: dynamic\n" in printed.stdout
    file = tmp_path / "again.yaml"
    file.write_text(printed.stdout)
    assert run("serve", "--config", str(file), "--print-config").stdout == printed.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("serve", "--layout", "tpx"), 2, "tpx"),
        (("serve", "--port", "x"), 2, "--port"),
        (("serve", "--no-such-flag"), 2, "--no-such-flag"),
        (("nonsense",), 2, "nonsense"),
        (("serve", "/no/such/\udcff/model"), 3, "/model: no such file"),
        (("layout", "set", "tp2", "--url", "http://127.0.0.1:9"), 1, "--url"),
        (("layout", "set", "tp\udcff", "--url", "http://127.0.0.1:9"), 1, "no layout"),
        (("layout", "show", "--url", "http://[::1"), 1, "--url"),
        (("layout", "show", "--url", "nonsense"), 1, "--url"),
        (("layout", "set", "tp2", "--drain-deadline-s", "soon"), 2, "--drain-deadline-s"),
        (("serve", "no-such-model\udcff"), 2, "--served-model-name"),
        (("serve", "--config", "/no/such/\udcff"), 2, "No such file"),
        (("serve", "--config", "/"), 2, "is a directory"),
        (("serve", "/dev/null"), 3, "expected a folder"),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int, named: str) -> None:
    done = run(*arguments)
    assert done.returncode == code, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
