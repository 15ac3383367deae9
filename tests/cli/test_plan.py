"""`dynamictp plan` and `calibrate`: output, JSON, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOPOLOGIES = Path(__file__).parents[1] / "advisor" / "topologies"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dynamictp", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_plan_for_a_terminal() -> None:
    done = run("plan", "llama-3.1-8b", "--device", "l40s", "--devices", "2", "--no-classes")
    assert done.returncode == 0, done.stderr
    assert "dynamictp serve llama-3.1-8b" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_plan_as_json() -> None:
    topology = str(TOPOLOGIES / "h100-colour.txt")
    done = run("plan", "qwen2.5-14b", "--topology", topology, "--json", "--rate", "3", "--no-classes")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["machine"]["device"] == "h100-80g", "from the product names in the text"
    assert data["workload"]["rate_per_s"] == 3
    assert data["best"]


def test_torch_stays_out() -> None:
    code = (
        "import sys; from dynamictp.cli import cli; "
        "cli.main(['plan', 'llama-3-8b', '--device', 'a10', '--devices', '1', '--no-classes'], "
        "standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("llama-3-8b",), 2, "--device"),
        (("llama-3-8b", "--device", "abacus"), 2, "describe it in a YAML file"),
        (("llama-3-8b", "--device", "a10", "--workload", "poems"), 2, "poems"),
        (("llama-3-8b", "--device", "a10", "--rate", "0"), 2, "--rate"),
        (("llama-3-8b", "--device", "a10", "--context", "9999999"), 2, "holds up to 8192"),
        (("llama-3-8b", "--device", "a10", "--topology", "/no/such/file"), 2, "/no/such/file"),
        (("llama-3-8b", "--device", "a10", "--objective", "beauty"), 2, "beauty"),
        (("llama-3-8b", "--device", "local", "--nodes", "2"), 2, "--nodes"),
        (("llama-3-8b", "--device", "a10", "--weight-bits", "99"), 2, "--weight-bits"),
        (("llama-3-8b", "--device", "a10", "--beside", "qwen3-8b:fast"), 2, "qwen3-8b:fast"),
        (("llama-3-8b", "--device", "a10", "--calibration", "/none.json"), 2, "/none.json"),
        (("no-such-model", "--device", "a10"), 3, "no-such-model"),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int, named: str) -> None:
    done = run("plan", *arguments)
    assert done.returncode == code, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_a_malformed_topology_points_at_its_line(tmp_path: Path) -> None:
    file = tmp_path / "topo.txt"
    file.write_text("\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tNV2\tX\n")
    done = run("plan", "llama-3-8b", "--device", "a100", "--topology", str(file))
    assert done.returncode == 2
    assert "line 3: GPU1-GPU0 is NV2 here and NV4 in line 2" in done.stderr


def test_calibrate_needs_a_server() -> None:
    assert run("calibrate", "http://127.0.0.1:9", "--degrees", "one").returncode == 2
