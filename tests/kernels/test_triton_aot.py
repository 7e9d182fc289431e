"""Every Triton kernel compiles for the GPUs we name, and neither spills nor overruns shared memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is published for Linux only")

from kernels.triton.aot import TARGETS, Resources, compile_all, compile_variant, variants
from kernels.triton.attention import SPLIT, tile_for
from kernels.triton.linear import linear_kernel


@pytest.mark.parametrize("target", list(TARGETS))
def test_kernels_fit(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_all(target)
    assert {resources.name.split()[0] for resources in compiled} == {
        "attention",
        "merge",
        "rope",
        "add",
        "silu",
        "gelu",
        "soft",
        "linear",
    }
    assert all(resources.registers > 10 for resources in compiled)  # the tool's report was understood
    assert [str(resources) for resources in compiled if not resources.fits] == []


def test_what_does_not_fit_is_told() -> None:
    assert Resources("sm_80", "x", 255, 0, 163 * 1024).fits
    assert not Resources("sm_80", "x", 255, 8, 0).fits
    assert not Resources("sm_80", "x", 64, 0, 163 * 1024 + 1).fits
    assert not Resources("sm_90", "x", 256, 0, 0).fits
    assert not Resources("gfx942", "x", 64, 0, 64 * 1024 + 1).fits
    assert "DOES NOT FIT" in str(Resources("gfx942", "x", 64, 1, 0))


def test_products_of_few_and_many_rows_take_one_instruction_on_amd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each adds up several products in an order of its own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    few, many = (variant for variant in variants(hip=True) if variant.kernel is linear_kernel)
    taken = [
        set(re.findall(r"v_mfma\w+", compile_variant(kind, "gfx942").asm["amdgcn"])) for kind in (few, many)
    ]
    assert taken[0] == taken[1]
    assert len(taken[0]) == 1


@pytest.mark.parametrize("hip", [False, True])
def test_in_float32_tiles_of_both_kinds_are_alike(hip: bool) -> None:
    """Or a row's bits would depend on how its prompt was cut into chunks."""
    for group in (1, 3, 4, 7, 8, 16):
        for head_dim in (16, 64, 80, 128, 256):
            short, long = (
                tile_for(group, head_dim, torch.float32, short=kind, hip=hip) for kind in (True, False)
            )
            assert short == long
            assert SPLIT % short.block_n == 0
