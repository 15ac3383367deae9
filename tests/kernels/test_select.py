"""Which kernel path a configuration gets, and why."""

from __future__ import annotations

import msgspec
import pytest

from dynamictp import native
from dynamictp.errors import ConfigError
from dynamictp.kernels.select import LEVEL_ENV, choose_kernels, kernel_level
from dynamictp.testing.harness import TINY
from tests.kernels.models import USABLE


def test_auto_is_native_at_the_best_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEVEL_ENV, raising=False)
    choice = choose_kernels("auto", TINY, 64)
    assert choice.path == "native"
    assert choice.level == USABLE[-1]
    assert choice.tag == f"native-{USABLE[-1]}"


def test_torch_stays_a_choice() -> None:
    assert choose_kernels("torch", TINY, 64).tag == "torch"


def test_what_torch_has_no_kernels_for_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kernels("auto", TINY, 64, native_only="--weights int8").path == "native"
    with pytest.raises(
        ConfigError, match=r"--weights int8 needs the native kernels; leave out --kernels torch"
    ):
        choose_kernels("torch", TINY, 64, native_only="--weights int8")
    monkeypatch.setenv(native.NO_NATIVE_ENV, "1")
    with pytest.raises(ConfigError, match=r"--cores-per-device 2 needs the native kernels: .* not installed"):
        choose_kernels("auto", TINY, 64, native_only="--cores-per-device 2")


def test_a_model_that_does_not_fit_falls_back_or_is_refused() -> None:
    odd = msgspec.structs.replace(TINY, head_dim=24)
    choice = choose_kernels("auto", odd, 64)
    assert choice.path == "torch"
    assert "head_dim is 24" in choice.reason
    with pytest.raises(ConfigError, match="head_dim is 24"):
        choose_kernels("native", odd, 64)


def test_without_the_extension_only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.NO_NATIVE_ENV, "1")
    assert choose_kernels("auto", TINY, 64).path == "torch"
    with pytest.raises(ConfigError, match="not installed"):
        choose_kernels("native", TINY, 64)


def test_a_lower_level_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL_ENV, "portable")
    assert kernel_level() == "portable"
    monkeypatch.setenv(LEVEL_ENV, "avx9")
    with pytest.raises(ConfigError, match="expected one of"):
        kernel_level()
