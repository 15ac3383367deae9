"""Ctrl-C while `serve` imports the server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_DRIVER = """
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

class Interrupted(MetaPathFinder, Loader):
    def find_spec(self, name, path, target=None):
        return ModuleSpec(name, self) if name == "dynamictp.server.launch" else None

    def exec_module(self, module):
        exec("import signal; signal.raise_signal(signal.{number}); [None for _ in range(1000)]")

sys.meta_path.insert(0, Interrupted())
from dynamictp.cli import main
sys.argv = ["dynamictp", "serve", "demo"]
main()
"""


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", 0)])
def test_a_signal_within_an_import_ends_with_the_code_of_the_command(
    tmp_path: Path, number: str, code: int
) -> None:
    """Python ends a module by the signal when a KeyboardInterrupt left an `exec`, even a caught one."""
    (tmp_path / "driver.py").write_text(_DRIVER.replace("{number}", number))
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    ended = subprocess.run(
        [sys.executable, "-m", "driver"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (code, "")
    assert "Traceback" not in ended.stderr
