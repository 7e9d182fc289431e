"""Screened output heads: the logits that decide are there, with the bits of the whole product."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.kernels import CpuKernels
from kernels.cpu.linear import PanelLinear
from kernels.cpu.screened import ScreenedLinear, deciding_logits
from kernels.interface import SUPPORTED_DTYPES, Choices, DrawOptions
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


def greedy(x: Tensor) -> Choices:
    return Choices(torch.zeros(len(x)), torch.zeros(len(x), dtype=torch.int64))


def check(x: Tensor, packed: ScreenedLinear, threads: int = 2) -> Tensor:
    """The largest logits, after a comparison with all of them."""
    return compare(x, packed, greedy(x), threads)


def compare(x: Tensor, packed: ScreenedLinear, choices: Choices, threads: int = 2) -> Tensor:
    every = KERNELS.logits(x, packed)
    found = deciding_logits(KERNELS._calls, x, packed, choices, threads)
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


def mixed(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def draw(logits: Tensor, temperature: Tensor, seeds: Tensor) -> list[int]:
    """At position -1, where a draw's key is the mixed seed."""
    rows = len(logits)
    options = DrawOptions(
        temperature=temperature,
        min_p=torch.zeros(rows),
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.ones(rows, dtype=torch.float64),
        num_draws=torch.ones(rows, dtype=torch.int64),
        seeds=seeds,
    )
    return KERNELS.draw(logits, [-1] * rows, options)[0]


def check_draws(x: Tensor, packed: ScreenedLinear, temperature: Tensor, seed: int) -> Tensor:
    """The logits that decide, after a comparison of the tokens that they and all logits give."""
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(x),), generator=generator)
    keys = np.array([mixed(seed % 2**64) for seed in seeds.tolist()], dtype=np.uint64).view(np.int64)
    found = compare(x, packed, Choices(temperature, torch.from_numpy(keys)))
    every = KERNELS.logits(x, packed)
    assert draw(found, temperature, seeds) == draw(every, temperature, seeds)
    return found


@dtypes
@pytest.mark.parametrize("shape", [*SHAPES, (6000, 48)], ids=str)
@pytest.mark.parametrize("temperature", [0.02, 0.3, 1.0, 2.5, 100.0])
def test_draws_are_the_same(shape: tuple[int, int], dtype: torch.dtype, temperature: float) -> None:
    """Of logits near each other, and of some that stand out."""
    packed = screened(random(*shape, dtype=dtype))
    for rows in (1, 2, 4, 9):
        for scale in (0.1, 1.0, 4.0):
            x = random(rows, shape[1], seed=rows) * scale
            for seed in range(6):
                check_draws(x.to(dtype), packed, torch.full((rows,), temperature), seed)


@dtypes
def test_greedy_and_random_rows_share_a_step(dtype: torch.dtype) -> None:
    weight = random(5000, 64, dtype=dtype)
    packed = screened(weight)
    for seed in range(20):
        x = random(5, 64, dtype=dtype, seed=seed)
        check_draws(x, packed, torch.tensor([0.0, 1.0, 0.0, 0.7, 3.0]), seed)


@dtypes
def test_few_groups_are_computed_for_a_draw(dtype: torch.dtype) -> None:
    """A group is one token in 64; bounds leave a few groups of them."""
    weight = random(48_000, 256, dtype=dtype)
    packed = screened(weight)
    x = (random(1, 256, seed=3) * 0.2).to(dtype)  # logits of about 3
    counts = []
    for seed in range(20):
        found = check_draws(x, packed, torch.ones(1), seed)
        counts.append(int((found != -math.inf).sum()) / 48_000)
    assert sum(counts) / 20 < 0.25
    assert max(counts) < 0.5


