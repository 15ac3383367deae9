"""A server that can't start says why in one sentence and leaves with the right exit code, fast."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamictp.model.load import demo_path
from tests.e2e.live import run_cli
from tests.model.checkpoints import make_checkpoint

pytestmark = pytest.mark.e2e


def refused(code: int, *arguments: str) -> str:
    """What `dynamictp serve ARGUMENTS` said; it must leave with this code and without a traceback."""
    done = run_cli("serve", *arguments)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "DynamicTP ready" not in done.stdout
    return done.stderr


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused(4, "demo", "--port", port)
    assert f"port {port}" in said
    assert "--port" in said


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("no-such-model.gguf",), 3, "no-such-model.gguf: no such file"),
        (("demo", "--kv-memory", "100TiB"), 4, "not enough memory"),
        (("demo", "--kv-memory", "1KiB"), 4, "--kv-memory holds 0 blocks"),
        (("demo", "--kv-memory", "plenty"), 2, "'plenty' is no size"),
        (("demo", "--devices", "2", "--layout", "tp3"), 2, "legal layouts: tp1, tp2, tp1+tp1"),
        (("demo", "--devices", "1", "--layout", "tp1+tp1"), 2, "legal layouts: tp1"),
        (("demo", "--max-model-len", "1000000"), 2, "8192"),
        (("demo", "--page-tokens", "33"), 2, "multiple of 16"),
        (("demo", "--weights", "int8", "--kernels", "torch"), 2, "--weights int8 needs the native kernels"),
        (
            ("demo", "--cores-per-device", "2", "--kernels", "torch"),
            2,
            "--cores-per-device 2 needs the native",
        ),
        (("demo", "--host", "0.0.0.0"), 2, "--insecure"),
        (("demo", "--host", "no-such-host.invalid", "--insecure"), 4, "no-such-host.invalid"),
        (("demo", "--chat-template", "no-such.jinja"), 2, "no-such.jinja"),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int, named: str) -> None:
    assert named in refused(code, "--port", "0", *arguments)


def test_no_place_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    assert "TMPDIR" in refused(4, "demo", "--port", "0")
    assert list(deep.iterdir()) == []


@pytest.mark.parametrize("kept", [0, 1000, -1])
def test_a_truncated_gguf(kept: int, tmp_path: Path) -> None:
    whole = demo_path()
    size = kept if kept >= 0 else whole.stat().st_size + kept
    file = tmp_path / "cut.gguf"
    with whole.open("rb") as source:
        file.write_bytes(source.read(size))
    assert "cut.gguf" in refused(3, str(file), "--port", "0")


def test_a_gguf_of_noise(tmp_path: Path) -> None:
    file = tmp_path / "noise.gguf"
    file.write_bytes(b"GGUF" + bytes(range(256)) * 40)
    assert "noise.gguf" in refused(3, str(file), "--port", "0")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint") / "small")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def one_layer_more(file: Path) -> None:
    config = json.loads(file.read_text())
    config["num_hidden_layers"] = 4
    file.write_text(json.dumps(config))


def other_kind(file: Path) -> None:
    file.write_text(
        json.dumps(
            {**json.loads(file.read_text()), "architectures": ["MambaForCausalLM"], "model_type": "mamba"}
        )
    )


@pytest.mark.parametrize(
    ("name", "damage", "named"),
    [
        ("model.safetensors", cut, "model.safetensors"),
        ("model.safetensors", Path.unlink, "safetensors"),
        ("config.json", one_layer_more, "model.layers.3"),
        ("config.json", other_kind, "MambaForCausalLM is not supported; supported: "),
        ("tokenizer.json", cut, "tokenizer.json"),
        ("tokenizer.json", Path.unlink, "tokenizer"),
    ],
)
def test_a_damaged_checkpoint(
    checkpoint: Path, tmp_path: Path, name: str, damage: Callable[[Path], object], named: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint, folder)
    damage(folder / name)
    assert named in refused(3, str(folder), "--port", "0")
