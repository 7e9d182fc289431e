"""The tensors that hold keys and values of all blocks, and the copies between blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kv.block_pool import InvariantError
from engine.kv.prefaulter import Prefaulter
from engine.kv.swap_stream import Pairs, SwapStream, pin
from engine.kv.transfers import Transfers
from engine.models.config import ModelConfig
from kernels import kv_pool_shape

PREFAULT_AHEAD = 1 << 30
"""Bytes of the pool beyond its high-water mark that an idle engine prefaults."""


class KVCache:
    """One allocation ``[blocks, layers, 2, block_size, kv_heads, head_dim]``, and one like it on the host.

    A block with all its layers is contiguous: one unit to copy and to count. The block pool decides who owns a
    block, and the host pool does for the ``host_blocks`` that blocks are swapped to.

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
            self._prefaulter: Prefaulter | None = Prefaulter(self.pool.data_ptr(), self.pool.nbytes)
        else:
            self.pool = torch.zeros(shape(num_blocks), dtype=dtype, device=device)
            self._prefaulter = None
        self.host = _untouched_zeros(shape(host_blocks), dtype)
        self._stream: SwapStream | None = None
        # Map its pages now: otherwise the first copy to each page waits for the system and takes ten times as
        # long.
        self.host.zero_()
        if device.type == "cuda" and host_blocks:
            pin(self.host, self, device)
            self._stream = SwapStream(device)

    def prefault(self, high_water_mark: int) -> bool:
        """Map the next few pages that steps will write; returns whether more of them are left.

        ``high_water_mark`` is the block pool's. Any thread may call this, one at a time.
        """
        if self._prefaulter is None:
            return False
        block_bytes = self.pool.nbytes // self.num_blocks
        return self._prefaulter.extend(high_water_mark * block_bytes + PREFAULT_AHEAD)

    def transfer(self, transfers: Transfers, written: Collection[int] = ()) -> tuple[float, float]:
        """Carry out ``transfers``; return the seconds of swap-out and swap-in.

        On a GPU, this call does not wait: later steps see the results, and the seconds are estimated from
        earlier copies (0 before there are any). Before any other write to device blocks, call
        :meth:`before_writing`. ``written`` are the blocks that will be written soonest.

        Raises:
            InvariantError: a transfer names a block that does not exist; nothing is copied.
        """
        self._check(transfers.swap_out, self.num_blocks, self.host_blocks)
        self._check(transfers.copies, self.num_blocks, self.num_blocks)
        self._check(transfers.swap_in, self.host_blocks, self.num_blocks)
        overwritten = {block for _, block in transfers.copies}
        out = self._swap_out(transfers.swap_out, overwritten.union(written))
        self.before_writing(overwritten)
        self._copy(transfers.copies)
        return out, self._swap_in(transfers.swap_in)

    def before_writing(self, blocks: Iterable[int]) -> None:
        """Call before queueing work that writes device ``blocks``: a swap-out may still read them."""
        if self._stream is not None:
            self._stream.before_writing(blocks)

    def _check(self, pairs: Sequence[tuple[int, int]], sources: int, destinations: int) -> None:
        for source, destination in pairs:
            if not (0 <= source < sources and 0 <= destination < destinations):
                raise InvariantError(
                    f"a transfer from block {source} of {sources} to block {destination} of {destinations}"
                )

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        sources, destinations = map(list, zip(*pairs, strict=True))
        if self.pool.device.type != "cpu":
            source, destination = torch.tensor(pairs, device=self.pool.device).unbind(1)
            self.pool.index_copy_(0, destination, self.pool.index_select(0, source))
        elif set(sources).isdisjoint(destinations):
            _copy_runs(pairs, self.pool, self.pool)
        else:
            rows = _rows(self.pool)
            rows[destinations] = rows[sources]

    def _swap_out(self, pairs: Pairs, first: Collection[int]) -> float:
        if not pairs:
            return 0.0
        if self._stream is not None:
            return self._stream.swap_out(pairs, lambda part: _copy_runs(part, self.pool, self.host), first)
        start = time.perf_counter()
        _copy_runs(pairs, self.pool, self.host)
        return time.perf_counter() - start

    def _swap_in(self, pairs: Pairs) -> float:
        if not pairs:
            return 0.0
        if self._stream is not None:
            return self._stream.swap_in(pairs, lambda part: _copy_runs(part, self.host, self.pool))
        start = time.perf_counter()
        _copy_runs(pairs, self.host, self.pool)
        return time.perf_counter() - start


def _copy_runs(pairs: Sequence[tuple[int, int]], source: Tensor, destination: Tensor) -> None:
    """Copy blocks, with one copy for each run of pairs ``(i, j), (i + 1, j + 1), ...``."""
    if source.device.type == destination.device.type == "cpu":
        # Plain memcpy: torch would copy with all threads, and wait for those whose core is busy.
        from_rows, to_rows = _rows(source), _rows(destination)
        for begin, to, length in _runs(pairs):
            to_rows[to : to + length] = from_rows[begin : begin + length]
    else:
        for begin, to, length in _runs(pairs):
            destination.narrow(0, to, length).copy_(source.narrow(0, begin, length), non_blocking=True)


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """First source, first destination and length of each run of adjacent pairs."""
    ordered = sorted(pairs)
    begin = 0
    for end in range(1, len(ordered) + 1):
        source, destination = ordered[end - 1]
        if end == len(ordered) or ordered[end] != (source + 1, destination + 1):
            yield *ordered[begin], end - begin
            begin = end


def _rows(blocks: Tensor) -> NDArray[np.uint8]:
    """The same memory as bytes, one row for each block."""
    count = blocks.shape[0]
    flat: NDArray[np.uint8] = blocks.flatten().view(torch.uint8).numpy()
    return flat.reshape(count, flat.size // max(count, 1))


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in RAM, from a multiple of 64, whose pages the system supplies when they are first used.

    ``torch.zeros`` writes every page: seconds at start, and memory that may never be needed.
    """
    size = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(size + 64, dtype=np.uint8))
    offset = -raw.data_ptr() % 64
    return raw[offset : offset + size].view(dtype).view(shape)
