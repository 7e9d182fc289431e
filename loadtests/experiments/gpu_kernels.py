"""The Triton kernels on a GPU beside torch, and the swaps: ``python -m loadtests.kernels --device cuda``.

Attention with the heads of Llama-3-8B (32 over 8 of 128) in bfloat16. Decode reads a paged cache whose blocks
are scattered, prefill is one prompt; the peer is torch's SDPA on keys and values that lie contiguously, with
the fastest backend that takes them. Times are medians between events of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.kv.kv_cache import KVCache
from engine.kv.transfers import Transfers
from engine.models.config import ModelConfig
from kernels.interface import AttentionMetadata
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
SWAP_BLOCKS = 512
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


def limits() -> Limits:
    """Measure them."""
    source, target = (torch.randn(1 << 29, device=DEVICE).to(DTYPE) for _ in range(2))
    copied = 2 * source.numel() * source.element_size()
    bandwidth = copied / seconds(lambda: target.copy_(source), 5)
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return Limits(bandwidth, 2 * 8192**3 / seconds(lambda: a @ b, 5))


def make_step(requests: int, context: int, queries: int) -> tuple[AttentionMetadata, Tensor, Tensor]:
    """Requests of equal length whose last ``queries`` tokens are new, on scattered blocks of a random pool."""
    metadata = make_metadata(requests, context, queries, "cuda")
    shape = (metadata.block_tables.numel(), 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    pool = torch.empty(shape, device=DEVICE, dtype=DTYPE).normal_()
    return metadata, pool, torch.randn(requests * queries, HEADS, HEAD_DIM, device=DEVICE).to(DTYPE)


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
    error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
    return not bool(error < 1.5e-2)


def decode(limit: Limits) -> Iterator[tuple[list[str], list[Figure]]]:
    """One new token of each request over its context."""
    kernels = get_kernels("triton", DEVICE)
    for requests in BATCHES:
        for context in CONTEXTS:
            moved = 2 * requests * context * KV_HEADS * HEAD_DIM * DTYPE.itemsize
            if moved > MOST_BYTES:
                continue
            metadata, pool, q = make_step(requests, context, 1)
            name = f"decode, {requests} x {context}"
            call = partial(kernels.attention, q, pool, metadata, SCALE, None)
            ours, result = seconds(call), call()
            gathered = pool[metadata.block_tables.long()]
            del pool, call
            k, v = (gathered[:, :, i].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for i in (0, 1))
            del gathered
            theirs, backend, expected = fastest_sdpa(q.unsqueeze(2), k, v, False)
            del k, v
            if disagree(result, expected[:, :, 0]):
                raise SystemExit(f"{name}: the kernel and torch disagree")
            rate = moved / ours
            row = [name, f"{ours * 1e6:.0f}", f"{theirs * 1e6:.0f} {backend}", f"{theirs / ours:.2f}x"]
            row += [f"{rate / 1e9:.0f} GB/s", f"{rate / limit.bandwidth:.0%}"]
            yield row, [Figure(f"{name}: bytes a second", rate / 1e9, "GB/s"), Figure(name, theirs / ours, "x")]
            torch.cuda.empty_cache()


def prefill(limit: Limits) -> Iterator[tuple[list[str], list[Figure]]]:
    """A whole prompt."""
    kernels = get_kernels("triton", DEVICE)
    for tokens in PROMPTS:
        metadata, pool, q = make_step(1, tokens, tokens)
        name = f"prefill, {tokens}"
        call = partial(kernels.attention, q, pool, metadata, SCALE, None)
        ours, result = seconds(call), call()
        flat = pool[metadata.block_tables[0].long()].transpose(0, 1).flatten(1, 2)[:, :tokens]
        k, v = (flat[i].transpose(0, 1)[None].contiguous() for i in (0, 1))
        queries = q.transpose(0, 1)[None].contiguous()
        theirs, backend, expected = fastest_sdpa(queries, k, v, True)
        if disagree(result, expected[0].transpose(0, 1)):
            raise SystemExit(f"{name}: the kernel and torch disagree")
        rate = 4 * HEADS * HEAD_DIM * tokens * (tokens + 1) / 2 / ours
        row = [name, f"{ours * 1e6:.0f}", f"{theirs * 1e6:.0f} {backend}", f"{theirs / ours:.2f}x"]
        row += [f"{rate / 1e12:.0f} TFLOP/s", f"{rate / limit.peak:.0%}"]
        yield (
            row,
            [Figure(f"{name}: operations a second", rate / 1e12, "TFLOP/s"), Figure(name, theirs / ours, "x")],
        )


def swaps() -> tuple[list[str], list[Figure]]:
    """Lines and figures of swaps of 2 MiB blocks: alone, and beside products that take as long."""
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=4096,
        num_layers=32,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    cache = KVCache(model, SWAP_BLOCKS + 8, BLOCK_SIZE, DTYPE, DEVICE, SWAP_BLOCKS)
    size = cache.pool[0].numel() * cache.pool.element_size() * SWAP_BLOCKS
    scattered = torch.randperm(SWAP_BLOCKS).tolist()
    plain = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    rates = {
        "one copy out": size / seconds(partial(plain.copy_, on_device, non_blocking=True), 3),
        "one copy in": size / seconds(partial(on_device.copy_, plain, non_blocking=True), 3),
    }
    everything = list(range(SWAP_BLOCKS))
    orders = {"in one run": everything, "scattered": scattered}

    def swap(transfers: Transfers) -> None:
        cache.transfer(transfers)
        cache.before_writing(everything)  # so that the compute stream waits and its events tell the time

    for order, places in orders.items():
        pairs = list(zip(everything, places, strict=True))
        out, back = Transfers(swap_out=pairs), Transfers(swap_in=pairs)
        rates[f"swap out, {order}"] = size / seconds(partial(swap, out), 3)
        rates[f"swap in, {order}"] = size / seconds(partial(swap, back), 3)
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE) for _ in range(2))
    copying = size / rates["swap out, in one run"]
    times = max(1, round(copying / seconds(lambda: a @ b, 3)))

    def compute() -> None:
        for _ in range(times):
            a @ b

    def compute_beside() -> None:
        cache.transfer(Transfers(swap_out=[(block, block) for block in everything]))
        cache.before_writing([SWAP_BLOCKS])
        compute()

    alone, beside = seconds(compute, 3), seconds(compute_beside, 3)
    torch.cuda.synchronize()
    lines = [f"{name}: {rate / 1e9:.1f} GB/s" for name, rate in rates.items()]
    lines.append(
        f"products that take {alone * 1e3:.1f} ms alone take {beside * 1e3:.1f} ms beside a swap-out of "
        f"{copying * 1e3:.1f} ms"
    )
    figures = [Figure(name, rate / 1e9, "GB/s") for name, rate in rates.items()]
    return lines, [*figures, Figure("products beside a swap-out", beside / alone, "x")]


def measure(keep: Callable[[list[Figure]], None]) -> list[Figure]:
    """Measure everything and print it; ``keep`` gets all figures so far whenever there are more."""
    limit = limits()
    name = torch.cuda.get_device_name(DEVICE)
    print(f"{name}: copies {limit.bandwidth / 1e9:.0f} GB/s, products {limit.peak / 1e12:.0f} TFLOP/s\n")
    figures = [
        Figure("bandwidth", limit.bandwidth / 1e9, "GB/s"),
        Figure("arithmetic", limit.peak / 1e12, "TFLOP/s"),
    ]
    for title, cases in (("decode", decode), ("prefill", prefill)):
        rows = []
        for row, found in cases(limit):
            rows.append(row)
            figures += found
            keep(figures)
        print_table((f"attention, {title}", "ours us", "torch us", "ratio", "ours", "of limit"), rows)
        print(flush=True)
    lines, found = swaps()
    print("\n".join(lines))
    return figures + found
