"""The CPU kernels beside torch, on the shapes of SmolLM2-135M: ``python -m loadtests.kernels``.

Attention over a paged cache of 30 layers (one layer alone would fit a large CPU's caches): 32 decoding requests
of 1,024 tokens each, and a prompt of 512; the peer gathers the blocks and calls SDPA. Linear: the layers' four
maps, against ``F.linear``. Both sides take turns and the best time of each counts. What the machine can do is
measured beside it: memory by torch's fastest reduction of a large tensor, arithmetic by a large product in the
dtype that is measured, or in float32 where that is faster.

``--device cuda`` measures the Triton kernels instead, see ``gpu_kernels.py``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu import CpuKernels
from kernels.interface import AttentionMetadata, AttentionOptions, kv_pool_shape
from loadtests.experiments.paged_step import BLOCK_SIZE, make_metadata
from loadtests.report import Figure, add_arguments, finish, print_table, save
from loadtests.stats import by_turns

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
SCALE = HEAD_DIM**-0.5
OPTIONS = AttentionOptions(SCALE)
MAPS = ((576, 960), (576, 576), (576, 3072), (1536, 576))  # in and out: QKV, output, gate and up, down
LINEAR_ROWS = (1, 8, 32, 256)
# In float32 the peer is a vendor's tuned library, which does not keep a row's bits from batch to batch.
LINEAR_BARS = {torch.bfloat16: 1.0, torch.float32: 0.8}
BYTES = "bytes"
Call = Callable[[], object]


class Limits:
    """What this machine does at best: bytes read in a second (``BYTES``), and operations by dtype.

    Measured more than once, on a machine that may be busy; the highest counts.
    """

    def __init__(self) -> None:
        self.rates: dict[object, float] = {}

    def measure(self) -> None:
        """Reductions of 256 MB, and square products of 2,048."""
        numbers = torch.ones(1 << 26)
        reductions = by_turns(8, numbers.sum, numbers.max, lambda: torch.dot(numbers, numbers))
        self._take(BYTES, numbers.nbytes / min(map(min, reductions)))
        for dtype in (torch.float32, torch.bfloat16):
            a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
            self._take(dtype, 2 * 2048**3 / min(by_turns(5, partial(torch.matmul, a, b))[0]))
        self._take(torch.bfloat16, self.rates[torch.float32])  # what is narrow can be computed wide

    def _take(self, kind: object, rate: float) -> None:
        self.rates[kind] = max(rate, self.rates.get(kind, 0.0))


@dataclass(frozen=True, slots=True)
class Measured:
    """One operation on both sides; ``amount`` is its bytes, or its operations in the dtype ``kind``."""

    name: str
    ours: float  # seconds
    theirs: float
    amount: float
    kind: object
    bar: float

    @property
    def ratio(self) -> float:
        """Torch's time over ours."""
        return self.theirs / self.ours

    def share(self, limits: Limits) -> float:
        """Of the machine's limit."""
        return self.amount / self.ours / limits.rates[self.kind]

    def row(self, limits: Limits) -> list[str]:
        """Cells for the table."""
        times = [f"{self.ours * 1e3:.2f}", f"{self.theirs * 1e3:.2f}", f"{self.ratio:.2f}x"]
        rate = f"{self.amount / self.ours / 1e9:.1f} {'GB/s' if self.kind == BYTES else 'GFLOP/s'}"
        return [self.name, *times, rate, f"{self.share(limits):.0%}"]


def best(rounds: int, ours: Call, theirs: Call) -> tuple[float, float]:
    """The shortest time of each call in seconds; the calls take turns."""
    first, second = by_turns(rounds, ours, theirs)
    return min(first), min(second)


def gather_and_sdpa(q: Tensor, kv_layer: Tensor, metadata: AttentionMetadata) -> Tensor:
    """What one writes in torch: gather every request's blocks, then SDPA over the batch."""
    requests = metadata.block_tables.shape[0]
    gathered = kv_layer[metadata.block_tables.long()]  # [R, blocks, 2, block, kv_heads, dim]
    k, v = (gathered[:, :, i].flatten(1, 2).transpose(1, 2) for i in (0, 1))
    queries = q.view(requests, -1, HEADS, HEAD_DIM).transpose(1, 2)
    causal = queries.shape[2] > 1
    out = F.scaled_dot_product_attention(queries, k, v, is_causal=causal, scale=SCALE, enable_gqa=True)
    return out.transpose(1, 2).reshape(q.shape)


