"""Weights in few bits: their codes, and products with them: near float64, equal however called."""

from __future__ import annotations

import ctypes
import platform
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.codes import GROUP, NOT_EXACT, are_codes, code_rows, encode
from kernels.cpu import CpuKernels, build
from kernels.cpu.coded import CodedLinear, _Descriptor
from kernels.cpu.panels import panel_columns
from kernels.interface import SUPPORTED_DTYPES, Kernels, PackedLinear
from kernels.reference import ReferenceKernels

# [N, K]: below one panel and one group, off every multiple, more than a group.
SHAPES = [(1, 1), (5, 3), (16, 8), (33, 64), (70, 83), (33, 257), (130, 600)]
ROWS = [*range(1, 9), 12, 13, 23, 33, 70]

# Half a unit in the last place of the result.
TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}

both = pytest.mark.parametrize("bits", [4, 8])
dtypes = pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    return CpuKernels(2)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def pack(cpu: CpuKernels, weight: Tensor, bits: int, bias: Tensor | None = None) -> PackedLinear:
    return cpu.pack_codes(weight, bits, bias)


def _made_of_codes(kernels: Kernels, weight: Tensor, bits: int) -> bool:
    """Whether ``kernels`` find that ``weight`` is exactly what codes stand for."""
    try:
        kernels.pack_codes(weight, bits, None, exact=True)
    except ValueError as error:
        if str(error) == NOT_EXACT:
            return False
        raise
    return True


@both
def test_codes_are_near_their_weights(bits: int) -> None:
    for rows, columns in SHAPES:
        weight = random(rows, columns, seed=columns)
        matrix = encode(weight, bits)
        least, most = (0, 15) if bits == 4 else (-127, 127)
        assert least <= int(matrix.codes.min())
        assert int(matrix.codes.max()) <= most
        for first in range(0, columns, GROUP):
            part = weight[:, first : first + GROUP]
            spread = part.amax(1, keepdim=True) - part.amin(1, keepdim=True)
            step = spread / 15 if bits == 4 else part.abs().amax(1, keepdim=True) / 127
            error = (matrix.decode()[:, first : first + GROUP] - part).abs()
            # Half a step, and more at the extremes: the squares of all errors are least, not the largest error.
            assert (error <= 1.5 * step + 2.0**-10 * part.abs()).all()
            assert (
                error.square().mean(1) <= (step[:, 0] / 2).square() + 2.0**-20 * part.square().mean(1)
            ).all()


def test_codes_of_a_file_survive_its_conversion_to_bfloat16() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (300, 576), generator=generator)
    codes[:, ::32], codes[:, 1::32] = 0, 15  # as its quantizer leaves each group
    scales = (torch.rand(300, 18, generator=generator) * 0.05 + 0.001).half()
    minima = (scales.float() * -(torch.rand(300, 18, generator=generator) * 4 + 5.5)).half()
    exact = codes * scales.float().repeat_interleave(32, 1) + minima.float().repeat_interleave(32, 1)
    rounded = exact.to(torch.bfloat16)
    matrix = encode(rounded, 4)
    assert torch.equal(matrix.codes, codes.to(torch.int8))
    again = (matrix.decode() - exact).square().mean()
    assert float(again) < 0.5 * float((rounded.float() - exact).square().mean())


def test_codes_are_told_from_other_weights() -> None:
    weight = random(48, 96).to(torch.bfloat16)
    for bits in (4, 8):
        assert are_codes(encode(weight, bits).decode().to(torch.bfloat16), bits)
        assert not are_codes(weight, bits)
    assert not are_codes(encode(weight, 8).decode().to(torch.bfloat16), 4)
    assert not are_codes(weight * float("nan"), 4)
    assert not are_codes(weight[:0], 4)


@both
def test_codes_of_a_matrix_with_other_columns_are_not_exact(cpu: CpuKernels, bits: int) -> None:
    """As where one head of an output projection was trained further: few of a row's weights are others."""
    made = encode(random(96, 4096), bits).decode().to(torch.bfloat16)
    changed = made.clone()
    changed[:, 512:576] = random(96, 64, dtype=torch.bfloat16, seed=1)
    block = made.clone()
    block[32:64, 4064:] = random(32, 32, dtype=torch.bfloat16, seed=2)
    for kernels in (cpu, ReferenceKernels()):
        assert _made_of_codes(kernels, made, bits)
        assert not _made_of_codes(kernels, changed, bits)
        assert not _made_of_codes(kernels, block, bits)