def test_every_key_draws_what_all_logits_give() -> None:
    """Draws as often as bounds that are a little too narrow would be found out."""
    weight = random(4096, 32, dtype=torch.bfloat16)
    packed = screened(weight)
    x = random(8, 32, dtype=torch.bfloat16, seed=1) * 0.5
    for seed in range(300):
        check_draws(x, packed, torch.full((8,), 0.5 + seed % 3), seed)


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
def test_what_the_codes_of_a_weight_leave_out_counts(dtype: torch.dtype) -> None:
    """Beside 127, the codes of 0.45 are 0: the codes say 0 of the row whose logit is the largest."""
    x = torch.ones(1, 32, dtype=dtype)
    x[0, 0] = 0.0
    weight = torch.zeros(96, 32, dtype=dtype)
    weight[0, 1:] = 0.4375
    weight[64, 0] = 127.0
    weight[64, 1:] = 0.453125
    assert int(check(x, screened(weight)).argmax()) == 64


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
    for temperature in (0.0, 1.0):  # one row computes a panel for all
        choices = Choices(torch.full((6,), temperature), torch.arange(6))
        found = deciding_logits(KERNELS._calls, x, packed, choices, 2)
        assert torch.equal(every.nan_to_num(7.0), found.nan_to_num(7.0))
    for row in (0, 4, 5):
        check(x[row : row + 1], packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1e20, 1e30, 1e34, 1e36])
def test_products_with_codes_that_overflow(dtype: torch.dtype, size: float) -> None:
    """The codes' sum of the largest logit's row is minus infinity before its scale, a small one, is applied."""
    weight = torch.zeros(256, 64, dtype=dtype)
    weight[70, :32] = -1e-3
    weight[70, 32] = 1.0
    weight[0, 32] = 0.5
    x = torch.full((1, 64), size, dtype=dtype)
    assert int(check(x, screened(weight)).argmax()) == 70
    check_draws(x, screened(weight), torch.ones(1), 0)


def test_logits_that_round_to_minus_infinity() -> None:
    """Those of a group's tokens weigh nothing, though they are near others that do."""
    weight = -65560.0 / 64 / 250 - torch.rand(4096, 1, generator=torch.Generator().manual_seed(0)) * 0.004
    weight = weight.repeat(1, 64)
    weight[5::97] = -65440.0 / 64 / 250
    packed = screened(weight.half())
    x = torch.full((1, 64), 250.0, dtype=torch.float16)
    for temperature in (200.0, 2000.0, 1e5):
        for seed in range(60):
            check_draws(x, packed, torch.full((1,), temperature), seed)


@given(
    st.integers(0, 2**31),
    st.sampled_from(SUPPORTED_DTYPES),
    st.floats(-12.0, 12.0),
    st.floats(-12.0, 4.0),
    st.integers(0, 8),
    st.floats(0.001, 50.0),
)
def test_any_scale(
    seed: int, dtype: torch.dtype, x_scale: float, weight_scale: float, outliers: int, temperature: float
) -> None:
    """Rows of different lengths, single large elements, and columns that are much larger than the others."""
    weight = random(600, 72, seed=seed) * 2.0**weight_scale
    weight *= 2.0 ** random(600, 1, seed=seed + 1)
    weight[:, seed % 72] *= 30.0
    x = random(2, 72, seed=seed + 2) * 2.0**x_scale
    for place in range(outliers):
        x[place % 2, (seed + 7 * place) % 72] *= 100.0
    limit = torch.finfo(dtype).max
    x, weight = x.clamp(-limit, limit), weight.clamp(-60000, 60000)
    packed = screened(weight.to(dtype))
    if check(x.to(dtype), packed).amax(dim=1).isfinite().all():
        check_draws(x.to(dtype), packed, torch.full((2,), temperature), seed)


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
    assert torch.equal(KERNELS.deciding_logits(x, packed, greedy(x)).isnan(), KERNELS.logits(x, packed).isnan())


def test_errors_of_use() -> None:
    packed = screened(random(64, 64, dtype=torch.bfloat16))
    x, narrow = random(1, 64), random(1, 63, dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"x is torch\.float32 with 64 columns, but the weight is torch\.bfloat16"
    ):
        deciding_logits(KERNELS._calls, x, packed, greedy(x), 1)
    with pytest.raises(ValueError, match=r"with 63 columns, but the weight is torch\.bfloat16 with 64"):
        deciding_logits(KERNELS._calls, narrow, packed, greedy(narrow), 1)
    none = random(0, 64, dtype=torch.bfloat16)
    assert deciding_logits(KERNELS._calls, none, packed, greedy(none), 1).shape == (0, 64)


def test_other_kernels_return_all_logits() -> None:
    kernels, weight, x = ReferenceKernels(), random(50, 16), random(2, 16, seed=1)
    packed = kernels.pack_head(weight)
    assert torch.equal(kernels.deciding_logits(x, packed, greedy(x)), kernels.logits(x, packed))