def attention_calls(kernels: CpuKernels, requests: int, context: int, queries: int) -> tuple[Call, Call]:
    """All layers in bfloat16, ours and torch's."""
    metadata = make_metadata(requests, context, queries)
    shape = kv_pool_shape(metadata.block_tables.numel(), LAYERS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    pool = torch.empty(shape, dtype=torch.bfloat16)
    for block in pool:
        block.normal_()
    q = torch.randn(requests * queries, HEADS, HEAD_DIM).bfloat16()
    ours = kernels.attention(q, pool[:, 0], metadata, OPTIONS)
    if not torch.allclose(ours.float(), gather_and_sdpa(q, pool[:, 0], metadata).float(), atol=0.05):
        raise SystemExit(f"attention of {queries} queries over {context}: the kernel and torch disagree")
    layers = [pool[:, layer] for layer in range(LAYERS)]
    return (
        lambda: [kernels.attention(q, layer, metadata, OPTIONS) for layer in layers],
        lambda: [gather_and_sdpa(q, layer, metadata) for layer in layers],
    )


def linear_calls(kernels: CpuKernels, rows: int, dtype: torch.dtype) -> tuple[Call, Call]:
    """All layers' maps, ours and torch's."""
    weights = [torch.randn(n, k).to(dtype) for _ in range(LAYERS) for k, n in MAPS]
    packed = [kernels.pack_linear(weight, None) for weight in weights]
    inputs = [torch.randn(rows, k).to(dtype) for k, _ in MAPS] * LAYERS
    return (
        lambda: [kernels.linear(x, weight) for x, weight in zip(inputs, packed, strict=True)],
        lambda: [F.linear(x, weight) for x, weight in zip(inputs, weights, strict=True)],
    )


def measure(num_threads: int, rounds: int) -> Iterator[Measured]:
    """Everything."""
    kernels = CpuKernels(num_threads)
    times = best(rounds, *attention_calls(kernels, 32, 1024, 1))
    read = LAYERS * 32 * 1024 * 2 * KV_HEADS * HEAD_DIM * 2
    yield Measured("attention, 32 x 1 query over 1,024, bf16", *times, read, BYTES, 1.0)
    times = best(rounds, *attention_calls(kernels, 1, 512, 512))
    work = LAYERS * 4 * HEADS * HEAD_DIM * 512 * 513 / 2
    yield Measured("attention, a prompt of 512, bf16", *times, work, torch.bfloat16, 1.0)
    parameters = LAYERS * sum(k * n for k, n in MAPS)
    for dtype, bar in LINEAR_BARS.items():
        for rows in LINEAR_ROWS:
            times = best(rounds, *linear_calls(kernels, rows, dtype))
            name = f"linear, {rows} row{'s' if rows > 1 else ''}, {str(dtype).removeprefix('torch.')}"
            few = rows <= 8  # it then reads the weights, else it computes
            amount = parameters * dtype.itemsize if few else 2 * parameters * rows
            yield Measured(name, *times, amount, BYTES if few else dtype, bar)


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
        from loadtests.experiments import gpu_kernels

        def keep(figures: list[Figure]) -> None:
            if arguments.json is not None:
                save("loadtests.kernels", figures, arguments.json)

        with torch.inference_mode():
            finish("loadtests.kernels", gpu_kernels.measure(keep), arguments)
        return
    threads = cores if arguments.threads is None else arguments.threads
    torch.set_num_threads(threads)
    limits = Limits()
    with torch.inference_mode():
        limits.measure()
        results = list(measure(threads, 5 if arguments.rounds is None else arguments.rounds))
        limits.measure()
    header = ("all 30 layers", "ours ms", "torch ms", "ratio", "ours", "of limit")
    print_table(header, [result.row(limits) for result in results])
    figures = [Figure(f"{result.name}: torch over ours", result.ratio, "x", result.bar) for result in results]
    units = {BYTES: "GB/s", torch.float32: "GFLOP/s", torch.bfloat16: "GFLOP/s"}
    maxima = [Figure(f"limit, {kind}", limits.rates[kind] / 1e9, unit) for kind, unit in units.items()]
    print(f"{threads} threads: {'; '.join(figure.line() for figure in maxima)}")
    figures += maxima
    figures += [Figure(f"{result.name}: seconds", result.ours, "s") for result in results]
    figures += [Figure(f"{result.name}: of the limit", result.share(limits)) for result in results]
    finish("loadtests.kernels", figures, arguments, threads=threads)


if __name__ == "__main__":
    main()
