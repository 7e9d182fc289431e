"""Our kernels beside torch: ``python -m loadtests.kernels``.

On the CPU the shapes are those of SmolLM2-135M. Attention reads a paged cache of 30 layers (one layer alone
would fit a large CPU's caches); the peer gathers the blocks and calls SDPA. Linear: the layers' four maps,
against ``F.linear``. Both sides and what shows the machine's limit (reductions of 256 MB, square products of
2,048) take turns, and the turn with the median share of the limit counts: memory changes its speed meanwhile.

``--device cuda`` measures attention in Triton with the heads of Llama-3-8B in bfloat16. The peer is torch's
SDPA on contiguous keys and values, with the fastest backend that takes them.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.cpu import CpuKernels
from kernels.interface import AttentionMetadata, AttentionOptions, kv_pool_shape
from kernels.registry import get_kernels
from loadtests.report import Figure, finish, parse, save
from loadtests.stats import by_turns, median

BLOCK_SIZE = 16
LAYERS = 30  # on the CPU
MAPS = ((576, 960), (576, 576), (576, 3072), (1536, 576))  # in and out: QKV, output, gate and up, down
LINEAR_ROWS = (1, 8, 32, 256)
# In float32 the peer is a vendor's tuned library, which does not keep a row's bits from batch to batch.
LINEAR_BARS = {torch.bfloat16: 1.0, torch.float32: 0.8}
CPU_ATTENTION = {"attention, 32 x 1 query over 1,024, bf16": (32, 1024, 1)}  # requests, context, queries
CPU_ATTENTION |= {f"attention, a prompt of {n:,}, bf16": (1, n, n) for n in (512, 1024, 4096)}
GPU_ATTENTION = {
    f"decode, {requests} x {context}": (requests, context, 1)
    for requests in (1, 8, 32, 128, 256)
    for context in (1024, 4096, 16_384, 32_768)
    if requests * context <= 4_718_592  # 18 GiB of keys and values
}
GPU_ATTENTION |= {f"prefill, {context}": (1, context, context) for context in (512, 2048, 8192, 16_384)}
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
BYTES = "bytes"
Call = Callable[[], object]
Tensors = Callable[[], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Measured:
    """One operation on both sides; ``amount`` is its bytes, or its operations in the dtype ``kind``.

    ``limit`` is how much of that the machine does in a second.
    """

    name: str
    ours: float  # seconds
    theirs: float
    limit: float
    amount: float
    kind: object
    bar: float | None = None
    peer: str = ""

    def figures(self) -> list[Figure]:
        """The ratio, with its bar, our rate, and its share of the limit."""
        rate = self.amount / self.ours
        scale, unit = (1e9, " GB/s") if self.kind == BYTES else (1e12, " TFLOP/s")
        peer = f"torch {self.peer}".rstrip()
        return [
            Figure(f"{self.name}: {peer} over ours", self.theirs / self.ours, "x", self.bar),
            Figure(f"{self.name}: rate", rate / scale, unit),
            Figure(f"{self.name}: share of the limit", rate / self.limit),
            Figure(f"{self.name}: limit", self.limit / scale, unit),
        ]


@dataclass(frozen=True, slots=True)
class Heads:
    """Of the queries, of keys and values, and the size of each."""

    queries: int
    kv: int
    size: int

    def step(
        self, requests: int, context: int, queries: int, layers: int, device: str
    ) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """Queries, KV pool and metadata in bfloat16: requests of equal length on scattered blocks.

        The last ``queries`` tokens of each are new.
        """
        blocks = -(-context // BLOCK_SIZE)
        tables = torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(0)).int()
        tables = tables.view(requests, blocks).to(device)
        positions = torch.arange(context - queries, context, device=device)
        slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        metadata = AttentionMetadata(
            query_start=torch.arange(requests + 1, dtype=torch.int32, device=device) * queries,
            context_lens=torch.full((requests,), context, dtype=torch.int32, device=device),
            block_tables=tables,
            positions=positions.repeat(requests),
            slot_mapping=slots.flatten(),
            max_query_len=queries,
            max_context_len=context,
        )
        shape = kv_pool_shape(requests * blocks, layers, BLOCK_SIZE, self.kv, self.size)
        if device == "cpu":  # in large pages and from the start of a line, as the engine's
            size = math.prod(shape)
            memory = torch.from_numpy(np.empty(size + 32, dtype=np.int16)).view(torch.bfloat16)
            pool = memory[-memory.data_ptr() % 64 // 2 :][:size].view(shape).normal_()
        else:
            pool = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        q = torch.randn(requests * queries, self.queries, self.size, device=device).bfloat16()
        return q, pool, metadata

    def amount(self, requests: int, context: int, queries: int) -> tuple[float, object]:
        """Of one layer: the bytes of all keys and values in decode, else the operations."""
        if queries == 1:
            return 2.0 * requests * context * self.kv * self.size * 2, BYTES
        return requests * 4 * self.queries * self.size * context * (context + 1) / 2, torch.bfloat16


CPU_HEADS, GPU_HEADS = Heads(9, 3, 64), Heads(32, 8, 128)


def contiguous(layer: Tensor, metadata: AttentionMetadata, context: int) -> tuple[Tensor, Tensor]:
    """Keys and values of every request, gathered from its blocks: ``[R, kv_heads, context, dim]``."""
    gathered = layer[metadata.block_tables.long()]  # [R, blocks, 2, block, kv_heads, dim]
    k, v = (gathered[:, :, place].flatten(1, 2)[:, :context].transpose(1, 2) for place in (0, 1))
    return k, v


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Torch's; ``[R, heads, tokens, dim]``."""
    grouped = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def check(name: str, ours: Tensor, theirs: Tensor) -> None:
    """Exit unless bfloat16 explains the difference; ``theirs`` is of ``sdpa``."""
    expected = theirs.transpose(1, 2).flatten(0, 1).float()
    if not bool((ours.float() - expected).norm() / expected.norm() < 1.5e-2):
        raise SystemExit(f"{name}: the kernel and torch disagree")


