"""Copies between a GPU's blocks and the host's, concurrent with the computation."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.sizes import format_bytes

_PORTABLE = 1  # cudaHostRegisterPortable


Pairs = Sequence[tuple[int, int]]
"""Blocks to copy: source, destination."""


class SwapStream:
    """One CUDA stream that carries every swap of a KV cache, both ways.

    On one stream swaps follow each other, so a host block is read only after it was written, and written again
    only after it was read. Events fence the rest: a swap waits for the steps and copies before it, and work
    queued after a swap-in on the compute stream waits for it. A swap-out only reads device blocks: a later
    write to one of them must be announced to :meth:`before_writing` and waits for that block alone. The host
    never waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._out_clock = CopyClock()
        self._in_clock = CopyClock()
        self._leaving = Leaving()

    def swap_out(self, pairs: Pairs, copy: Callable[[Pairs], None], first: Collection[int]) -> float:
        """Queue ``copy`` of ``pairs`` (device, host), those from the device blocks ``first`` before others.

        Returns the seconds that it may take.
        """
        urgent = [pair for pair in pairs if pair[0] in first]
        others = [pair for pair in pairs if pair[0] not in first] if urgent else pairs
        start, end = _event(), _event()
        self._stream.wait_stream(self._compute)
        with torch.cuda.stream(self._stream):
            start.record(self._stream)
            for part in (urgent, others):
                if part:
                    copy(part)
                    end = _event()
                    end.record(self._stream)
                    self._leaving.add([block for block, _ in part], end)
        return self._out_clock.seconds(start, end, len(pairs))

    def swap_in(self, pairs: Pairs, copy: Callable[[Pairs], None]) -> float:
        """Queue ``copy`` of ``pairs`` (host, device); return the seconds that it may take."""
        compute = self._compute
        start, end = _event(), _event()
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            start.record(self._stream)
            copy(pairs)
            end.record(self._stream)
        compute.wait_event(end)
        return self._in_clock.seconds(start, end, len(pairs))

    def before_writing(self, blocks: Iterable[int]) -> None:
        """Let what is queued from now on write ``blocks`` of the device: it waits for copies of them."""
        event = self._leaving.last(blocks)
        if event is not None:
            self._compute.wait_event(event)

    @property
    def _compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)


class Leaving:
    """Device blocks that are being copied out, and the events that mark the ends of their copies, in order."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, Any, list[int]]] = deque()  # number, event, blocks
        self._part_of: dict[int, int] = {}
        self._made = 0

    def add(self, blocks: list[int], event: TimingEvent) -> None:
        """``event`` occurs once all ``blocks``, and all blocks added before, have been copied."""
        self._made += 1
        self._parts.append((self._made, event, blocks))
        for block in blocks:
            self._part_of[block] = self._made

    def last(self, blocks: Iterable[int]) -> Any | None:
        """The event after which all copies of ``blocks`` are complete; ``None`` if they already are."""
        while self._parts and self._parts[0][1].query():
            number, _, done = self._parts.popleft()
            for block in done:
                if self._part_of.get(block) == number:
                    del self._part_of[block]
        if not self._parts:
            return None
        last = max((self._part_of.get(block, 0) for block in blocks), default=0)
        return self._parts[last - self._parts[0][0]][1] if last else None


class TimingEvent(Protocol):
    """What a clock needs of a CUDA event."""

    def query(self) -> bool: ...
    def elapsed_time(self, end: Any, /) -> float: ...  # milliseconds


class CopyClock:
    """Seconds of copies, from events that the device has passed: reading it never waits.

    It returns the time per block multiplied by blocks, so its figures do not show the fixed part of a copy.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[TimingEvent, TimingEvent, int]] = deque()
        self._seconds_per_block = 0.0

    def seconds(self, start: TimingEvent, end: TimingEvent, blocks: int) -> float:
        """Seconds for ``blocks`` blocks at the pace of the last copy that is done; 0 before there is one.

        This copy, between ``start`` and ``end``, counts once it is done.
        """
        self._pending.append((start, end, blocks))
        while self._pending and self._pending[0][1].query():
            begun, ended, copied = self._pending.popleft()
            self._seconds_per_block = begun.elapsed_time(ended) / 1000.0 / copied  # from milliseconds
        return self._seconds_per_block * blocks


def pin(memory: Tensor, owner: object, device: torch.device) -> None:
    """Lock the pages of a CPU tensor while its ``owner`` lives, so that ``device`` can copy them itself.

    Torch's own pinned memory comes in powers of two, which could take up to twice the swap space.

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
    weakref.finalize(owner, _unpin, address, device)


def _unpin(address: int, device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):  # of a device that is broken: nothing copies any more
        torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
