"""Screened output heads: the largest logits are there, with the bits of the whole product."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.kernels import CpuKernels
from kernels.cpu.linear import PanelLinear
from kernels.cpu.screened import ScreenedLinear, largest_logits
from kernels.interface import SUPPORTED_DTYPES
from kernels.reference import ReferenceKernels

# [N, K]: below one panel, off every multiple, odd depths, more columns than threads share.
SHAPES = [(1, 1), (5, 3), (70, 83), (130, 32), (1000, 257), (3001, 64)]
ROWS = [1, 2, 3, 7, 8, 9, 20]

KERNELS = CpuKernels(2)
dtypes = pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def screened(weight: Tensor) -> ScreenedLinear:
    """Whatever this CPU would prefer for the dtype."""
    return ScreenedLinear(KERNELS._calls, weight, PanelLinear(KERNELS._calls, weight, None, 2), 2)


def check(x: Tensor, packed: ScreenedLinear, threads: int = 2) -> Tensor:
    """The largest logits, after a comparison with all of them."""
    every = KERNELS.logits(x, packed)
    found = largest_logits(KERNELS._calls, x, packed, threads)
    assert found.dtype == torch.float32
    assert found.shape == every.shape
    there = found != -math.inf
    assert torch.equal(found[there].view(torch.int32), every[there].view(torch.int32))
    assert torch.equal(found.argmax(dim=1), every.argmax(dim=1))
    best = every.amax(dim=1, keepdim=True)
    assert there[(every == best) & (every != -math.inf)].all(), "all that are largest are there"
    return found


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_largest_are_there(shape: tuple[int, int], dtype: torch.dtype) -> None:
    packed = screened(random(*shape, dtype=dtype))
    for rows in ROWS:
        x = random(rows, shape[1], dtype=dtype, seed=rows)
        for threads in (1, 2, 3):
            check(x, packed, threads)
        strided = random(rows, 2 * shape[1], dtype=dtype, seed=rows)[:, : shape[1]]
        check(strided, packed)


@dtypes
def test_few_panels_are_computed(dtype: torch.dtype) -> None:
    """A row that points to one token, as those of a model do."""
    weight = random(40_000, 256, dtype=dtype)
    packed = screened(weight)
    for token in (0, 17, 12_345, 39_999):
        found = check((weight[token : token + 1].float() * 0.5).to(dtype), packed)
        assert int(found.argmax()) == token
        assert int((found != -math.inf).sum()) <= 32


@dtypes
def test_ties_and_near_ties(dtype: torch.dtype) -> None:
    """Equal rows, and rows whose logits differ by less than what the dtype or the codes can tell apart."""
    weight = random(4000, 96, dtype=dtype)
    best = weight[3] * 2
    for place, factor in ((3500, 1.0), (700, 1.0), (1900, 1.0 + 2.0**-8), (200, 1.0 - 2.0**-9), (64, 1.0)):
        weight[place] = best * factor
    packed = screened(weight)
    for seed in range(20):
        x = best + 0.05 * random(96, dtype=dtype, seed=seed)
        check(x[None], packed)
    check(best[None], packed)


def test_the_first_of_logits_that_round_to_the_same() -> None:
    """The sums are 3196 and 3200, known to 0.1% from the codes; bfloat16 has 3200 for both."""
    weight = torch.zeros(96, 32, dtype=torch.bfloat16)
    weight[64] = 100.0
    weight[2] = 100.0
    weight[2, 7] = 96.0
    found = check(torch.ones(1, 32, dtype=torch.bfloat16), screened(weight))
    assert int(found.argmax()) == 2
    assert found[0, 2] == found[0, 64] == 3200.0


@dtypes
def test_what_the_codes_of_x_leave_out_counts(dtype: torch.dtype) -> None:
    """Beside 127, the codes of 0.49 are 0, but 31 of them make the largest logit."""
    x = torch.full((1, 32), 0.49, dtype=dtype)
    x[0, 0] = 127.0
    weight = torch.zeros(96, 32, dtype=dtype)
    weight[0, 0] = 0.1
    weight[64, 1:] = 1.0
    assert int(check(x, screened(weight)).argmax()) == 64


@dtypes
def test_rows_of_which_nothing_is_known(dtype: torch.dtype) -> None:
    """Zeros make all logits equal; with NaN and infinity the whole row is as in the product."""
    weight = random(300, 40, dtype=dtype)
    packed = screened(weight)
    x = random(6, 40, dtype=dtype, seed=1)
    x[0] = 0.0
    x[1, 5], x[2, 7], x[3, 0], x[3, 1] = math.nan, math.inf, math.inf, -math.inf
    x[4] = torch.finfo(dtype).max
    x[5] = torch.finfo(dtype).tiny
    every = KERNELS.logits(x, packed)
    found = largest_logits(KERNELS._calls, x, packed, 2)
    assert torch.equal(every.nan_to_num(7.0), found.nan_to_num(7.0))  # one row computes a panel for all
    for row in (0, 4, 5):
        check(x[row : row + 1], packed)


@given(
    st.integers(0, 2**31),
    st.sampled_from(SUPPORTED_DTYPES),
    st.floats(-12.0, 12.0),
    st.floats(-12.0, 4.0),
    st.integers(0, 8),
)
def test_any_scale(seed: int, dtype: torch.dtype, x_scale: float, weight_scale: float, outliers: int) -> None:
    """Rows of different lengths, single large elements, and columns that are much larger than the others."""
    weight = random(600, 72, seed=seed) * 2.0**weight_scale
    weight *= 2.0 ** random(600, 1, seed=seed + 1)
    weight[:, seed % 72] *= 30.0
    x = random(2, 72, seed=seed + 2) * 2.0**x_scale
    for place in range(outliers):
        x[place % 2, (seed + 7 * place) % 72] *= 100.0
    limit = torch.finfo(dtype).max
    x, weight = x.clamp(-limit, limit), weight.clamp(-60000, 60000)
    check(x.to(dtype), screened(weight.to(dtype)))


def test_bounds_hold_for_the_worst_rows() -> None:
    """A row of x along the error of a row's codes makes an element as wrong as it can be."""
    weight = random(256, 64, seed=5)
    packed = screened(weight)
    rows = torch.eye(64)
    exact = KERNELS.linear(rows, packed)
    coded = KERNELS.linear(rows, packed._coded)
    errors = (exact - coded).T  # [N, K]
    assert (errors.norm(dim=1) <= packed._errors).all()
    assert (packed._errors <= 1.01 * errors.norm(dim=1) + 0.001 * weight.norm(dim=1)).all()
    for row in errors:
        check((1000.0 * row)[None], packed)


