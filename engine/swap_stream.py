"""Copies between a GPU's blocks and the host's, beside the computation."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.sizes import format_bytes

_PORTABLE = 1  # cudaHostRegisterPortable


class SwapStream:
    """One CUDA stream that carries every swap of a KV cache, both ways.

    On one stream swaps follow each other, so a host block is read only after it was written, and written again
    only after it was read. What else needs an order is fenced by events: a swap waits for the steps and copies
    before it, and what comes after it on the compute stream waits for the swap. The host waits for neither.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.out_clock = CopyClock()
        self.in_clock = CopyClock()

    def run(self, copy: Callable[[], None], blocks: int, clock: CopyClock) -> float:
        """Queue ``copy``, which copies ``blocks`` blocks; return the seconds that ``clock`` expects of it."""
        compute = torch.cuda.current_stream(self._device)
        start, end = _event(), _event()
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            start.record(self._stream)
            copy()
            end.record(self._stream)
        compute.wait_event(end)
        return clock.seconds(start, end, blocks)


class Moment(Protocol):
    """What a clock needs of a CUDA event."""

    def query(self) -> bool: ...
    def elapsed_time(self, end: Any, /) -> float: ...  # milliseconds


class CopyClock:
    """What a block's copy takes, from events that the device has passed: asking never waits."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Moment, Moment, int]] = deque()
        self._seconds_per_block = 0.0

    def seconds(self, start: Moment, end: Moment, blocks: int) -> float:
        """Seconds for ``blocks`` blocks at the pace of the last copy that is done; 0 before there is one.

        This copy, between ``start`` and ``end``, counts once it is done.
        """
        self._pending.append((start, end, blocks))
        while self._pending and self._pending[0][1].query():
            begun, ended, copied = self._pending.popleft()
            self._seconds_per_block = begun.elapsed_time(ended) / 1000.0 / copied  # from milliseconds
        return self._seconds_per_block * blocks


def pin(memory: Tensor, owner: object) -> None:
    """Lock the pages of a CPU tensor until ``owner``, which holds it, is gone: a GPU copies them by itself.

    Torch's own pinned memory comes in powers of two, which could take twice the swap space.

    Raises:
        ConfigError: the system refuses.
    """
    address, size = memory.data_ptr(), memory.numel() * memory.element_size()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, size, _PORTABLE))
    if error:
        raise ConfigError(
            f"the driver cannot pin {format_bytes(size)} of RAM to swap to (error {error}); lower swap_space"
        )
    weakref.finalize(owner, runtime.cudaHostUnregister, address)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
