"""The CPU kernels beside torch, on the shapes of SmolLM2-135M: ``python -m loadtests.kernels``.

Attention over a paged cache of 30 layers (one layer alone would fit a large CPU's caches): 32 decoding requests
of 1,024 tokens each, and a prompt of 512; the peer gathers the blocks and calls SDPA. Linear: the layers' four
maps, against ``F.linear``. Both sides take turns and the best time of each counts. What the machine can do is
measured beside it: memory by a sum over a large tensor, arithmetic by a large float32 product.

``--device cuda`` measures the Triton kernels instead, see ``loadtests/gpu_kernels.py``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu import CpuKernels
from kernels.interface import AttentionMetadata, PackedLinear, kv_pool_shape
from loadtests.report import Figure, add_arguments, finish, print_table, save

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 16
SCALE = HEAD_DIM**-0.5
MAPS = ((576, 960), (576, 576), (576, 3072), (1536, 576))  # in and out: QKV, output, gate and up, down
LINEAR_ROWS = (1, 8, 32, 256)
# In float32 the peer is a vendor's tuned library, which does not keep a row's bits from batch to batch.
LINEAR_BARS = {torch.bfloat16: 1.0, torch.float32: 0.8}


@dataclass(frozen=True, slots=True)
class Measured:
    """One operation on both sides; ``amount`` is its bytes or its operations."""

    name: str
    ours: float  # seconds
    theirs: float
    amount: float
    limit: float  # bytes or operations a second of this machine
    unit: str
    bar: float

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours

    def row(self) -> list[str]:
        """Cells for the table."""
        rate = self.amount / self.ours
        return [
            self.name,
            f"{self.ours * 1e3:.2f}",
            f"{self.theirs * 1e3:.2f}",
            f"{self.ratio:.2f}x",
            f"{rate / 1e9:.1f} {self.unit}",
            f"{rate / self.limit:.0%}",
        ]


def best(rounds: int, *calls: Callable[[], object]) -> list[float]:
    """The shortest time of each call in seconds; the calls take turns."""
    times = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            began = time.perf_counter()
            call()
            times[i] = min(times[i], time.perf_counter() - began)
    return times


def memory_bandwidth() -> float:
    """Bytes a second that a sum over 256 MB reads."""
    numbers = torch.ones(1 << 26)
    return numbers.numel() * 4 / best(8, numbers.sum)[0]


def arithmetic_peak() -> float:
    """Operations a second of a square float32 product of 1,024."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / best(8, lambda: a @ b)[0]


def make_metadata(context: int, num_queries: int, requests: int) -> AttentionMetadata:
    """Requests of equal length, the last ``num_queries`` tokens new, on blocks scattered over the pool."""
    blocks = context // BLOCK_SIZE
    tables = torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(0)).int()
    tables = tables.view(requests, blocks)
    positions = torch.arange(context - num_queries, context)
    slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionMetadata(
        query_start=torch.arange(requests + 1, dtype=torch.int32) * num_queries,
        context_lens=torch.full((requests,), context, dtype=torch.int32),
        block_tables=tables,
        positions=positions.repeat(requests),
        slot_mapping=slots.flatten(),
        max_query_len=num_queries,
        max_context_len=context,
    )


def gather_and_sdpa(q: Tensor, kv_layer: Tensor, metadata: AttentionMetadata) -> Tensor:
    """What one writes in torch: gather every request's blocks, then SDPA over the batch."""
    requests = metadata.block_tables.shape[0]
    gathered = kv_layer[metadata.block_tables.long()]  # [R, blocks, 2, block, kv_heads, dim]
    k, v = (gathered[:, :, i].flatten(1, 2).transpose(1, 2) for i in (0, 1))
    queries = q.view(requests, -1, HEADS, HEAD_DIM).transpose(1, 2)
    causal = queries.shape[2] > 1
    out = F.scaled_dot_product_attention(queries, k, v, is_causal=causal, scale=SCALE, enable_gqa=True)
    return out.transpose(1, 2).reshape(q.shape)


