"""The CPU matrix product: right for every shape and dtype, and the same bits however it is called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.calls import CallRecording, Calls
from kernels.cpu.linear import OneDnnLinear, PanelLinear, linear, pack_linear, prefers_onednn, try_onednn
from kernels.interface import SUPPORTED_DTYPES, PackedLinear

# [N, K]: below one panel, off every multiple, more k than one block holds.
SHAPES = [(1, 1), (5, 3), (16, 8), (70, 83), (33, 257), (130, 600)]
ROWS = [*range(15), 23, 32, 33, 47, 64, 70]

# Half a unit in the last place of the result, and the rounding of a float32 sum.
TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}


@pytest.fixture(scope="module")
def calls() -> Calls:
    return Calls()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def panels(calls: Calls, weight: Tensor, bias: Tensor | None = None) -> PanelLinear:
    """Packed for our kernel, whatever this CPU would prefer for the dtype."""
    return PanelLinear(calls, weight, bias, 2)


def assert_right(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    exact = x.double() @ weight.double().T
    size = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact += bias.double()
        size += bias.double().abs()
    assert y.dtype == x.dtype
    assert y.shape == exact.shape
    relative = TOLERANCE[x.dtype]
    assert ((y.double() - exact).abs() <= relative * exact.abs() + 2.0**-20 * size).all()


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_close_to_float64(calls: Calls, shape: tuple[int, int], dtype: torch.dtype) -> None:
    out_features, in_features = shape
    weight = random(out_features, in_features, dtype=dtype)
    bias = random(out_features, dtype=dtype, seed=1)
    plain, biased = panels(calls, weight), panels(calls, weight, bias)
    for rows in ROWS:
        x = random(rows, in_features, dtype=dtype, seed=2 + rows)
        assert_right(linear(calls, x, plain, 2), x, weight, None)
        assert_right(linear(calls, x, biased, 2), x, weight, bias)


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_chosen_packing_is_right(calls: Calls, dtype: torch.dtype) -> None:
    weight, bias = random(70, 83, dtype=dtype), random(70, dtype=dtype, seed=1)
    packed = pack_linear(calls, weight, bias, 2)
    for rows in (0, 1, 3, 4, 33):
        x = random(rows, 83, dtype=dtype, seed=rows)
        y = linear(calls, x, packed, 2).double()
        exact = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(
            y, exact, rtol=2 * TOLERANCE[dtype], atol=1e-2 if dtype != torch.float32 else 1e-4
        )


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_bits_of_a_row_depend_on_that_row_alone(calls: Calls, dtype: torch.dtype) -> None:
    packed = panels(calls, random(131, 601, dtype=dtype), random(131, dtype=dtype, seed=1))
    x = random(70, 601, dtype=dtype, seed=2)
    alone = torch.cat([linear(calls, x[i : i + 1], packed, 1) for i in range(70)])
    for threads in (1, 2):
        for rows in range(1, 71):
            assert torch.equal(linear(calls, x[:rows], packed, threads), alone[:rows]), (rows, threads)
        for first in range(1, 70, 5):
            assert torch.equal(linear(calls, x[first:], packed, threads), alone[first:]), (first, threads)


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_bits_hold_over_many_row_blocks(calls: Calls, dtype: torch.dtype) -> None:
    packed = panels(calls, random(40, 65, dtype=dtype))
    x = random(1801, 65, dtype=dtype, seed=1)
    y = linear(calls, x, packed, 2)
    for i in (0, 1, 95, 96, 97, 383, 384, 600, 767, 768, 1799, 1800):
        assert torch.equal(linear(calls, x[i : i + 1], packed, 1), y[i : i + 1])


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_bits_of_a_column_depend_on_its_weight_row_alone(calls: Calls, dtype: torch.dtype) -> None:
    weight, x = random(75, 300, dtype=dtype), random(9, 300, dtype=dtype, seed=1)
    whole = linear(calls, x, panels(calls, weight), 2)
    for first, last in ((0, 1), (3, 20), (17, 75), (74, 75)):
        part = linear(calls, x, panels(calls, weight[first:last]), 2)
        assert torch.equal(part, whole[:, first:last])


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_strided_rows_and_weights(calls: Calls, dtype: torch.dtype) -> None:
    wide_x, wide_weight = random(9, 100, dtype=dtype), random(40, 90, dtype=dtype, seed=1)
    x, weight = wide_x[:, 7:64], wide_weight[:, 3:60]
    dense = linear(calls, x.contiguous(), panels(calls, weight.contiguous()), 2)
    assert torch.equal(linear(calls, x, panels(calls, weight), 2), dense)
    columns_first = x.T.contiguous().T
    assert torch.equal(linear(calls, columns_first, panels(calls, weight.T.contiguous().T), 2), dense)
    every_other = linear(calls, x[::2], panels(calls, weight), 2)
    assert torch.equal(every_other, dense[::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_value_survives_widening_and_rounding(calls: Calls, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    one = torch.ones(1, 1, dtype=dtype)
    as_x = linear(calls, every[:, None], panels(calls, one), 2)[:, 0]
    as_weight = linear(calls, one, panels(calls, every[:, None]), 2)[0]
    # Several tiles of rows take the way that widens whole blocks.
    as_block = linear(calls, one.expand(32, 1), panels(calls, every[:, None]), 2)[31]
    if dtype == torch.bfloat16 and calls(
        "quire_linear_bf16_in_pairs"
    ):  # that hardware takes subnormal ones as 0
        every = torch.where(every.abs() < torch.finfo(dtype).smallest_normal, 0.0 * every, every)
    for y in (as_x, as_weight, as_block):
        torch.testing.assert_close(y, every, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_rounds_to_nearest_even(calls: Calls, dtype: torch.dtype) -> None:
    scale = torch.exp2(torch.randint(-24, 16, (20000, 2), generator=torch.Generator().manual_seed(3)).float())
    x = (random(20000, 2) * scale).to(dtype)
    expected = (x[:, 0].float() + x[:, 1].float()).to(dtype)
    y = linear(calls, x, panels(calls, torch.ones(1, 2, dtype=dtype)), 2)[:, 0]
    assert torch.equal(y, expected)
    assert not torch.equal(x[:, 0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_no_columns_no_features_no_rows(calls: Calls, dtype: torch.dtype) -> None:
    def product(rows: int, depth: int, columns: int, bias: Tensor | None = None) -> Tensor:
        weight = panels(calls, torch.ones(columns, depth, dtype=dtype), bias)
        return linear(calls, torch.ones(rows, depth, dtype=dtype), weight, 2)

    assert product(3, 4, 0).shape == (3, 0)
    assert product(0, 4, 5).shape == product(0, 0, 5).shape == (0, 5)
    bias = torch.arange(5.0, dtype=dtype)
    for rows in (3, 40):
        assert torch.equal(product(rows, 0, 5, bias), bias.expand(rows, 5))


def test_a_recorded_product_knows_the_next_weight(calls: Calls) -> None:
    x, weights = random(5, 9), [panels(calls, random(33, 9, seed=seed)) for seed in range(3)]
    made = calls.record(lambda sizes: [linear(calls, x[: sizes[0]], each, 2) for each in weights][-1], [4])
    assert made is not None
    recording = made[1]
    assert isinstance(recording, CallRecording)
    words, ends = recording._words, [*recording._begins[1:], len(recording._words)]
    assert [words[end - 1] for end in ends] == [weights[1].address, weights[2].address, 0]


def test_originals_may_go(calls: Calls) -> None:
    weight, bias, x = random(20, 30), random(20, seed=1), random(2, 30, seed=2)
    packed = pack_linear(calls, weight, bias, 2)
    expected = linear(calls, x, packed, 2)
    weight.zero_()
    bias.zero_()
    assert torch.equal(linear(calls, x, packed, 2), expected)


def test_refusals_say_what_was_wrong(calls: Calls) -> None:
    with pytest.raises(ValueError, match="float64"):
        pack_linear(calls, torch.ones(2, 2, dtype=torch.float64), None, 1)
    with pytest.raises(ValueError, match="2 dimensions"):
        pack_linear(calls, torch.ones(2), None, 1)
    with pytest.raises(ValueError, match="bias of shape"):
        pack_linear(calls, torch.ones(2, 3), torch.ones(3), 1)
    packed = panels(calls, torch.ones(2, 3))
    with pytest.raises(ValueError, match="4 columns"):
        linear(calls, torch.ones(1, 4), packed, 1)
    with pytest.raises(ValueError, match="float16"):
        linear(calls, torch.ones(1, 3, dtype=torch.float16), packed, 1)
    with pytest.raises(TypeError, match="PackedLinear"):
        linear(calls, torch.ones(1, 3), PackedLinear(), 1)


@pytest.mark.parametrize("amx", [False, True])
def test_onednn_only_where_hardware_is_left_to_it(monkeypatch: pytest.MonkeyPatch, amx: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert prefers_onednn(torch.bfloat16) == amx
    assert not prefers_onednn(torch.float32)
    assert not prefers_onednn(torch.float16)


def test_onednn_refusal_falls_back(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the flags of another CPU, whatever oneDNN does here, the product is right."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    weight, x = random(24, 40, dtype=torch.bfloat16), random(3, 40, dtype=torch.bfloat16, seed=1)
    packed = pack_linear(calls, weight, None, 2)
    assert isinstance(packed, PanelLinear) == (try_onednn(weight, None) is None)
    assert_right(linear(calls, x, packed, 2), x, weight, None)


def test_onednn_packing(calls: Calls) -> None:
    """The path itself, in float32, which every x86 CPU runs."""
    weight, bias = random(24, 40), random(24, seed=1)
    try:
        packed = OneDnnLinear(weight, bias)
    except RuntimeError as error:
        pytest.skip(f"oneDNN does not pack float32 on this CPU: {error}")
    for rows in (0, 1, 3, 4, 9):
        x = random(rows, 40, seed=rows)
        assert_right(linear(calls, x, packed, 2), x, weight, bias)
