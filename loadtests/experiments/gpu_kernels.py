"""The Triton kernels on a GPU beside torch: ``python -m loadtests.kernels --device cuda``.

Attention with the heads of Llama-3-8B (32 over 8 of 128) in bfloat16. Decode reads a paged cache whose blocks
are scattered, prefill is one prompt; the peer is torch's SDPA on keys and values that lie contiguously, with
the fastest backend that takes them. Times are medians between events of the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.interface import AttentionOptions
from kernels.registry import get_kernels
from loadtests.experiments.paged_step import BLOCK_SIZE, make_metadata
from loadtests.report import Figure, print_table
from loadtests.stats import median

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5
DTYPE = torch.bfloat16
BATCHES, CONTEXTS = (1, 8, 32, 128, 256), (1024, 4096, 16_384, 32_768)
MOST_BYTES = 18 << 30  # of keys and values in one case
PROMPTS = (512, 2048, 8192, 16_384)
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
DEVICE = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class Limits:
    """What this GPU does at best: bytes a second of a large copy, operations of a large bfloat16 product."""

    bandwidth: float
    peak: float


def seconds(call: Callable[[], object], rounds: int = 20) -> float:
    """Median time of ``call`` on the device; its queue is kept full, so that launches do not count."""
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


def measure_limits() -> Limits:
    """Measure them."""
    source, target = (torch.randn(1 << 29, device=DEVICE).to(DTYPE) for _ in range(2))
    copied = 2 * source.numel() * source.element_size()
    bandwidth = copied / seconds(lambda: target.copy_(source), 5)
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return Limits(bandwidth, 2 * 8192**3 / seconds(lambda: a @ b, 5))


def room_for_copies(k: Tensor, v: Tensor) -> bool:
    """Whether the device has memory for keys and values of every head of the queries."""
    torch.cuda.empty_cache()
    # A copy for each of the four heads of a group, and the fifth for what a backend needs beside them.
    return 5 * (k.nbytes + v.nbytes) <= torch.cuda.mem_get_info(k.device)[0]


def fastest_sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[float, str, Tensor]:
    """Seconds, backend and result of torch's SDPA with the fastest backend that takes these shapes.

    One that takes no grouped heads gets copies for all of them, where there is room.
    """
    found = []
    for backend in BACKENDS:
        took = _sdpa(backend, q, k, v, causal)
        if took is None and room_for_copies(k, v):
            took = _sdpa(backend, q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), causal)
        if took is not None:
            found.append((took[0], backend.name.removesuffix("_ATTENTION").lower(), took[1]))
    if not found:
        raise SystemExit("no backend of torch's SDPA takes these shapes in the memory that is free")
    return min(found, key=lambda one: one[0])


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[float, Tensor] | None:
    """Seconds and result, or ``None`` if the backend does not take these shapes."""
    grouped = k.shape[1] < q.shape[1]

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=SCALE, enable_gqa=grouped)

    try:
        with sdpa_kernel(backend):
            return seconds(call, 5), call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # it does not take them
        return None


def disagree(ours: Tensor, theirs: Tensor) -> bool:
    """Whether bfloat16 does not explain the difference."""
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
    return not bool(error < 1.5e-2)


def attention(requests: int, context: int, queries: int, limits: Limits) -> tuple[list[str], list[Figure]]:
    """The last ``queries`` tokens of each request over its context, ours and torch's: a row and figures."""
    metadata = make_metadata(requests, context, queries, "cuda")
    shape = (metadata.block_tables.numel(), 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    pool = torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_()
    q = torch.randn(requests * queries, HEADS, HEAD_DIM, device=DEVICE).to(DTYPE)
    name = f"decode, {requests} x {context}" if queries == 1 else f"prefill, {context}"
    call = partial(get_kernels("triton", DEVICE).attention, q, pool, metadata, AttentionOptions(SCALE))
    ours, result = seconds(call), call()
    gathered = pool[metadata.block_tables.long()]
    del pool, call
    k, v = (gathered[:, :, i].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for i in (0, 1))
    del gathered
    batched = q.view(requests, queries, HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    theirs, backend, expected = fastest_sdpa(batched, k, v, queries > 1)
    moved = k.nbytes + v.nbytes
    del k, v
    if disagree(result, expected.transpose(1, 2).flatten(0, 1)):
        raise SystemExit(f"{name}: the kernel and torch disagree")
    torch.cuda.empty_cache()
    if queries == 1:
        rate, most, scale, unit = moved / ours, limits.bandwidth, 1e9, "GB/s"
    else:
        work = requests * 4 * HEADS * HEAD_DIM * context * (context + 1) / 2
        rate, most, scale, unit = work / ours, limits.peak, 1e12, "TFLOP/s"
    row = [name, f"{ours * 1e6:.0f}", f"{theirs * 1e6:.0f} {backend}", f"{theirs / ours:.2f}x"]
    row += [f"{rate / scale:.0f} {unit}", f"{rate / most:.0%}"]
    return row, [Figure(f"{name}: a second", rate / scale, unit), Figure(name, theirs / ours, "x")]


def measure(keep: Callable[[list[Figure]], None]) -> list[Figure]:
    """Measure everything and print it; ``keep`` gets all figures so far whenever there are more."""
    limits = measure_limits()
    figures = [
        Figure("bandwidth", limits.bandwidth / 1e9, "GB/s"),
        Figure("arithmetic", limits.peak / 1e12, "TFLOP/s"),
    ]
    print(f"copies {figures[0].value:.0f} GB/s, products {figures[1].value:.0f} TFLOP/s\n")
    cases = [(requests, context, 1) for requests in BATCHES for context in CONTEXTS]
    cases += [(1, tokens, tokens) for tokens in PROMPTS]
    rows = []
    for requests, context, queries in cases:
        if 2 * requests * context * KV_HEADS * HEAD_DIM * DTYPE.itemsize <= MOST_BYTES:
            row, found = attention(requests, context, queries, limits)
            rows.append(row)
            figures += found
            keep(figures)
    print_table(("attention", "ours us", "torch us", "ratio", "ours", "of limit"), rows)
    return figures
