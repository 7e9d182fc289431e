"""Kernels that cannot be had are refused in one way, whatever the reason."""

from __future__ import annotations

import sys

import pytest

from kernels.registry import get_kernels


def test_unknown_names_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="kernels='fast' is unknown; choose one of auto"):
        get_kernels("fast")
    with pytest.raises(ValueError, match="kernels='cpu' cannot run on device cuda"):
        get_kernels("cpu", "cuda")
    with pytest.raises(ValueError, match="kernels='triton' cannot run on device cpu"):
        get_kernels("triton", "cpu")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="kernels='cpu' cannot be built: CXX='no-such-compiler'") as caught:
        get_kernels("cpu", "cpu")
    assert "\n" not in str(caught.value)


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name in [name for name in sys.modules if name.startswith(("kernels.triton", "triton."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match="kernels='triton' cannot run on device cpu"):
        get_kernels("triton", "cpu")
    with pytest.raises(ValueError, match="needs the package triton, which is not installed"):
        get_kernels("triton", "cuda")
