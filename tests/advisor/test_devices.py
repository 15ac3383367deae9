"""The table of devices, descriptions, and what an unknown one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamictp.advisor.devices import device_names, find_device, mig_slice
from dynamictp.errors import ConfigError


def test_every_device_has_a_source_and_sensible_figures() -> None:
    for name in device_names():
        device = find_device(name)
        assert device.bandwidth.provenance == "data sheet"
        assert device.bandwidth.source
        assert 50 < device.bf16_flops.value / device.bandwidth.value < 500, f"{name}: FLOPs per byte"
        assert 15e9 < device.memory_bytes < 300e9
        if device.nvlinks:
            assert 10 < device.nvlink_gbps < 110


def test_figures_of_the_data_sheets() -> None:
    a100, h100 = find_device("a100-80g"), find_device("H100")
    assert a100.bandwidth.value == 2039e9
    assert a100.bf16_flops.value == 312e12
    assert a100.nvlinks * a100.nvlink_gbps == 300, "600 GB/s both ways"
    assert h100.flops("fp8").value == 1979e12, "dense, not the sparse 3,958"
    assert a100.flops("fp8") == a100.bf16_flops


def test_an_unknown_device_is_told_how_to_be_described() -> None:
    with pytest.raises(ConfigError) as refused:
        find_device("tpu-v9")
    for part in ("tpu-v9", "a100-80g", "YAML", "memory_gib", "bandwidth_gbps", "tflops"):
        assert part in str(refused.value)


def test_a_described_device(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nmemory_gib: 32\nbandwidth_gbps: 1000\ntflops: 200\n")
    device = find_device(str(file))
    assert device.name == "mine"
    assert device.bandwidth.value == 1e12
    assert device.fp8_flops is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name: mine\nmemory_gib: 32", "bandwidth_gbps"),
        ("name: mine\nmemory_gib: 32\nbandwidth_gbps: 1000\ntflops: 0\n", "above 0"),
        ("name: mine\nmemory_gib: 32\nbandwidth_gbps: 1000\ntflops: 200\ncolour: red", "colour"),
    ],
)
def test_incomplete_descriptions(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        find_device(str(file))


def test_a_mig_instance_is_a_slice() -> None:
    device = mig_slice(find_device("a100-80g"), "3g.40gb")
    assert device.memory_bytes == 40e9
    assert device.bf16_flops.value == pytest.approx(312e12 * 3 / 7)
    assert device.bandwidth.value == pytest.approx(2039e9 * 40e9 / (80 * 2**30))
    assert device.nvlinks == 0
    with pytest.raises(ConfigError, match=r"3g\.40gb"):
        mig_slice(device, "large")