@both
def test_codes_that_are_not_kept_give_their_memory_back(cpu: CpuKernels, bits: int) -> None:
    """With ``weights=auto``, a matrix that was not made of codes is kept whole."""
    made = encode(random(96, 256), bits).decode().to(torch.bfloat16)
    for kernels in (cpu, ReferenceKernels()):
        kept = kernels.pack_codes(made, bits, None, exact=True)
        free = cpu._calls.weight_arena.free
        with pytest.raises(ValueError, match="not exactly what codes stand for"):
            kernels.pack_codes(random(96, 256, dtype=torch.bfloat16), bits, None, exact=True)
        with pytest.raises(ValueError, match="not finite"):
            kernels.pack_codes(made * float("nan"), bits, None)
        assert cpu._calls.weight_arena.free == free
        after = kernels.pack_codes(made, bits, None)
        x = torch.ones(1, 256, dtype=torch.bfloat16)
        assert torch.equal(kernels.linear(x, kept), kernels.linear(x, after))


@both
@dtypes
@pytest.mark.parametrize("shape", [(1, 32), (70, 96), (33, 257)], ids=str)
def test_codes_are_exact_if_every_row_was_made_of_some(
    cpu: CpuKernels, shape: tuple[int, int], dtype: torch.dtype, bits: int
) -> None:
    """One row of another origin is found wherever it is."""
    made = encode(random(*shape), bits).decode().to(dtype)
    for kernels in (cpu, ReferenceKernels()):
        assert _made_of_codes(kernels, made, bits)
        assert _made_of_codes(kernels, torch.zeros_like(made), bits)
        assert not _made_of_codes(kernels, random(*shape, dtype=dtype), bits)
        for row in {0, shape[0] // 3, shape[0] - 1}:
            changed = made.clone()
            changed[row] += random(shape[1], dtype=dtype, seed=1) * 0.01
            assert not _made_of_codes(kernels, changed, bits)


@both
@pytest.mark.parametrize("value", [0.0, 0.75, -3.0])
def test_equal_weights(bits: int, value: float) -> None:
    weight = torch.full((3, 40), value)
    torch.testing.assert_close(encode(weight, bits).decode(), weight, rtol=2.0**-11, atol=0.0)


def test_refusals_say_what_was_wrong(cpu: CpuKernels) -> None:
    weight = torch.ones(2, 40)
    packed = pack(cpu, weight, 4)
    with pytest.raises(ValueError, match="41 columns"):
        cpu.linear(torch.ones(1, 41), packed)
    with pytest.raises(ValueError, match="float64"):
        cpu.linear(torch.ones(1, 40, dtype=torch.float64), packed)
    for kernels in (cpu, ReferenceKernels()):
        with pytest.raises(ValueError, match="not finite"):
            kernels.pack_codes(weight * float("nan"), 8, None)
        with pytest.raises(ValueError, match="float16"):
            kernels.pack_codes(weight * 1e6, 4, None)


def kept(cpu: CpuKernels, packed: PackedLinear) -> Tensor:
    """The weights that the codes of ``packed`` stand for, ``[N, K]``: each alone codes to 127."""
    return cpu.linear(torch.eye(packed.in_features), packed).T


@both
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_in_the_kernel(cpu: CpuKernels, shape: tuple[int, int], dtype: torch.dtype, bits: int) -> None:
    """Those of the reference, or neighbors where a weight lies half-way between two, but for rounding."""
    weight = random(*shape, dtype=dtype)
    matrix = encode(weight, bits)
    ours, error = kept(cpu, pack(cpu, weight, bits)), (matrix.decode() - weight.float()).abs()
    step = matrix.scales[:, torch.arange(shape[1]) // GROUP].abs()
    differs = (ours - matrix.decode()).abs() > 2.0**-9 * (ours.abs() + 8 * step)
    assert float(differs.float().mean()) < 2e-3
    assert ((ours - weight.float()).abs() <= error + 0.02 * step + 2.0**-9 * ours.abs()).all()


@both
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_close_to_float64(cpu: CpuKernels, shape: tuple[int, int], dtype: torch.dtype, bits: int) -> None:
    """The sum of what the codes of both stand for, up to the rounding of a float32 chain; no other error."""
    out_features, in_features = shape
    weight, bias = random(out_features, in_features), random(out_features, dtype=dtype, seed=1)
    reference = ReferenceKernels()
    cases = (
        (cpu, pack(cpu, weight, bits, bias), kept(cpu, pack(cpu, weight, bits))),
        (reference, reference.pack_codes(weight, bits, bias), encode(weight, bits).decode()),
    )
    for rows in ROWS:
        x = random(rows, in_features, dtype=dtype, seed=2 + rows)
        seen = code_rows(x).double()
        assert (seen - x.double()).abs().max() <= 0.5001 * x.float().abs().amax() / 127
        for kernels, packed, meant in cases:
            y = kernels.linear(x, packed)
            exact = seen @ meant.T.double() + bias.double()
            size = seen.abs() @ (meant.abs() + meant.abs().max()).T.double() + 1.0  # minima may cancel
            assert y.dtype == dtype
            assert ((y.double() - exact).abs() <= TOLERANCE[dtype] * exact.abs() + 2.0**-19 * size).all()


@both
@dtypes
def test_bits_of_a_row_depend_on_that_row_alone(cpu: CpuKernels, dtype: torch.dtype, bits: int) -> None:
    one = CpuKernels(1)
    packed = pack(cpu, random(131, 601), bits, random(131, seed=1))
    x = random(70, 601, dtype=dtype, seed=2)
    alone = torch.cat([one.linear(x[i : i + 1], packed) for i in range(70)])
    for kernels in (one, cpu):
        for rows in range(1, 71):
            assert torch.equal(kernels.linear(x[:rows], packed), alone[:rows]), (rows, kernels.num_threads)
        for first in range(1, 70, 5):
            assert torch.equal(kernels.linear(x[first:], packed), alone[first:]), (first, kernels.num_threads)


@both
def test_bits_hold_over_row_blocks(cpu: CpuKernels, bits: int) -> None:
    packed = pack(cpu, random(40, 65), bits)
    x = random(4200, 65, dtype=torch.bfloat16, seed=1)
    y = cpu.linear(x, packed)
    for i in (0, 1, 4095, 4096, 4097, 4199):
        assert torch.equal(cpu.linear(x[i : i + 1], packed), y[i : i + 1])


@both
def test_bits_of_a_column_depend_on_its_weights_alone(cpu: CpuKernels, bits: int) -> None:
    weight, x = random(75, 300), random(20, 300, seed=1)
    whole = cpu.linear(x, pack(cpu, weight, bits))
    for first, last in ((0, 1), (3, 20), (17, 75), (74, 75)):
        assert torch.equal(cpu.linear(x, pack(cpu, weight[first:last], bits)), whole[:, first:last])


@both
def test_strided_rows(cpu: CpuKernels, bits: int) -> None:
    packed, wide = pack(cpu, random(40, 57), bits), random(9, 100, seed=1)
    x = wide[:, 7:64]
    dense = cpu.linear(x.contiguous(), packed)
    assert torch.equal(cpu.linear(x, packed), dense)
    assert torch.equal(cpu.linear(x.T.contiguous().T, packed), dense)
    assert torch.equal(cpu.linear(x[::2], packed), dense[::2])


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_hidden(cpu: CpuKernels, bits: int, value: float) -> None:
    x = random(14, 70)
    x[3, 40] = value
    y = cpu.linear(x, pack(cpu, random(9, 70, seed=1), bits))
    assert not y[3].isfinite().any()
    assert y[:3].isfinite().all()
    assert y[4:].isfinite().all()


@both
def test_smallest_and_no_values(cpu: CpuKernels, bits: int) -> None:
    packed = pack(cpu, random(9, 70), bits)
    x = torch.zeros(3, 70)
    x[1] = 1e-44
    x[2, 5] = 1e-39
    y = cpu.linear(x, packed)
    assert not y[0].any()
    assert float(y.abs().max()) < 1e-36
    assert cpu.linear(torch.ones(0, 70), packed).shape == (0, 9)


@both
def test_weights_too_near_for_a_step_of_float32(cpu: CpuKernels, bits: int) -> None:
    weight = torch.full((2, 40), 0.5)
    weight[1] = 0.0
    weight[1, 3] = 2.0**-149
    for kernels in (cpu, ReferenceKernels()):
        y = kernels.linear(torch.ones(1, 40), kernels.pack_codes(weight, bits, None))
        torch.testing.assert_close(y, torch.tensor([[20.0, 0.0]]), rtol=1e-3, atol=0.0)


def defined(weight: Tensor, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes ``[N, K]``, scales and minima ``[N, groups]``, each step as the kernel must round it.

    Sums are chains over k, ascending. Scales and minima are float16's bits.
    """
    rows, columns = weight.shape
    one, zero, all_of = np.float32(1), np.float32(0), np.float32(GROUP)
    padded = torch.cat([weight, weight[:, -1:].expand(rows, -columns % GROUP)], 1).float().numpy()
    wide = [padded.reshape(rows, -1, GROUP)[:, :, k] for k in range(GROUP)]
    with np.errstate(all="ignore"):
        if bits == 8:
            step = np.abs(wide).max(0) / np.float32(127)
            codes = [np.rint(w / np.where(step > 0, step, one)) for w in wide]
            code_mean = mean = np.zeros_like(wide[0])
        else:
            low, high = np.min(wide, 0), np.max(wide, 0)
            step = (high - low) / np.float32(15)
            codes = [np.rint((w - low) / np.where(step > 0, step, one)) for w in wide]
            code_mean, mean = chain(codes) / all_of, chain(wide) / all_of
        squares = chain([(c - code_mean) * (c - code_mean) for c in codes])
        slope = chain([(c - code_mean) * (w - mean) for c, w in zip(codes, wide, strict=True)]) / squares
        scales = np.where(squares > 0, slope, zero).astype(np.float16)
        scale = scales.astype(np.float32)
        minima = (mean - scale * code_mean).astype(np.float16)
        if bits == 4:
            by, minimum = np.where(scale != 0, scale, one), minima.astype(np.float32)
            codes = [np.clip(np.rint((w - minimum) / by), zero, np.float32(15)) for w in wide]
    whole = np.stack(codes, 2).reshape(rows, -1)[:, :columns].astype(np.int8)
    return whole, scales.view(np.uint16), minima.view(np.uint16)


def chain(terms: list[np.ndarray]) -> np.ndarray:
    total = np.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


def unpacked(panels: bytes, width: int, shape: tuple[int, int], bits: int) -> tuple[np.ndarray, ...]:
    """What ``panels`` of ``width`` columns hold, as ``defined`` has it."""
    rows, columns = shape
    groups = -(-columns // GROUP)
    both_scales = width * 2 * (1 if bits == 8 else 2)
    raw = np.frombuffer(panels, np.uint8).reshape(-1, groups, GROUP * width * bits // 8 + both_scales)
    halves = raw[:, :, -both_scales:].copy().view(np.uint16).reshape(len(raw), groups, -1, width)
    scales = halves.transpose(2, 0, 3, 1).reshape(halves.shape[2], -1, groups)[:, :rows]
    if bits == 8:
        quads = raw[:, :, :-both_scales].reshape(len(raw), groups, 8, width, 4)
        quads = (quads - quads[-1, 0, 0, -1, 0]).view(
            np.int8
        )  # a column of padding has what zero is shifted by
    else:
        nibbles = raw[:, :, :-both_scales].reshape(len(raw), groups, 4, 1, width, 4)
        quads = np.concatenate([nibbles & 15, nibbles >> 4], 3).reshape(len(raw), groups, 8, width, 4)
    codes = quads.transpose(0, 3, 1, 2, 4).reshape(-1, groups * GROUP)
    assert not codes[:, columns:].any()
    assert not codes[rows:].any()
    return codes[:rows, :columns].astype(np.int8), scales[0], scales[-1]


def codings() -> list[Tensor]:
    """Weights at random, half-way between codes, equal, and of extreme sizes; padded in both dimensions."""
    shape = (37, 107)
    normal, whole = random(*shape), (random(*shape, seed=1) * 60).round()
    sizes = [1.0, 1e-3, 1e3, 1e-30, 1e-41, 2.0**-149]
    return [
        *(normal * size for size in sizes),
        *((whole * 0.5).clamp(-63.5, 63.5) * size for size in sizes[:4]),
        *((whole.clamp(0, 30) * 0.5) * size for size in sizes[:4]),
        *(torch.full(shape, value) for value in (0.0, -0.0, 0.3, -7.0, 65280.0)),
        torch.where(whole > 0, 65280.0, -0.0),
        torch.where(normal > 2, normal * 1e4, normal * 1e-4),
        torch.full(shape, 0.3).where(normal > 1, 0.3 + 2.0**-25),
    ]


@both
@dtypes
def test_codes_are_the_defined_ones_to_the_bit(cpu: CpuKernels, dtype: torch.dtype, bits: int) -> None:
    for number, weight in enumerate(one.to(dtype) for one in codings()):
        packed = pack(cpu, weight, bits)
        assert isinstance(packed, CodedLinear)
        size, width = cpu._calls("quire_codes_bytes", packed.address), panel_columns(cpu._calls, 1)
        panels = ctypes.string_at(packed._descriptor.panels, size)
        compare(panels, width, weight, bits, number)


def compare(panels: bytes, width: int, weight: Tensor, bits: int, number: int) -> None:
    found, expected = unpacked(panels, width, (weight.shape[0], weight.shape[1]), bits), defined(weight, bits)
    for what in range(2 if bits == 8 else 3):
        assert np.array_equal(found[what], expected[what]), (number, ("codes", "scales", "minima")[what])


NARROW = ("gemm_codes.cpp", "pool.cpp")


class NarrowLibrary:
    """The product alone, compiled for a CPU with fewer instructions than this one."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.quire_codes_bytes.restype = ctypes.c_int64
        self._library = library

    def pack(self, weight: Tensor, bits: int) -> tuple[_Descriptor, Tensor]:
        """Its descriptor, and its panels, which must be kept."""
        descriptor = _Descriptor(None, None, weight.shape[1], weight.shape[0], bits)
        address = ctypes.c_void_p(ctypes.addressof(descriptor))
        panels = torch.empty(self._library.quire_codes_bytes(address), dtype=torch.uint8)
        descriptor.panels = panels.data_ptr()
        stride = ctypes.c_int64(weight.shape[1])
        outcome = self._library.quire_codes_pack(address, 0, ctypes.c_void_p(weight.data_ptr()), stride, 1)
        assert outcome in (0, 3)
        return descriptor, panels

    def product(self, x: Tensor, weight: Tensor, bits: int) -> Tensor:
        """Of bfloat16 tensors."""
        descriptor, _panels = self.pack(weight, bits)
        address, stride = ctypes.c_void_p(ctypes.addressof(descriptor)), ctypes.c_int64(weight.shape[1])
        y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype)
        pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr())
        rows = ctypes.c_int64(x.shape[0])
        assert not self._library.quire_codes_linear(address, 0, pointers[0], stride, rows, pointers[1], 1)
        return y


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86 has instructions to leave out")
@pytest.mark.parametrize(
    ("without", "fused"),
    [
        ("-mno-avx512f", True),
        ("-mno-avx512f -mno-avxvnni", True),
        ("-mno-avx512f -mno-fma", False),  # a virtual machine may hide any of them
        ("-mno-avx2", False),
        ("-mno-avx", False),
    ],
)
def test_the_same_bits_with_fewer_instructions(
    cpu: CpuKernels, without: str, fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is compiled once for each state of its sources, as the whole one is.

    Without fused multiply-adds sums round more often, and vectors are the shortest.
    """
    for source in (*build.SOURCE_FOLDER.glob("*.h"), *map(build.SOURCE_FOLDER.joinpath, NARROW)):
        shutil.copy(source, tmp_path)
    monkeypatch.setattr(build, "SOURCE_FOLDER", tmp_path)
    flags = [*build._native_flags(), *without.split()]
    monkeypatch.setattr(build, "_native_flags", lambda: flags)
    narrow = NarrowLibrary(build.load_library())
    weight, x = random(70, 104, dtype=torch.bfloat16), random(23, 104, dtype=torch.bfloat16, seed=1)
    for bits in (4, 8):
        for number, one in enumerate(coding.to(torch.bfloat16) for coding in codings()):
            panels = narrow.pack(one, bits)[1].numpy().tobytes()
            compare(panels, 16 if fused else 8, one, bits, number)
        for rows in (1, 2, 7, 23):
            y, expected = narrow.product(x[:rows], weight, bits), cpu.linear(x[:rows], pack(cpu, weight, bits))
            if fused:
                assert torch.equal(y, expected)
            else:
                torch.testing.assert_close(y, expected, rtol=2 * TOLERANCE[y.dtype], atol=1e-4)