class Cpu:
    """Measures the CPU's kernels with so many threads, in so many turns of each side."""

    def __init__(self, threads: int, rounds: int) -> None:
        torch.set_num_threads(threads)
        self._kernels = CpuKernels(threads)
        self._rounds = rounds
        numbers = torch.from_numpy(np.ones(1 << 26, dtype=np.float32))  # in large pages, as our weights and KV
        reductions: tuple[Call, ...] = (numbers.sum, numbers.max, partial(torch.dot, numbers, numbers))
        self._limits: dict[object, tuple[float, Sequence[Call]]] = {BYTES: (numbers.nbytes, reductions)}
        products: list[Call] = []
        for dtype in (torch.float32, torch.bfloat16):  # what is narrow can be computed wide
            a, b = torch.randn(2048, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
            packed = self._kernels.pack_linear(b.T, None)
            products += [partial(self._kernels.linear, a, packed), partial(torch.matmul, a, b)]
            self._limits[dtype] = 2 * 2048**3, [*products]

    def measure(self) -> Iterator[Measured]:
        for name, case in CPU_ATTENTION.items():
            amount, kind = CPU_HEADS.amount(*case)
            yield Measured(name, *self._turn(kind, *self._attention(name, *case)), LAYERS * amount, kind, 1.0)
        parameters = LAYERS * sum(k * n for k, n in MAPS)
        for dtype, bar in LINEAR_BARS.items():
            for rows in LINEAR_ROWS:
                name = f"linear, {rows} row{'s' if rows > 1 else ''}, {str(dtype).removeprefix('torch.')}"
                few = (parameters * dtype.itemsize, BYTES)  # it then reads the weights, else it computes
                amount, kind = few if rows <= 8 else (2 * parameters * rows, dtype)
                yield Measured(name, *self._turn(kind, *self._linear(rows, dtype)), amount, kind, bar)

    def _turn(self, kind: object, ours: Tensors, theirs: Call) -> tuple[float, float, float]:
        """Seconds of each side, and the limit. Torch's threads spin after their part, so that others wait."""
        (amount, calls), pause = self._limits[kind], partial(time.sleep, 0.02)
        recorded = self._kernels.record(lambda _: ours()[-1], ())  # an engine replays steps, too
        replay = ours if recorded is None else lambda: [*recorded[1].replay(())]
        turns = by_turns(
            self._rounds, replay, theirs, *(each for call in calls for each in (pause, call)), pause
        )
        limits = [amount / min(times) for times in zip(*turns[3:-1:2], strict=True)]
        return sorted(zip(*turns[:2], limits, strict=True), key=lambda one: one[0] * one[2])[self._rounds // 2]

    def _attention(self, name: str, requests: int, context: int, queries: int) -> tuple[Tensors, Call]:
        q, pool, metadata = CPU_HEADS.step(requests, context, queries, LAYERS, "cpu")
        layers, batched = pool.unbind(1), q.view(requests, queries, *q.shape[1:]).transpose(1, 2)
        kernel, options = self._kernels.attention, AttentionOptions(CPU_HEADS.size**-0.5)

        def theirs(layer: Tensor) -> Tensor:
            return sdpa(batched, *contiguous(layer, metadata, context), queries > 1)

        check(name, kernel(q, layers[0], metadata, options), theirs(layers[0]))
        return (
            lambda: [kernel(q, layer, metadata, options) for layer in layers],
            lambda: [theirs(layer) for layer in layers],
        )

    def _linear(self, rows: int, dtype: torch.dtype) -> tuple[Tensors, Call]:
        weights = [torch.randn(n, k).to(dtype) for _ in range(LAYERS) for k, n in MAPS]
        packed = [self._kernels.pack_linear(weight, None) for weight in weights]
        inputs = [torch.randn(rows, k).to(dtype) for k, _ in MAPS] * LAYERS
        return (
            lambda: [self._kernels.linear(x, weight) for x, weight in zip(inputs, packed, strict=True)],
            lambda: [F.linear(x, weight) for x, weight in zip(inputs, weights, strict=True)],
        )


class Gpu:
    @staticmethod
    def limits() -> dict[object, float]:
        """A copy of 1 GB, and square products of 8,192."""
        source, target = (torch.randn(1 << 29, device="cuda").bfloat16() for _ in range(2))
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return {
            BYTES: 2 * source.nbytes / seconds(lambda: target.copy_(source), 5),
            torch.bfloat16: 2 * 8192**3 / seconds(lambda: a @ b, 5),
        }

    def measure(self) -> Iterator[Measured]:
        limits = self.limits()
        for name, (requests, context, queries) in GPU_ATTENTION.items():
            q, pool, metadata = GPU_HEADS.step(requests, context, queries, 1, "cuda")
            kernel = get_kernels("triton", torch.device("cuda")).attention
            call = partial(kernel, q, pool[:, 0], metadata, AttentionOptions(GPU_HEADS.size**-0.5))
            ours, result = seconds(call), call()
            k, v = (one.contiguous() for one in contiguous(pool[:, 0], metadata, context))
            del pool, call
            batched = q.view(requests, queries, *q.shape[1:]).transpose(1, 2).contiguous()
            theirs, backend, expected = fastest_sdpa(batched, k, v, queries > 1)
            del k, v
            check(name, result, expected)
            torch.cuda.empty_cache()
            amount, kind = GPU_HEADS.amount(requests, context, queries)
            yield Measured(name, ours, theirs, limits[kind], amount, kind, peer=backend)


def seconds(call: Call, rounds: int = 20) -> float:
    """Median time of ``call`` on the GPU; its queue is kept full, so that launches do not count."""
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(rounds):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / rounds)
    return median(times)


def room_for_copies(k: Tensor, v: Tensor) -> bool:
    """Whether the GPU has memory for keys and values of every head of the queries."""
    torch.cuda.empty_cache()
    # A copy for each of the four heads of a group, and the fifth for what a backend needs beside them.
    return 5 * (k.nbytes + v.nbytes) <= torch.cuda.mem_get_info(k.device)[0]


def fastest_sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[float, str, Tensor]:
    """Seconds, backend and result of torch's SDPA with the fastest backend that takes these shapes.

    One that takes no grouped heads gets copies for all of them, where there is room.
    """

    def timed(backend: SDPBackend, k: Tensor, v: Tensor) -> list[tuple[float, str, Tensor]]:
        try:
            with sdpa_kernel(backend):
                call = partial(sdpa, q, k, v, causal)
                return [(seconds(call, 5), backend.name.removesuffix("_ATTENTION").lower(), call())]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # it does not take them
            return []

    found = []
    for backend in BACKENDS:
        took = timed(backend, k, v)
        if not took and room_for_copies(k, v):
            took = timed(backend, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))
        found += took
    if not found:
        raise SystemExit("no backend of torch's SDPA takes these shapes in the memory that is free")
    return min(found, key=lambda one: one[0])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, check; the file has all figures so far whenever there are more."""
    options = {
        "--threads": (os.cpu_count() or 1, "of both sides on the CPU"),
        "--rounds": (9, "turns of each side on the CPU; the median one counts"),
        "--device": (("cpu", "cuda"), "whose kernels"),
    }
    arguments = parse("kernels", __doc__, options, argv)
    device = Gpu() if arguments.device == "cuda" else Cpu(arguments.threads, arguments.rounds)
    figures: list[Figure] = []
    with torch.inference_mode():
        for result in device.measure():
            figures += result.figures()
            if arguments.json is not None:
                save("loadtests.kernels", figures, arguments.json)
    finish("loadtests.kernels", figures, arguments, "kernel", threads=arguments.threads)
