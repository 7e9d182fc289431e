"""A simulated GPU: streams whose work is done late, in any order that events allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import engine.kv.kv_cache as kv_cache
import engine.kv.swap_stream as swap_stream
from engine.kv.kv_cache import KVCache
from engine.kv.swap_stream import SwapStream

Work = Callable[[], None]


class Event:
    """Comes when its stream has reached the place where it was recorded."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.place = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.place = stream, stream.queued

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.place

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class Stream:
    """Work in a fixed order; an entry may be an event to wait for."""

    def __init__(self) -> None:
        self._queue: deque[Work | tuple[Stream, int]] = deque()
        self.queued = self.done = 0

    def add(self, work: Work) -> None:
        self._put(work)

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self._put((event.stream, event.place))

    def wait_stream(self, other: Stream) -> None:
        self._put((other, other.queued))

    def runnable(self) -> bool:
        if not self._queue:
            return False
        head = self._queue[0]
        return not isinstance(head, tuple) or head[0].done >= head[1]

    def advance(self) -> None:
        """Do the first thing in the queue, and whatever it waits for before."""
        head = self._queue.popleft()
        if isinstance(head, tuple):
            head[0].reach(head[1])
        else:
            head()
        self.done += 1

    def reach(self, place: int) -> None:
        """Do everything before ``place``, and of other streams only what must come before it."""
        while self.done < place:
            self.advance()

    def _put(self, entry: Work | tuple[Stream, int]) -> None:
        self._queue.append(entry)
        self.queued += 1


class Device:
    """What :class:`SwapStream` uses of ``torch.cuda``."""

    def __init__(self) -> None:
        self.compute = self.current = Stream()
        self.streams = [self.compute]

    def Stream(self, device: object) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def Event(self, enable_timing: bool) -> Event:
        return Event()

    def current_stream(self, device: object) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def advance(self, chance: Random) -> None:
        """Let one of the streams that can go on do so."""
        able = [stream for stream in self.streams if stream.runnable()]
        if able:
            chance.choice(able).advance()

    def finish(self) -> None:
        for stream in self.streams:
            stream.reach(stream.queued)


def simulate(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Let the copies of ``cache``, which is in RAM, be done as by a GPU; those within it are computation."""
    device = Device()
    monkeypatch.setattr(swap_stream, "torch", SimpleNamespace(cuda=device))

    def copy_runs(pairs: Any, source: torch.Tensor, destination: torch.Tensor) -> None:
        for begin, end in pairs:
            device.current.add(lambda begin=begin, end=end: copy_block(source, begin, destination, end))

    def copy_block(source: torch.Tensor, begin: int, destination: torch.Tensor, end: int) -> None:
        destination[end] = source[begin]

    def copies(self: KVCache, pairs: Any) -> None:
        if pairs:
            begins, ends = (list(blocks) for blocks in zip(*pairs, strict=True))
            device.current.add(lambda: copy_block(self.pool, begins, self.pool, ends))  # type: ignore[arg-type]

    monkeypatch.setattr(kv_cache, "_copy_runs", copy_runs)
    monkeypatch.setattr(KVCache, "_copy", copies)
    cache._stream = SwapStream(torch.device("cpu"))
    return device
