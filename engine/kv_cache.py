"""The tensors that hold keys and values of all blocks, and the copies between blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.block_pool import InvariantError
from engine.models.config import ModelConfig
from engine.step_plan import Transfers
from engine.swap_stream import SwapStream, pin
from kernels import kv_pool_shape


class KVCache:
    """One allocation ``[blocks, layers, 2, block_size, kv_heads, head_dim]``, and one like it on the host.

    A block with all its layers is contiguous: one unit to copy and to count. Who owns which block is the
    affair of the block pool, and of the host pool for the ``host_blocks`` that blocks are swapped to.

    Raises:
        ConfigError: the memory of the host blocks cannot be pinned.
    """

    def __init__(
        self,
        model: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        host_blocks: int = 0,
    ) -> None:
        def shape(blocks: int) -> tuple[int, ...]:
            return kv_pool_shape(blocks, model.num_layers, block_size, model.num_kv_heads, model.head_dim)

        self.num_blocks = num_blocks
        self.block_size = block_size
        self.host_blocks = host_blocks
        # Zeros, so that padding never reads an old NaN.
        if device.type == "cpu":
            self.pool = _untouched_zeros(shape(num_blocks), dtype)
        else:
            self.pool = torch.zeros(shape(num_blocks), dtype=dtype, device=device)
        self.host = _untouched_zeros(shape(host_blocks), dtype)
        self._stream: SwapStream | None = None
        if device.type == "cuda" and host_blocks:
            pin(self.host, self)
            self._stream = SwapStream(device)

    def transfer(self, transfers: Transfers) -> tuple[float, float]:
        """Carry out ``transfers``; return the seconds of swap-out and swap-in.

        On a GPU nothing waits here: steps begun later see the results, and the seconds are those that earlier
        copies took for as many blocks (0 before there are any).

        Raises:
            InvariantError: a transfer names an absent block; nothing is copied.
        """
        for pairs in (transfers.swap_out, transfers.copies, transfers.swap_in):
            if any(source < 0 or destination < 0 for source, destination in pairs):
                raise InvariantError(f"absent blocks cannot be copied: {pairs}")
        out = self._swap(transfers.swap_out, self.pool, self.host)
        self.copy_blocks(transfers.copies)
        return out, self._swap(transfers.swap_in, self.host, self.pool)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, ``(source, destination)`` each; all sources are read before a destination is written."""
        if not pairs:
            return
        sources, destinations = zip(*pairs, strict=True)
        if self.pool.device.type == "cpu" and set(sources).isdisjoint(destinations):
            _copy_runs(pairs, self.pool, self.pool)
        else:
            source, destination = torch.tensor(pairs, device=self.pool.device).unbind(1)
            self.pool.index_copy_(0, destination, self.pool.index_select(0, source))

    def _swap(self, pairs: Sequence[tuple[int, int]], source: Tensor, destination: Tensor) -> float:
        if not pairs:
            return 0.0
        if self._stream is not None:
            clock = self._stream.out_clock if source is self.pool else self._stream.in_clock
            return self._stream.run(lambda: _copy_runs(pairs, source, destination), len(pairs), clock)
        start = time.perf_counter()
        _copy_runs(pairs, source, destination)
        return time.perf_counter() - start


def _copy_runs(pairs: Sequence[tuple[int, int]], source: Tensor, destination: Tensor) -> None:
    """Copy blocks, with one copy for each run of pairs ``(i, j), (i + 1, j + 1), ...``."""
    ordered = sorted(pairs)
    begin = 0
    for end in range(1, len(ordered) + 1):
        first, last = ordered[begin], ordered[end - 1]
        if end < len(ordered) and ordered[end] == (last[0] + 1, last[1] + 1):
            continue
        length = end - begin
        destination.narrow(0, first[1], length).copy_(source.narrow(0, first[0], length), non_blocking=True)
        begin = end


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in RAM, from a multiple of 64, whose pages the system supplies when they are first used.

    ``torch.zeros`` writes every page: seconds at start, and memory that may never be needed.
    """
    size = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + 64, dtype=np.uint8))
    offset = -raw.data_ptr() % 64
    return raw[offset : offset + size].view(dtype).view(shape)
