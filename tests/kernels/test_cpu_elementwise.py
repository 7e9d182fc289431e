"""The C++ norms, activations, caps, RoPE and KV write against the plain ones, and bits against themselves."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_cases import make_metadata, same_bits
from torch import Tensor

from kernels.cpu import CpuKernels
from kernels.interface import SUPPORTED_DTYPES, Activation, HeadLayout, QKNorm, kv_pool_shape
from kernels.reference import ReferenceKernels

# A rounding may go the other way where float32 sums differ in their last bits: one unit of the type, twice.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}
DTYPES = pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
ACTIVATIONS = pytest.mark.parametrize("activation", list(Activation))
SIZES = [1, 5, 16, 31, 64, 80, 576]


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    return CpuKernels(2)


@pytest.fixture
def reference() -> ReferenceKernels:
    return ReferenceKernels()


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(ours: Tensor, right: Tensor) -> None:
    assert ours.dtype == right.dtype
    torch.testing.assert_close(ours, right, atol=TOLERANCE[ours.dtype], rtol=TOLERANCE[ours.dtype])


@DTYPES
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(cpu: CpuKernels, reference: ReferenceKernels, size: int, dtype: torch.dtype) -> None:
    weight = draw(size, dtype=dtype, seed=1)
    for rows in (0, 1, 3, 200):
        x = draw(rows, size + 3, dtype=dtype, seed=rows)[:, :size]
        assert_close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
        assert_close(cpu.rms_norm(x, weight.float(), 1e-5), reference.rms_norm(x, weight.float(), 1e-5))


@HALVES
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_norms_with_a_float32_weight_round_once(
    request: pytest.FixtureRequest, name: str, dtype: torch.dtype
) -> None:
    """Nearly always the exact result's rounding; with a rounding before the weight a quarter would differ."""
    kernels = request.getfixturevalue(name)
    x, weight = draw(100, 64, dtype=dtype), 1.0 + 0.3 * draw(64, dtype=torch.float32, seed=1)
    wide = x.double()
    exact = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight).to(dtype)
    assert (kernels.rms_norm(x, weight, 1e-6) == exact).float().mean() > 0.995
    residual = torch.zeros_like(x)
    assert (kernels.add_rms_norm(x, residual, weight, 1e-6) == exact).float().mean() > 0.995
    assert (kernels.rms_norm(x, weight.to(dtype), 1e-6) == exact).float().mean() < 0.9


@DTYPES
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm(cpu: CpuKernels, reference: ReferenceKernels, size: int, dtype: torch.dtype) -> None:
    weight = draw(size, dtype=dtype, seed=1)
    for rows in (0, 1, 7, 200):
        x, residual = draw(rows, size, dtype=dtype, seed=2), draw(rows, size, dtype=dtype, seed=3)
        onto = residual.clone()
        ours = cpu.add_rms_norm(x, onto, weight, 1e-6)
        assert_close(ours, reference.add_rms_norm(x, residual, weight, 1e-6))
        assert same_bits(onto, residual)  # one addition, one rounding
        onto = residual.clone()
        ours = cpu.add_rms_norm(x, onto, weight.float(), 1e-6)
        assert_close(ours, reference.add_rms_norm(x, residual, weight.float(), 1e-6))
        assert same_bits(onto, residual)


@DTYPES
@ACTIVATIONS
@pytest.mark.parametrize("size", SIZES)
def test_activate_mul(
    cpu: CpuKernels, reference: ReferenceKernels, size: int, activation: Activation, dtype: torch.dtype
) -> None:
    for rows in (0, 1, 3, 300):
        gate_up = draw(rows, 2 * size, dtype=dtype, seed=rows) * 8
        # In float32 torch's GELU keeps few digits of gates around -5: it adds 1 to a tanh near -1.
        exact = gate_up.double() if dtype == torch.float32 else gate_up
        right = reference.activate_mul(exact, activation).to(dtype)
        assert_close(cpu.activate_mul(gate_up, activation), right)


@DTYPES
@ACTIVATIONS
def test_activations_of_extreme_values(cpu: CpuKernels, activation: Activation, dtype: torch.dtype) -> None:
    gate = torch.tensor([[-3e4, -200.0, -89.0, -0.0, 0.0, 89.0, 3e4, float("inf"), float("nan")]], dtype=dtype)
    y = cpu.activate_mul(torch.cat((gate, torch.ones_like(gate)), dim=1), activation)
    silu = activation is Activation.SILU
    exact = torch.nn.functional.silu if silu else partial(torch.nn.functional.gelu, approximate="tanh")
    expected = exact(gate.double()).to(dtype)
    torch.testing.assert_close(y, expected, atol=1e-30, rtol=TOLERANCE[dtype], equal_nan=True)


def test_gelu_is_the_formula_of_its_tanh_approximation(cpu: CpuKernels) -> None:
    gate = torch.linspace(-6.0, 6.0, 1001)[None]
    wide = gate.double()
    inner = (2.0 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)
    exact = 0.5 * wide * (1.0 + inner.tanh())
    y = cpu.activate_mul(torch.cat((gate, torch.ones_like(gate)), dim=1), Activation.GELU_TANH)
    torch.testing.assert_close(y.double(), exact, atol=1e-9, rtol=2e-6)