def test_what_cannot_be_coded_is_not_screened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KERNELS, "prefers_codes", True)
    weight = random(64, 64)
    assert isinstance(KERNELS.pack_head(weight), ScreenedLinear)
    weight[5, 5] = math.nan
    packed, x = KERNELS.pack_head(weight), random(1, 64)
    assert isinstance(packed, PanelLinear)
    assert torch.equal(KERNELS.largest_logits(x, packed).isnan(), KERNELS.logits(x, packed).isnan())


def test_errors_of_use() -> None:
    packed = screened(random(64, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"x is torch\.float32 with 64 columns, but the weight is torch"):
        largest_logits(KERNELS._calls, random(1, 64), packed, 1)
    with pytest.raises(ValueError, match=r"with 63 columns, but the weight is torch\.bfloat16 with 64"):
        largest_logits(KERNELS._calls, random(1, 63, dtype=torch.bfloat16), packed, 1)
    assert largest_logits(KERNELS._calls, random(0, 64, dtype=torch.bfloat16), packed, 1).shape == (0, 64)


def test_other_kernels_return_all_logits() -> None:
    kernels, weight, x = ReferenceKernels(), random(50, 16), random(2, 16, seed=1)
    packed = kernels.pack_head(weight)
    assert torch.equal(kernels.largest_logits(x, packed), kernels.logits(x, packed))
