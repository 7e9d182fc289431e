"""Tests of the Triton kernels in its interpreter; ``test_triton_interpreter.py`` runs them in a child process.

The interpreter's products in bfloat16 are wrong, so float32 and float16 only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels.triton.attention as triton_attention
from kernels.interface import (
    Activation,
    AttentionMetadata,
    AttentionOptions,
    HeadLayout,
    QKNorm,
    kv_pool_shape,
)
from kernels.reference import ReferenceKernels
from kernels.triton import TritonKernels

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)
REFERENCE = ReferenceKernels()


@pytest.fixture
def triton_kernels() -> TritonKernels:
    return TritonKernels("cpu")


@pytest.fixture(autouse=True)
def _same_numbers_and_poisoned_memory() -> Iterator[None]:
    """Seed torch; ``torch.empty`` returns NaN, so that reading what no kernel wrote shows."""
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def close(actual: Tensor, expected: Tensor) -> None:
    bound = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)


class Batch:
    """Requests with ``(new tokens, context)`` over scattered blocks of a pool of two layers.

    Block 0 holds NaN; padding of the block tables, and blocks before every window, point there.
    """

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        layout: HeadLayout,
        dtype: torch.dtype,
        block_size: int = 16,
        window: int | None = None,
        cap: float | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        blocks = [-(-context // block_size) for _, context in lengths]
        shape = kv_pool_shape(sum(blocks) + 1, 2, block_size, layout.num_kv_heads, layout.head_dim)
        self.pool = torch.randn(shape, generator=generator).to(dtype)
        self.pool[0] = float("nan")
        self.kv_layer = self.pool[:, 1]
        self.layout, self.dtype = layout, dtype
        self.options = AttentionOptions(layout.head_dim**-0.5, window, cap)
        scattered = (torch.randperm(sum(blocks), generator=generator) + 1).int().split(blocks)
        tables = torch.zeros((len(lengths), max(blocks) + 2), dtype=torch.int32)
        positions, slots, starts = [], [], [0]
        for r, (new, context) in enumerate(lengths):
            tables[r, : blocks[r]] = scattered[r]
            at = torch.arange(context - new, context)
            positions.append(at)
            slots.append(tables[r, at // block_size].long() * block_size + at % block_size)
            starts.append(starts[-1] + new)
            if window is not None:
                tables[r, : max(0, context - new - window + 1) // block_size] = 0
        self.metadata = AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32),
            block_tables=tables,
            positions=torch.cat(positions),
            slot_mapping=torch.cat(slots),
            max_query_len=max(new for new, _ in lengths),
            max_context_len=max(context for _, context in lengths),
        )
        self.qkv = torch.randn((starts[-1], layout.qkv_dim), generator=generator).to(dtype)
        # As the reference returns it: rows strided over the fused row.
        self.q = self.qkv.unflatten(-1, (-1, layout.head_dim))[:, : layout.num_heads]

    def attention(self, kernels: ReferenceKernels | TritonKernels) -> Tensor:
        return kernels.attention(self.q, self.kv_layer, self.metadata, self.options)

    def only(self, r: int) -> Batch:
        """The same request, cache and table without the others."""
        alone = Batch.__new__(Batch)
        alone.__dict__.update(self.__dict__)
        begin, end = self.metadata.query_start[r : r + 2].tolist()
        context = int(self.metadata.context_lens[r])
        alone.q = self.q[begin:end]
        alone.metadata = AttentionMetadata(
            query_start=torch.tensor([0, end - begin], dtype=torch.int32),
            context_lens=self.metadata.context_lens[r : r + 1],
            block_tables=self.metadata.block_tables[r : r + 1],
            positions=self.metadata.positions[begin:end],
            slot_mapping=self.metadata.slot_mapping[begin:end],
            max_query_len=end - begin,
            max_context_len=context,
        )
        return alone

    def last(self, rows: int) -> Batch:
        """The last ``rows`` new tokens of the only request, as a chunk of its own."""
        part = Batch.__new__(Batch)
        part.__dict__.update(self.__dict__)
        part.q = self.q[-rows:]
        part.metadata = dataclasses.replace(
            self.metadata,
            query_start=torch.tensor([0, rows], dtype=torch.int32, device=self.q.device),
            positions=self.metadata.positions[-rows:],
            slot_mapping=self.metadata.slot_mapping[-rows:],
            max_query_len=rows,
        )
        return part


MIXED = [(1, 1), (3, 70), (30, 41), (1, 33), (1, 100)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "cap"),
    [
        (2, 2, 64, 16, None, None),
        (6, 2, 64, 16, None, None),
        (4, 1, 24, 5, None, None),
        (4, 1, 16, 1, 7, None),
        (2, 1, 128, 32, 40, None),
        (20, 1, 80, 8, None, None),
        (71, 1, 16, 16, None, None),
        (4, 2, 256, 16, None, 50.0),
        (6, 2, 16, 4, 7, 1.5),
    ],
)
def test_attention_of_a_mixed_step(
    triton_kernels: TritonKernels,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    cap: float | None,
) -> None:
    batch = Batch(MIXED, HeadLayout(heads, kv_heads, head_dim), dtype, block_size, window, cap)
    close(batch.attention(triton_kernels), batch.attention(REFERENCE))


LONG = [(1, 150), (1, 20), (2, 129), (1, 64), (9, 64)]


@pytest.mark.parametrize(
    ("dtype", "window", "cap"),
    [
        (torch.float32, None, None),
        (torch.float32, 100, 1.5),
        (torch.float16, 3, None),
        (torch.float16, None, 1.5),
    ],
)
def test_splits(
    triton_kernels: TritonKernels,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    window: int | None,
    cap: float | None,
) -> None:
    """Right, and the same bits however many programs share the splits and requests share the memory."""
    monkeypatch.setattr(triton_attention, "SPLIT", 64)
    batch = Batch(LONG, HeadLayout(3, 1, 32), dtype, window=window, cap=cap)
    results = []
    for programs in (1, 1000):
        triton_kernels._target_programs = programs
        results.append(batch.attention(triton_kernels))
    monkeypatch.setattr(triton_attention, "PARTIAL_BYTES", 20_000)
    begins: list[int] = []
    attend = triton_attention._Step._attend

    def recorded(step: Any, tile: Any, grid: Any, begin: int, *rest: Any) -> None:
        begins.append(begin)
        attend(step, tile, grid, begin, *rest)

    monkeypatch.setattr(triton_attention._Step, "_attend", recorded)
    results.append(batch.attention(triton_kernels))
    assert max(begins) > 0
    assert all(begin % 4 == 0 for begin in begins)  # 16 bytes: no kernel is compiled again
    close(results[0], batch.attention(REFERENCE))
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.parametrize(("window", "cap"), [(None, None), (50, 1.5)])
def test_attention_of_a_request_does_not_depend_on_the_others(
    triton_kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, window: int | None, cap: float | None
) -> None:
    monkeypatch.setattr(triton_attention, "SPLIT", 64)
    batch = Batch(LONG, HeadLayout(3, 1, 32), torch.float32, window=window, cap=cap)
    together = batch.attention(triton_kernels)
    for r in range(len(LONG)):
        begin, end = batch.metadata.query_start[r : r + 2].tolist()
        assert torch.equal(batch.only(r).attention(triton_kernels), together[begin:end])


@pytest.mark.parametrize(("window", "cap"), [(None, None), (77, 1.5)])
def test_in_float32_the_chunking_changes_no_bit(
    triton_kernels: TritonKernels, monkeypatch: pytest.MonkeyPatch, window: int | None, cap: float | None
) -> None:
    """The last rows of a prompt, in whichever launch they are, over several splits.

    Whole tiles only: NumPy's products, unlike a GPU's, depend on a row's place in its tile.
    """
    monkeypatch.setattr(triton_attention, "SPLIT", 64)
    batch = Batch([(16, 140)], HeadLayout(4, 1, 32), torch.float32, window=window, cap=cap)
    whole = batch.attention(triton_kernels)
    for rows in (4, 8):
        assert torch.equal(batch.last(rows).attention(triton_kernels), whole[16 - rows :]), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim", "norm"),
    [
        (9, 3, 64, 64, None),
        (4, 2, 24, 16, "same dtype"),
        (8, 8, 16, 16, "same dtype"),
        (4, 2, 16, 16, "float32"),
        (3, 1, 32, 8, None),
    ],
)
def test_rope_and_write_kv(
    triton_kernels: TritonKernels,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    norm: str | None,
) -> None:
    layout = HeadLayout(heads, kv_heads, head_dim)
    batch = Batch([(1, 30), (7, 7), (3, 21)], layout, dtype, block_size=5)
    angles = torch.randn(32, rotary_dim // 2)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    kind = torch.float32 if norm == "float32" else dtype
    qk_norm = QKNorm(torch.randn(head_dim).to(kind), torch.randn(head_dim).to(kind), 1e-6) if norm else None
    pools, queries = [], []
    for kernels in (triton_kernels, REFERENCE):
        pool = batch.pool.clone()
        queries.append(
            kernels.rope_and_write_kv(batch.qkv.clone(), layout, cos_sin, pool[:, 1], batch.metadata, qk_norm)
        )
        pools.append(pool[1:])
    close(queries[0], queries[1])
    close(pools[0], pools[1])
    assert torch.equal(pools[0][:, 0], batch.pool[1:, 0])  # the other layer
    written = (pools[0][:, 1] != batch.pool[1:, 1]).any(-1)
    assert written.sum() == 2 * kv_heads * batch.qkv.shape[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 64, 100])
@pytest.mark.parametrize("float32_weight", [False, True])
def test_norms(triton_kernels: TritonKernels, dtype: torch.dtype, width: int, float32_weight: bool) -> None:
    x = torch.randn(5, 2 * width).to(dtype)[:, :width]
    weight = torch.randn(width).to(torch.float32 if float32_weight else dtype)
    close(triton_kernels.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    residuals = [torch.randn(5, width, generator=torch.Generator().manual_seed(1)).to(dtype) for _ in range(2)]
    actual = triton_kernels.add_rms_norm(x, residuals[0], weight, 1e-5)
    close(actual, REFERENCE.add_rms_norm(x, residuals[1], weight, 1e-5))
    assert torch.equal(residuals[0], residuals[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 10])
@pytest.mark.parametrize("activation", list(Activation))
def test_activate_mul(
    triton_kernels: TritonKernels, activation: Activation, dtype: torch.dtype, width: int
) -> None:
    gate_up = (10 * torch.randn(3, 2 * width)).to(dtype)
    gate_up[0, 0], gate_up[1, 0] = 200.0, -200.0
    # In float32 torch's GELU keeps few digits of gates around -5: it adds 1 to a tanh near -1.
    exact = gate_up.double() if dtype == torch.float32 else gate_up
    close(triton_kernels.activate_mul(gate_up, activation), REFERENCE.activate_mul(exact, activation).to(dtype))


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_cap(triton_kernels: TritonKernels, cap: float) -> None:
    x = torch.randn(3, 700) * cap
    x[0, :5] = torch.tensor([0.0, 1e-30, -1e-6, 1e9, float("-inf")])
    x[1] = cap * torch.linspace(0.2, 0.3, 700)  # where the series meets the powers
    exact = cap * (x.double() / cap).tanh()
    capped = triton_kernels.soft_cap(x, cap)
    assert capped is x
    torch.testing.assert_close(capped.double(), exact, atol=1e-35, rtol=1e-6)


def test_linear(triton_kernels: TritonKernels) -> None:
    x, weight, bias = torch.randn(5, 12), torch.randn(7, 12), torch.randn(7)
    for b in (None, bias):
        packed = triton_kernels.pack_linear(weight, b)
        assert (packed.in_features, packed.out_features) == (12, 7)
        close(triton_kernels.linear(x, packed), REFERENCE.linear(x, REFERENCE.pack_linear(weight, b)))
    with pytest.raises(TypeError, match="ReferenceLinear"):
        triton_kernels.linear(x, REFERENCE.pack_linear(weight, None))


def test_a_product_in_float32_of_any_number_of_rows(triton_kernels: TritonKernels) -> None:
    x, weight = torch.randn(70, 33), torch.randn(67, 33)
    packed = triton_kernels.pack_linear(weight, None)
    for rows in (1, 16, 17, 70):
        close(triton_kernels.linear(x[:rows], packed), x[:rows] @ weight.T)


def test_no_rows(triton_kernels: TritonKernels) -> None:
    batch = Batch([(1, 1)], HeadLayout(2, 1, 16), torch.float32)
    empty = torch.empty(0, 2, 16)
    assert triton_kernels.attention(empty, batch.kv_layer, batch.metadata, batch.options).shape == (0, 2, 16)
    assert triton_kernels.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert triton_kernels.activate_mul(torch.empty(0, 8), Activation.SILU).shape == (0, 4)
    assert triton_kernels.soft_cap(torch.empty(0, 8), 30.0).shape == (0, 8)


def test_only_the_cpu_is_interpreted() -> None:
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        TritonKernels("cuda")