def measure_attention(
    kernels: CpuKernels, name: str, context: int, num_queries: int, requests: int, rounds: int
) -> tuple[float, float]:
    """Seconds of all layers, ours and torch's, in bf16."""
    metadata = make_metadata(context, num_queries, requests)
    shape = kv_pool_shape(metadata.block_tables.numel(), LAYERS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    pool = torch.empty(shape, dtype=torch.bfloat16)
    for block in pool:
        block.normal_()
    q = torch.randn(requests * num_queries, HEADS, HEAD_DIM).bfloat16()
    ours = kernels.attention(q, pool[:, 0], metadata, SCALE, None)
    if not torch.allclose(ours.float(), gather_and_sdpa(q, pool[:, 0], metadata).float(), atol=0.05):
        raise SystemExit(f"{name}: the kernel and torch disagree")

    def run_ours() -> None:
        for layer in range(LAYERS):
            kernels.attention(q, pool[:, layer], metadata, SCALE, None)

    def run_theirs() -> None:
        for layer in range(LAYERS):
            gather_and_sdpa(q, pool[:, layer], metadata)

    times = best(rounds, run_ours, run_theirs)
    return times[0], times[1]


def measure_linear(kernels: CpuKernels, rows: int, dtype: torch.dtype, rounds: int) -> tuple[float, float]:
    """Seconds of all layers' maps, ours and torch's."""
    weights = [[torch.randn(n, k).to(dtype) for k, n in MAPS] for _ in range(LAYERS)]
    packed: list[list[PackedLinear]] = [[kernels.pack_linear(w, None) for w in layer] for layer in weights]
    inputs = [torch.randn(rows, k).to(dtype) for k, _ in MAPS]

    def run_ours() -> None:
        for layer in packed:
            for x, weight in zip(inputs, layer, strict=True):
                kernels.linear(x, weight)

    def run_theirs() -> None:
        for layer in weights:
            for x, weight in zip(inputs, layer, strict=True):
                F.linear(x, weight)

    times = best(rounds, run_ours, run_theirs)
    return times[0], times[1]


def measure(num_threads: int, rounds: int) -> tuple[list[Measured], float, float]:
    """Everything, and the machine's bytes and operations a second."""
    torch.set_num_threads(num_threads)
    kernels = CpuKernels(num_threads)
    bandwidth, peak = memory_bandwidth(), arithmetic_peak()
    results = []

    def add(name: str, times: tuple[float, float], amount: float, limit: float, unit: str, bar: float) -> None:
        results.append(Measured(name, *times, amount, limit, unit, bar))

    times = measure_attention(kernels, "decode", 1024, 1, 32, rounds)
    read = LAYERS * 32 * 1024 * 2 * KV_HEADS * HEAD_DIM * 2
    add("attention, 32 x 1 query over 1,024, bf16", times, read, bandwidth, "GB/s", 1.0)
    times = measure_attention(kernels, "prefill", 512, 512, 1, rounds)
    work = LAYERS * 4 * HEADS * HEAD_DIM * 512 * 513 / 2
    add("attention, a prompt of 512, bf16", times, work, peak, "GFLOP/s", 1.0)
    parameters = LAYERS * sum(k * n for k, n in MAPS)
    for dtype, bar in LINEAR_BARS.items():
        for rows in LINEAR_ROWS:
            times = measure_linear(kernels, rows, dtype, rounds)
            name = f"linear, {rows} row{'s' if rows > 1 else ''}, {str(dtype).removeprefix('torch.')}"
            if rows <= 8:
                add(name, times, parameters * dtype.itemsize, bandwidth, "GB/s", bar)
            else:
                add(name, times, 2 * parameters * rows, peak, "GFLOP/s", bar)
    return results, bandwidth, peak


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, check."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.kernels", description=__doc__)
    cores = os.cpu_count() or 1
    parser.add_argument("--threads", type=int, help=f"threads of both sides, on the CPU ({cores})")
    parser.add_argument("--rounds", type=int, help="turns of each side on the CPU; the best counts (5)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda":
        if arguments.threads is not None or arguments.rounds is not None:
            parser.error("--threads and --rounds are of --device cpu")
        from loadtests import gpu_kernels

        def keep(figures: list[Figure]) -> None:
            if arguments.json is not None:
                save("loadtests.kernels", figures, arguments.json)

        with torch.inference_mode():
            finish("loadtests.kernels", gpu_kernels.measure(keep), arguments)
        return
    threads = cores if arguments.threads is None else arguments.threads
    with torch.inference_mode():
        results, bandwidth, peak = measure(threads, 5 if arguments.rounds is None else arguments.rounds)
    print(f"memory {bandwidth / 1e9:.1f} GB/s, arithmetic {peak / 1e9:.0f} GFLOP/s, {threads} threads\n")
    print_table(
        ("all 30 layers", "ours ms", "torch ms", "ratio", "ours", "of limit"),
        [result.row() for result in results],
    )
    figures = [Figure(f"{result.name}: torch over ours", result.ratio, "x", result.bar) for result in results]
    figures += [
        Figure("memory", bandwidth / 1e9, "GB/s"),
        Figure("arithmetic", peak / 1e9, "GFLOP/s"),
        *(Figure(f"{result.name}: seconds", result.ours, "s") for result in results),
    ]
    finish("loadtests.kernels", figures, arguments, threads=threads)


if __name__ == "__main__":
    main()
