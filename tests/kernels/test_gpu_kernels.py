"""The Triton kernels on a GPU against ``reference`` on the CPU, in every dtype."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is published for Linux only")

if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

from triton_interpreter_cases import LONG, MIXED, Batch

import kernels.triton.attention as triton_attention
from kernels.interface import Activation, AttentionMetadata, HeadLayout, QKNorm
from kernels.reference import ReferenceKernels
from kernels.triton import TritonKernels

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

# Weights and results are rounded to the dtype, once each.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)
REFERENCE = ReferenceKernels()
KERNELS = TritonKernels("cuda")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else torch refuses to be deterministic


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Seed torch; ``torch.empty`` returns NaN, so that reading what no kernel wrote shows."""
    torch.manual_seed(3)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def close(actual: Tensor, expected: Tensor) -> None:
    bound = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=bound, atol=bound)


def on_gpu(batch: Batch) -> Batch:
    """The same batch with its tensors on the GPU."""
    moved = Batch.__new__(Batch)
    moved.__dict__.update(batch.__dict__)
    moved.pool = batch.pool.cuda()
    moved.kv_layer = moved.pool[:, 1]
    moved.qkv = batch.qkv.cuda()
    moved.q = moved.qkv.unflatten(-1, (-1, batch.layout.head_dim))[:, : batch.layout.num_heads]
    names = [field.name for field in dataclasses.fields(AttentionMetadata)]
    fields = {name: getattr(batch.metadata, name) for name in names}
    moved.metadata = AttentionMetadata(
        **{name: value.cuda() if isinstance(value, Tensor) else value for name, value in fields.items()}
    )
    return moved


def check(batch: Batch) -> None:
    close(on_gpu(batch).attention(KERNELS), batch.attention(REFERENCE))


LAYOUTS = [
    (2, 2, 64, 16, None, None),
    (6, 2, 64, 16, None, None),
    (4, 1, 24, 5, None, None),
    (4, 1, 16, 1, 7, None),
    (2, 1, 128, 32, 40, None),
    (20, 1, 80, 8, None, None),
    (50, 2, 64, 16, None, None),
    (71, 1, 128, 16, None, None),
    (32, 8, 128, 16, None, None),
    (14, 2, 128, 64, None, None),
    (8, 1, 256, 16, None, None),
    (8, 4, 96, 16, 33, None),
    (8, 4, 256, 16, 33, 50.0),
    (8, 4, 128, 16, None, 1.5),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size", "window", "cap"), LAYOUTS)
def test_attention_of_a_mixed_step(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    cap: float | None,
) -> None:
    check(Batch(MIXED, HeadLayout(heads, kv_heads, head_dim), dtype, block_size, window, cap))


# Decode and prefill around the edges of tiles and splits, and far into long contexts.
FAR = [(1, 511), (1, 512), (1, 513), (4, 1025), (5, 1100), (130, 700), (64, 64), (1, 6000), (300, 2300), (3, 1)]
FAR = [(new, max(new, context)) for new, context in FAR]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (600, None), (600, 1.5)])
def test_attention_over_long_contexts(dtype: torch.dtype, window: int | None, cap: float | None) -> None:
    check(Batch(FAR, HeadLayout(8, 2, 128), dtype, 16, window, cap))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_attention_of_any_step(dtype: torch.dtype, seed: int) -> None:
    chance = random.Random(seed)
    lengths = []
    for _ in range(chance.randint(1, 40)):
        context = chance.choice([chance.randint(1, 100), chance.randint(400, 700), chance.randint(1, 2500)])
        new = 1 if chance.random() < 0.6 else min(context, chance.choice([2, 4, 5, 33, 200]))
        lengths.append((new, context))
    check(Batch(lengths, HeadLayout(8, 2, 64), dtype, 16, chance.choice([None, 100])))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (100, None), (100, 1.5)])
def test_how_many_programs_share_the_splits_changes_no_bit(
    dtype: torch.dtype, window: int | None, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = on_gpu(Batch(FAR, HeadLayout(6, 2, 64), dtype, window=window, cap=cap))
    expected = batch.attention(KERNELS)
    for programs in (1, 7, 100_000):
        monkeypatch.setattr(KERNELS, "_target_programs", programs)
        assert torch.equal(batch.attention(KERNELS), expected)
    monkeypatch.setattr(triton_attention, "PARTIAL_BYTES", 300_000)
    assert torch.equal(batch.attention(KERNELS), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "cap"), [(None, None), (50, None), (50, 1.5)])
