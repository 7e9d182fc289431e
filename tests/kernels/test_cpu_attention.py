"""The C++ attention against the plain one, and its bits against themselves."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from kernel_cases import Chunk, Sequence, make_metadata, make_sequence, make_step, same_bits
from torch import Tensor

from kernels.cpu import CpuKernels
from kernels.interface import SUPPORTED_DTYPES, AttentionOptions, HeadLayout
from kernels.reference import ReferenceKernels

TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LAYOUTS = [
    HeadLayout(9, 3, 64),
    HeadLayout(7, 1, 80),
    HeadLayout(4, 4, 128),
    HeadLayout(8, 2, 96),
    HeadLayout(3, 1, 5),
    HeadLayout(5, 1, 64),
    HeadLayout(4, 2, 256),
    HeadLayout(50, 2, 64),
    HeadLayout(71, 1, 16),
]
DTYPES = pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    return CpuKernels(2)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The reference computes small things, for which a second thread only costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attend(
    kernels: CpuKernels | ReferenceKernels,
    chunks: list[Chunk],
    block_size: int = 16,
    window: int | None = None,
    cap: float | None = None,
    seed: int = 0,
) -> Tensor:
    step = make_step(chunks, block_size, seed)
    options = AttentionOptions(step.q.shape[2] ** -0.5, window, cap)
    return kernels.attention(step.q, step.kv_layer, step.metadata, options)


def assert_close(ours: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(ours, right, atol=TOLERANCE[ours.dtype], rtol=TOLERANCE[ours.dtype])


@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equals_reference_for_decode_and_prefill_in_one_batch(
    cpu: CpuKernels, layout: HeadLayout, dtype: torch.dtype
) -> None:
    spans = [(0, 1), (62, 63), (0, 40), (63, 64), (64, 65), (1060, 1090), (100, 230)]
    chunks = [Chunk(make_sequence(end, layout, dtype, i), begin, end) for i, (begin, end) in enumerate(spans)]
    for block_size, window, cap in ((1, 70, None), (16, None, None), (32, 70, 1.5), (16, None, 50.0)):
        ours = attend(cpu, chunks, block_size, window, cap)
        assert_close(ours, attend(ReferenceKernels(), chunks, block_size, window, cap))


@pytest.mark.parametrize("edge", [64, 128, 1024, 2048])
@pytest.mark.parametrize("window", [None, 1, 63, 64, 65, 1024])
def test_equals_reference_around_the_edges_of_tiles_and_splits(
    cpu: CpuKernels, edge: int, window: int | None
) -> None:
    layout = HeadLayout(3, 1, 64)
    sequence = make_sequence(edge + 2, layout, torch.float32, edge)
    chunks = [Chunk(sequence, end - 1, end) for end in range(edge - 1, edge + 3)]
    chunks += [Chunk(sequence, edge - 3, edge + 2), Chunk(sequence, edge - 40, edge)]
    assert_close(attend(cpu, chunks, 16, window), attend(ReferenceKernels(), chunks, 16, window))


def test_rows_of_the_queries_may_be_strided(cpu: CpuKernels) -> None:
    layout = HeadLayout(9, 3, 64)
    step = make_step([Chunk(make_sequence(50, layout, torch.bfloat16, 1), 0, 50)], 16)
    wide = torch.randn(50, layout.qkv_dim).bfloat16()
    view = wide[:, : 9 * 64].unflatten(-1, (9, 64))
    view.copy_(step.q)
    options = AttentionOptions(0.125)
    dense = cpu.attention(step.q, step.kv_layer, step.metadata, options)
    assert same_bits(dense, cpu.attention(view, step.kv_layer, step.metadata, options))


def test_no_request_and_no_token(cpu: CpuKernels) -> None:
    metadata, _ = make_metadata([], 16, 0)
    kv_layer = torch.zeros(2, 2, 16, 3, 64)
    assert cpu.attention(torch.empty(0, 9, 64), kv_layer, metadata, AttentionOptions(1.0)).shape == (0, 9, 64)


@pytest.mark.parametrize("cap", [None, 50.0])
def test_huge_scores_neither_overflow_nor_give_nan(cpu: CpuKernels, cap: float | None) -> None:
    sequence = make_sequence(1200, HeadLayout(3, 1, 64), torch.float32, 3)
    loud = Sequence(sequence.q * 1e4, sequence.k * 1e4, sequence.v)
    chunks = [Chunk(loud, 1100, 1200)]
    assert_close(attend(cpu, chunks, cap=cap), attend(ReferenceKernels(), chunks, cap=cap))


def test_a_soft_cap_bounds_the_weights(cpu: CpuKernels) -> None:
    """Scores of 1,000 and -1,000 under a cap of 1: the softmax of 1 and -1."""
    q, k, v = (
        torch.tensor([[[1000.0]]] * 2),
        torch.tensor([[[1.0]], [[-1.0]]]),
        torch.tensor([[[1.0]], [[0.0]]]),
    )
    out = attend(cpu, [Chunk(Sequence(q, k, v), 1, 2)], cap=1.0)
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, -1.0]).softmax(0)[:1])
    assert_close(out, attend(ReferenceKernels(), [Chunk(Sequence(q, k, v), 1, 2)], cap=1.0))


def test_a_cap_far_above_the_scores_changes_next_to_nothing(cpu: CpuKernels) -> None:
    chunks = [Chunk(make_sequence(300, HeadLayout(3, 1, 64), torch.float32, 8), 100, 300)]
    assert_close(attend(cpu, chunks, cap=1e6), attend(cpu, chunks))


def test_scores_of_minus_infinity_are_weight_zero(cpu: CpuKernels) -> None:
    sequence = make_sequence(1100, HeadLayout(1, 1, 64), torch.float32, 4)
    k = sequence.k.clone()
    k[:1050] = float("-inf")  # more than the first split
    blind = Sequence(sequence.q.abs(), k, sequence.v)
    chunks = [Chunk(blind, 1060, 1100)]
    ours = attend(cpu, chunks)
    assert ours.isfinite().all()
    assert_close(ours, attend(ReferenceKernels(), chunks))


@DTYPES
@pytest.mark.parametrize(
    ("layout", "window", "cap"),
    [
        *[
            (layout, window, None)
            for layout in (HeadLayout(9, 3, 64), HeadLayout(7, 1, 80))
            for window in (None, 300)
        ],
        *[(HeadLayout(1, 1, 128), window, cap) for window, cap in ((None, None), (300, None), (300, 2.0))],
        *[(HeadLayout(2, 1, 256), None, 2.0), (HeadLayout(7, 1, 80), None, 2.0)],
    ],
    ids=str,
)
def test_bits_depend_on_the_row_and_what_it_sees_alone(
    cpu: CpuKernels, layout: HeadLayout, dtype: torch.dtype, window: int | None, cap: float | None
) -> None:
    """Whole, chunked, alone, in company, on other blocks, in other block sizes, on 1 and 2 threads."""
    length = 1100
    sequence = make_sequence(length, layout, dtype, 5)
    whole = attend(cpu, [Chunk(sequence, 0, length)], 16, window, cap)
    one_thread = CpuKernels(1)
    assert same_bits(whole, attend(one_thread, [Chunk(sequence, 0, length)], 3, window, cap, seed=1))

    edges = [0, 1, 7, 64, 300, 1023, 1024, 1029, length]
    chunks = [Chunk(sequence, begin, end) for begin, end in itertools.pairwise(edges)]
    for kernels, block_size in ((cpu, 32), (one_thread, 16)):
        assert same_bits(whole, attend(kernels, chunks, block_size, window, cap, seed=2))

    rows = [0, 1, 63, 64, 65, 500, 1023, 1024, length - 1]
    others = [Chunk(make_sequence(n, layout, dtype, n), n - 1, n) for n in (1, 40, 700)]
    others.append(Chunk(make_sequence(90, layout, dtype, 90), 50, 90))
    for row in rows:
        decode = Chunk(sequence, row, row + 1)
        for kernels in (cpu, one_thread):
            assert same_bits(whole[row : row + 1], attend(kernels, [decode], 16, window, cap, seed=row))
    decodes = [Chunk(sequence, row, row + 1) for row in rows]
    for kernels in (cpu, one_thread):
        together = attend(kernels, [others[0], *decodes, *others[1:]], 1, window, cap, seed=9)
        assert same_bits(whole[rows], together[1 : 1 + len(rows)])


@DTYPES
@pytest.mark.parametrize(("window", "cap"), [(None, None), (1500, None), (None, 2.0)])
def test_bits_of_a_long_context_whose_splits_run_side_by_side(
    cpu: CpuKernels, dtype: torch.dtype, window: int | None, cap: float | None
) -> None:
    sequence = make_sequence(5000, HeadLayout(2, 1, 64), dtype, 6)
    one_thread = CpuKernels(1)
    for begin, end in ((4999, 5000), (4090, 4100), (1020, 1030)):
        chunks = [Chunk(sequence, begin, end)]
        ours = attend(cpu, chunks, 16, window, cap)
        assert same_bits(ours, attend(one_thread, chunks, 16, window, cap))
        assert_close(ours, attend(ReferenceKernels(), chunks, 16, window, cap))


@pytest.mark.parametrize("num_requests", [2, 3, 5, 33, 64])
def test_bits_in_batches_of_every_size(cpu: CpuKernels, num_requests: int) -> None:
    layout = HeadLayout(9, 3, 64)
    chunks = [
        Chunk(make_sequence(20 + 7 * i, layout, torch.float32, i), 19 + 7 * i - i % 3, 20 + 7 * i)
        for i in range(num_requests)
    ]
    together = attend(cpu, chunks)
    alone = torch.cat([attend(cpu, [chunk]) for chunk in chunks])
    assert same_bits(together, alone)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("layout", "block_size", "window", "cap"),
    [
        (HeadLayout(9, 3, 64), 16, None, None),
        (HeadLayout(4, 2, 80), 32, None, 8.0),
        (HeadLayout(3, 1, 64), 16, 90, None),
        (HeadLayout(50, 2, 64), 16, None, None),
        (HeadLayout(64, 2, 16), 16, None, None),
        (HeadLayout(71, 1, 64), 32, None, 8.0),
    ],
    ids=str,
)
def test_bits_of_requests_that_share_blocks(
    cpu: CpuKernels,
    layout: HeadLayout,
    block_size: int,
    window: int | None,
    cap: float | None,
    dtype: torch.dtype,
) -> None:
    """As of requests that have copies of them; one split is shared, a part of one, and less than a tile."""
    chunks: list[Chunk] = []
    lengths: list[int] = []
    for group, (shared, requests) in enumerate([(1024, 5), (192, 9), (48, 3), (1152, 2)]):
        common = make_sequence(shared, layout, dtype, group)
        for r in range(requests):
            own = make_sequence(20 + 9 * r, layout, dtype, 100 * group + r)
            whole = Sequence(*(torch.cat(pair) for pair in zip(fields(common), fields(own), strict=True)))
            chunks.append(Chunk(whole, whole.length - 1 - r % 8, whole.length))
            lengths.append(shared)
    apart = make_step(chunks, block_size)
    tables = apart.metadata.block_tables.clone()
    for r in range(1, len(chunks)):
        if lengths[r] == lengths[r - 1]:
            tables[r, : lengths[r] // block_size] = tables[r - 1, : lengths[r] // block_size]
    together = dataclasses.replace(apart.metadata, block_tables=tables)
    options = AttentionOptions(layout.head_dim**-0.5, window, cap)
    right = cpu.attention(apart.q, apart.kv_layer, apart.metadata, options)
    for kernels in (cpu, CpuKernels(1)):
        assert same_bits(kernels.attention(apart.q, apart.kv_layer, together, options), right)


def fields(sequence: Sequence) -> tuple[Tensor, Tensor, Tensor]:
    return sequence.q, sequence.k, sequence.v
