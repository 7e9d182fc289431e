"""Paged attention of one step: its tiles, its launches, and how programs share the splits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels.interface import AttentionMetadata, AttentionOptions
from kernels.triton.attention_kernels import merge_splits_kernel, paged_attention_kernel

SPLIT = 512
"""Tokens of one split. Fixed, so that a row's result does not depend on how many programs worked on it."""

PARTIAL_BYTES = 128 * 2**20
"""Limit on the memory for results of splits; with more, a step takes its requests in groups of 4 or more."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Shape of one program's work."""

    block_m: int  # rows: query tokens times the query heads of one KV head
    block_n: int  # keys in flight
    block_d: int  # head size, padded to a power of two
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a lane; without it the compiler may spill to fit more programs

    @property
    def options(self) -> dict[str, int]:
        """The options of a launch."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}


@functools.cache
def tile_for(group: int, head_dim: int, dtype: torch.dtype, *, short: bool, hip: bool) -> Tile:
    """The tile for ``group`` query heads a KV head; ``short`` is for a decode row or a few new tokens.

    Chosen so that nothing spills and shared memory fits: 163 KiB on sm_80, 64 KiB on gfx942 (``hip``);
    ``python -m kernels.triton.aot`` shows it. In float32 both are the same, so that a row's bits do not
    depend on how its prompt was cut into chunks.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    full = dtype == torch.float32  # no tensor cores in this precision, so registers hold whole operands
    block_m = max(16, triton.next_power_of_2(group))
    if not (short or full):
        block_m = max(block_m, 128 if block_d <= 128 else 64)
    block_n = 64 if block_d <= 128 else 32
    # Rows of an uneven group take more registers to address, and so do float32's operands.
    if full or (not short and group & (group - 1)):
        block_n //= 2
    num_warps = 4 if short and not full else 8
    num_stages = (1 if hip else 2) if full else 3 if short and not hip else 2
    max_registers = (
        128 if full and not hip and block_d <= 128 else None
    )  # with wider heads the limit causes spills
    return Tile(block_m, block_n, block_d, num_warps, num_stages, max_registers)


def attention(
    q: Tensor,
    kv_layer: Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    target_programs: int,
) -> Tensor:
    """See :meth:`kernels.interface.Kernels.attention`; ``target_programs`` fill the device.

    Requests whose new tokens fit one small tile (decode) are launched first, then the others (prefill). A
    request's launch, and how its keys are cut, depend on that request alone.
    """
    tokens, num_heads, head_dim = q.shape
    out = torch.empty((tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    step = _Step(q, kv_layer, metadata, options, out)
    step.launch_short(target_programs)
    if metadata.max_query_len > step.short_query:
        step.launch_long()
    return out


class _Step:
    """The launches of one step in one layer."""

    def __init__(
        self,
        q: Tensor,
        kv_layer: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        out: Tensor,
    ) -> None:
        self.q, self.kv_layer, self.metadata, self.out = q, kv_layer, metadata, out
        self.scale = options.scale * math.log2(math.e)  # the softmax is in powers of two, and so are scores
        self.soft_cap = (options.soft_cap or 0.0) * math.log2(math.e)
        self.window = options.sliding_window or 0
        self.head_dim = q.shape[2]
        self.kv_heads = kv_layer.shape[3]
        self.group = q.shape[1] // self.kv_heads
        self.requests = metadata.context_lens.shape[0]
        hip = torch.version.hip is not None
        self.short_tile = tile_for(self.group, self.head_dim, q.dtype, short=True, hip=hip)
        self.long_tile = tile_for(self.group, self.head_dim, q.dtype, short=False, hip=hip)
        self.short_query = self.short_tile.block_m // self.group

    def launch_long(self) -> None:
        tiles = self.q.shape[0] // (self.long_tile.block_m // self.group) + self.requests
        self._attend(self.long_tile, (tiles, self.kv_heads, 1), 0, self.requests, None)

    def launch_short(self, target_programs: int) -> None:
        splits = triton.cdiv(self.metadata.max_context_len, SPLIT)
        if splits == 1:
            self._attend(self.short_tile, (self.requests, self.kv_heads, 1), 0, self.requests, None)
            return
        rows = min(self.metadata.max_query_len, self.short_query) * self.group
        bytes_per_request = self.kv_heads * splits * rows * (self.head_dim + 2) * 4
        limit = PARTIAL_BYTES // bytes_per_request
        # A multiple of 4: slices that start off 16 bytes would be a new specialization, compiled while serving.
        limit = self.requests if limit >= self.requests else max(4, limit // 4 * 4)
        shape = (limit, self.kv_heads, splits, rows, self.head_dim)
        acc = torch.empty(shape, dtype=torch.float32, device=self.q.device)
        stats = torch.empty((*shape[:3], 2, rows), dtype=torch.float32, device=self.q.device)
        for begin in range(0, self.requests, limit):
            count = min(limit, self.requests - begin)
            sharers = min(splits, triton.cdiv(target_programs, count * self.kv_heads))
            grid = (count, self.kv_heads, sharers)
            self._attend(self.short_tile, grid, begin, count, (acc, stats))
            self._merge(begin, count, acc, stats)

    def _attend(
        self,
        tile: Tile,
        grid: tuple[int, int, int],
        begin: int,
        count: int,
        partial: tuple[Tensor, Tensor] | None,
    ) -> None:
        # Without splits nothing reads or writes the two; any tensor will do.
        acc, stats = partial if partial is not None else (self.out, self.out)
        paged_attention_kernel[grid](
            self.out,
            acc,
            stats,
            self.q,
            self.kv_layer,
            self.metadata.query_start[begin:],
            self.metadata.context_lens[begin:],
            self.metadata.block_tables[begin:],
            count,
            self.metadata.block_tables.stride(0),
            acc.shape[3] if partial is not None else 0,
            acc.shape[2] if partial is not None else 1,
            self.q.stride(0),
            self.kv_layer.stride(0),
            self.kv_layer.stride(1),
            self.kv_layer.stride(2),
            self.scale,
            GROUP=self.group,
            HEAD_DIM=self.head_dim,
            BLOCK_SIZE=self.kv_layer.shape[2],
            WINDOW=self.window,
            SOFT_CAP=self.soft_cap,
            SPLIT=SPLIT,
            PARTIAL=partial is not None,
            ORDERED=self.q.dtype == torch.float32,
            SHORT=tile is self.short_tile,
            SHORT_QUERY=self.short_query,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_D=tile.block_d,
            **tile.options,
        )

    def _merge(self, begin: int, count: int, acc: Tensor, stats: Tensor) -> None:
        merge_splits_kernel[(count, self.kv_heads, acc.shape[3])](
            self.out,
            acc,
            stats,
            self.metadata.query_start[begin:],
            self.metadata.context_lens[begin:],
            acc.shape[3],
            acc.shape[2],
            GROUP=self.group,
            HEAD_DIM=self.head_dim,
            WINDOW=self.window,
            SPLIT=SPLIT,
            SHORT_QUERY=self.short_query,
            BLOCK_M=self.short_tile.block_m,
            BLOCK_D=self.short_tile.block_d,
            num_warps=1,
        )