@pytest.mark.parametrize("lengths", [LONG, FAR], ids=["short", "far"])
def test_attention_of_a_request_does_not_depend_on_the_others(
    dtype: torch.dtype, window: int | None, cap: float | None, lengths: list[tuple[int, int]]
) -> None:
    batch = on_gpu(Batch(lengths, HeadLayout(8, 2, 64), dtype, window=window, cap=cap))
    together = batch.attention(KERNELS)
    for r in range(len(lengths)):
        begin, end = batch.metadata.query_start[r : r + 2].tolist()
        assert torch.equal(batch.only(r).attention(KERNELS), together[begin:end])


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (77, None), (77, 1.5)])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_in_float32_the_chunking_changes_no_bit(
    group: int, head_dim: int, window: int | None, cap: float | None
) -> None:
    """The last rows of a prompt, whichever kind of tile computes them and however many rows come along."""
    layout = HeadLayout(2 * group, 2, head_dim)
    batch = on_gpu(Batch([(700, 1300)], layout, torch.float32, window=window, cap=cap))
    whole = batch.attention(KERNELS)
    for rows in (1, 2, 5, 64, 333):
        assert torch.equal(batch.last(rows).attention(KERNELS), whole[700 - rows :]), rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim", "norm"),
    [
        (9, 3, 64, 64, None),
        (4, 2, 24, 16, "same dtype"),
        (8, 8, 16, 16, "float32"),
        (3, 1, 32, 8, None),
        (32, 8, 128, 128, "same dtype"),
        (8, 4, 256, 256, None),
    ],
)
def test_rope_and_write_kv(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, norm: str | None
) -> None:
    layout = HeadLayout(heads, kv_heads, head_dim)
    batch = Batch([(1, 30), (7, 7), (3, 21)], layout, dtype, block_size=5)
    gpu = on_gpu(batch)
    angles = torch.randn(32, rotary_dim // 2)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    kind = torch.float32 if norm == "float32" else dtype
    weights = torch.randn(head_dim).to(kind), torch.randn(head_dim).to(kind)

    def run(kernels: Any, one: Batch) -> tuple[Tensor, Tensor]:
        device = one.pool.device
        qk_norm = QKNorm(weights[0].to(device), weights[1].to(device), 1e-6) if norm else None
        pool = one.pool.clone()
        q = kernels.rope_and_write_kv(
            one.qkv.clone(), layout, cos_sin.to(device), pool[:, 1], one.metadata, qk_norm
        )
        return q, pool[1:]

    (q, pool), (expected_q, expected_pool) = run(KERNELS, gpu), run(REFERENCE, batch)
    close(q, expected_q)
    close(pool, expected_pool)
    assert torch.equal(pool[:, 0].cpu(), batch.pool[1:, 0])  # the other layer
    written = (pool[:, 1].cpu() != batch.pool[1:, 1]).any(-1)
    assert written.sum() == 2 * kv_heads * batch.qkv.shape[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 64, 100, 4096])
@pytest.mark.parametrize("float32_weight", [False, True])
def test_norms(dtype: torch.dtype, width: int, float32_weight: bool) -> None:
    x = torch.randn(5, 2 * width).to(dtype)[:, :width]
    weight = torch.randn(width).to(torch.float32 if float32_weight else dtype)
    close(KERNELS.rms_norm(x.cuda(), weight.cuda(), 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    residual = torch.randn(5, width).to(dtype)
    on_device = residual.cuda()
    actual = KERNELS.add_rms_norm(x.cuda(), on_device, weight.cuda(), 1e-5)
    close(actual, REFERENCE.add_rms_norm(x, residual, weight, 1e-5))
    assert torch.equal(on_device.cpu(), residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 10])
@pytest.mark.parametrize("activation", list(Activation))
def test_activate_mul(dtype: torch.dtype, width: int, activation: Activation) -> None:
    gate_up = (10 * torch.randn(3, 2 * width)).to(dtype)
    gate_up[0, 0], gate_up[1, 0] = 200.0, -200.0
    # In float32 torch's GELU keeps few digits of gates around -5: it adds 1 to a tanh near -1.
    exact = gate_up.double() if dtype == torch.float32 else gate_up
    close(KERNELS.activate_mul(gate_up.cuda(), activation), REFERENCE.activate_mul(exact, activation).to(dtype))


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_cap(cap: float) -> None:
    x = torch.randn(17, 5000) * cap
    x[0, :5] = torch.tensor([0.0, 1e-30, -1e-6, 1e9, float("-inf")])
    exact = cap * (x.double() / cap).tanh()
    whole = KERNELS.soft_cap(x.cuda(), cap)
    torch.testing.assert_close(whole.cpu().double(), exact, atol=1e-35, rtol=2e-6)
    assert torch.equal(KERNELS.soft_cap(x[3:4, 70:200].cuda().contiguous(), cap), whole[3:4, 70:200])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "width_in", "width_out"), [(1, 48, 97), (5, 576, 960), (150, 1536, 576)])
def test_linear(dtype: torch.dtype, biased: bool, rows: int, width_in: int, width_out: int) -> None:
    x = torch.randn(rows, width_in).to(dtype)
    weight = (torch.randn(width_out, width_in) * width_in**-0.5).to(dtype)
    bias = torch.randn(width_out).to(dtype) if biased else None
    packed = KERNELS.pack_linear(weight.cuda(), None if bias is None else bias.cuda())
    close(KERNELS.linear(x.cuda(), packed), REFERENCE.linear(x, REFERENCE.pack_linear(weight, bias)))


def test_in_float32_the_rows_of_a_product_change_no_bit() -> None:
    x, weight = torch.randn(300, 1000, device="cuda"), torch.randn(333, 1000, device="cuda")
    packed = KERNELS.pack_linear(weight, None)
    whole = KERNELS.linear(x, packed)
    for begin, end in ((0, 1), (7, 9), (0, 16), (3, 20), (40, 140)):
        assert torch.equal(KERNELS.linear(x[begin:end], packed), whole[begin:end])
