"""Every Triton kernel compiles for the GPUs we name, and neither spills nor overruns shared memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="Triton is published for Linux only")

from kernels.cache_dir import cache_root
from kernels.triton.aot import TARGETS, KernelResources, compile_each, compile_variant, variants
from kernels.triton.attention import SPLIT, tile_for
from kernels.triton.attention_kernels import paged_attention_kernel
from kernels.triton.linear import linear_kernel

TIGHTEST = re.compile(
    r"attention (long|short split) group=2 dim=256 window cap"
    r"|attention long group=(8 dim=128|1 dim=128|2 dim=128 cap)"
)
"""Those of attention that need the most registers or shared memory on targets other than sm_80."""


@pytest.fixture(scope="module", autouse=True)
def _own_cache() -> Iterator[None]:
    """Kernels are compiled again only once their sources, their options or the compiler have changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(cache_root() / "triton"))
        yield


@pytest.mark.parametrize("target", list(TARGETS))
def test_kernels_fit(target: str) -> None:
    """Every variant for sm_80, NVIDIA's with the least room; elsewhere attention where it is tightest.

    The other kernels need a fraction of what there is: elsewhere one of each kind.
    """
    wanted = variants(hip=TARGETS[target].backend == "hip")
    if target != "sm_80":
        tightest = [one for one in wanted if TIGHTEST.match(one.name)]
        assert [one.kernel for one in tightest] == [paged_attention_kernel] * 5
        first_of_each = {one.name.split()[0]: one for one in reversed(wanted)}
        del first_of_each["attention"]
        wanted = [*tightest, *first_of_each.values()]
    compiled = list(compile_each(target, wanted))
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
    assert KernelResources("sm_80", "x", 255, 0, 163 * 1024).fits
    assert not KernelResources("sm_80", "x", 255, 8, 0).fits
    assert not KernelResources("sm_80", "x", 64, 0, 163 * 1024 + 1).fits
    assert not KernelResources("sm_90", "x", 256, 0, 0).fits
    assert not KernelResources("gfx942", "x", 64, 0, 64 * 1024 + 1).fits
    assert "DOES NOT FIT" in str(KernelResources("gfx942", "x", 64, 1, 0))


def test_products_of_few_and_many_rows_take_one_instruction_on_amd() -> None:
    """Each adds up several products in an order of its own."""
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
