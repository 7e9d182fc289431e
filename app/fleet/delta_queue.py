"""The deltas of one request that wait for its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from app.fleet.generation import Delta
from app.fleet.turns import Turns
from engine.errors import QuireError


class DeltaQueue:
    """Waiting deltas of one sequence are read as one, so a late or slow reader gets few, large deltas.

    For one reader, on one event loop. ``readers`` says when it continues; by default at once.
    """

    def __init__(self, readers: Turns | None = None) -> None:
        self._readers = readers
        self._waiting: dict[int, list[Delta]] = {}  # by sequence
        self._error: QuireError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the reader's
        self._reader: asyncio.Future[None] | None = None
        self._woken = True  # or nobody waits

    def put(self, delta: Delta) -> None:
        """Append a delta of its sequence; a final one is read after all others."""
        earlier = self._waiting.get(delta.sequence)
        if earlier is None:
            self._waiting[delta.sequence] = [delta]
        else:
            earlier.append(delta)
            if delta.final:
                self._waiting[delta.sequence] = self._waiting.pop(delta.sequence)
        self._wake()

    def fail(self, error: QuireError) -> None:
        """Once all deltas are read, ``get`` raises."""
        self._error = error
        self._wake()

    async def get(self) -> Delta:
        """All waiting deltas of the sequence that has waited longest, as one.

        Raises:
            QuireError: that of ``fail``.
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            if self._loop is None:
                self._loop = asyncio.get_running_loop()  # a system call
            self._reader = self._loop.create_future()
            self._woken = False
            await self._reader
        return _joined(self._waiting.pop(next(iter(self._waiting))))

    def _wake(self) -> None:
        if self._woken:
            return
        self._woken = True
        assert self._reader is not None, "it waits"
        if self._readers is not None:
            self._readers.wake(self._reader)
        elif not self._reader.done():
            self._reader.set_result(None)


def _joined(deltas: Sequence[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    return Delta(
        tuple(token for delta in deltas for token in delta.token_ids),
        last.finish_reason,
        last.cached_tokens,
        deltas[0].index,
        last.sequence,
        last.final,
        last.fingerprint,
        logprobs if any(delta.logprobs is not None for delta in deltas) else None,
        next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
    )