@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0])
def test_soft_cap(cpu: CpuKernels, reference: ReferenceKernels, cap: float) -> None:
    for shape in ((0, 7), (1, 1), (3, 31), (2, 9001)):
        x = draw(*shape, dtype=torch.float32, seed=shape[1]) * cap
        x.view(-1)[:5] = torch.tensor([0.0, 1e-30, -1e-6, 1e9, float("-inf")])[: x.numel()]
        exact = cap * (x.double() / cap).tanh()
        for kernels in (cpu, reference):
            ours = x.clone()
            assert kernels.soft_cap(ours, cap) is ours
            torch.testing.assert_close(ours.double(), exact, atol=1e-35, rtol=1e-6)
    assert cpu.soft_cap(torch.full((3,), float("nan")), cap).isnan().all()


def test_the_bits_of_a_capped_value_do_not_depend_on_its_place_or_the_threads(cpu: CpuKernels) -> None:
    x = draw(3, 50_001, dtype=torch.float32) * 40
    one_thread = CpuKernels(1)
    whole = cpu.soft_cap(x.clone(), 30.0)
    assert same_bits(whole, one_thread.soft_cap(x.clone(), 30.0))
    for begin, end in ((0, 1), (7, 20), (16383, 16385), (49_990, 50_001)):
        for row in range(3):
            piece = one_thread.soft_cap(x[row, begin:end].clone(), 30.0)
            assert same_bits(piece, whole[row, begin:end])


def rope_table(positions: int, rotary_dim: int) -> Tensor:
    frequency = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angle = torch.arange(positions).unsqueeze(1) * frequency
    return torch.stack((angle.cos(), angle.sin()), dim=1)


@DTYPES
@pytest.mark.parametrize("normed", [None, "same dtype", "float32"])
@pytest.mark.parametrize(
    ("layout", "rotary_dim"),
    [
        (HeadLayout(9, 3, 64), 64),
        (HeadLayout(4, 4, 128), 64),
        (HeadLayout(7, 1, 80), 80),
        (HeadLayout(2, 1, 6), 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_rope_and_write_kv(
    cpu: CpuKernels,
    reference: ReferenceKernels,
    layout: HeadLayout,
    rotary_dim: int,
    block_size: int,
    normed: str | None,
    dtype: torch.dtype,
) -> None:
    metadata, blocks = make_metadata([(0, 20), (33, 34), (60, 90)], block_size, 0)
    qkv = draw(51, layout.qkv_dim + 4, dtype=dtype)[:, : layout.qkv_dim]
    norm = None
    if normed:
        kind = torch.float32 if normed == "float32" else dtype
        q_weight, k_weight = (1 + 0.1 * draw(layout.head_dim, dtype=kind, seed=i) for i in (1, 2))
        norm = QKNorm(q_weight, k_weight, 1e-6)
    table = rope_table(90, rotary_dim)
    pools = [
        torch.zeros(kv_pool_shape(blocks, 3, block_size, layout.num_kv_heads, layout.head_dim), dtype=dtype)
        for _ in range(2)
    ]
    ours = cpu.rope_and_write_kv(qkv.clone(), layout, table, pools[0][:, 1], metadata, norm)
    right = reference.rope_and_write_kv(qkv.clone(), layout, table, pools[1][:, 1], metadata, norm)
    assert ours.shape == (51, layout.num_heads, layout.head_dim)
    assert_close(ours, right)
    assert_close(pools[0], pools[1])
    assert not pools[0][:, ::2].any()  # other layers are left alone
    strided = cpu.rope_and_write_kv(qkv, layout, table, pools[0][:, 1], metadata, norm)
    assert same_bits(strided, ours)


@DTYPES
def test_a_rows_bits_do_not_depend_on_the_others_or_the_threads(cpu: CpuKernels, dtype: torch.dtype) -> None:
    one_thread = CpuKernels(1)
    weight = draw(576, dtype=dtype, seed=1)
    x = draw(300, 576, dtype=dtype)

    def run(kernels: CpuKernels, x: Tensor) -> tuple[Tensor, ...]:
        return (
            kernels.rms_norm(x, weight, 1e-5),
            kernels.rms_norm(x, weight.float(), 1e-5),
            kernels.add_rms_norm(x, x.clone(), weight, 1e-5),
            *(kernels.activate_mul(x, activation) for activation in Activation),
        )

    many = run(cpu, x)
    for row in (0, 1, 150, 299):
        alone = x[row : row + 1]
        for one, all_rows in zip(run(one_thread, alone), many, strict=True):
            assert same_bits(one, all_rows[row : row + 1])


@HALVES
def test_every_value_rounds_as_in_torch(cpu: CpuKernels, dtype: torch.dtype) -> None:
    """``residual + 0`` passes each of the 65,536 values through a load and a store."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(64, -1)
    every = every.nan_to_num(nan=1.0, posinf=2.0, neginf=3.0)
    no_subnormals = dtype == torch.bfloat16 and cpu._calls("quire_linear_bf16_in_pairs")  # in that hardware
    for x in (torch.zeros_like(every), every.flip(1)):
        residual, expected = every.clone(), every + x
        cpu.add_rms_norm(x, residual, torch.ones(every.shape[1], dtype=dtype), 1e-5)
        if no_subnormals:
            expected[expected.abs() < torch.finfo(dtype).smallest_normal] = 0.0
        assert torch.equal(residual, expected)
