"""The deltas of one request that wait for its reader."""

from __future__ import annotations

import asyncio

from app.fleet.generation import Delta, Taker
from app.fleet.loop_pacer import LoopPacer
from engine.errors import QuireError
from engine.token_logprobs import TokenLogprobs


class DeltaQueue:
    """Waiting deltas of one sequence are read as one, so a late or slow reader gets few, large deltas.

    For one reader, on one event loop. ``readers`` says when it continues; by default at once. While the reader
    waits, deltas go to ``take`` first: resuming a coroutine for each would cost more than the rest.
    """

    def __init__(self, readers: LoopPacer | None = None, take: Taker | None = None) -> None:
        self._readers = readers
        self._take = take
        self._waiting: dict[int, _Pile] = {}  # by sequence
        self._error: QuireError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the reader's
        self._reader: asyncio.Future[None] | None = None
        self._woken = True  # or nobody waits

    def put(self, delta: Delta) -> None:
        """Append a delta of its sequence; a final one is read after all others."""
        pile = self._waiting.get(delta.sequence)
        if pile is None:
            self._waiting[delta.sequence] = _Pile(delta)
        else:
            pile.add(delta)
            if delta.final:
                del self._waiting[delta.sequence]
                first = next(iter(self._waiting.values()), None)
                if first is not None:
                    first.take_prompt_logprobs(pile)
                self._waiting[delta.sequence] = pile
        self._wake()

    def fail(self, error: QuireError) -> None:
        """Once all deltas are read, ``get`` raises."""
        self._error = error
        self._wake()

    async def get(self) -> Delta:
        """All waiting deltas of the sequence that has waited longest, as one.

        Raises:
            QuireError: that of ``fail``.
            Exception: that of ``take``.
        """
        while not self._waiting:
            if self._error is not None:
                # Once raised, it refers to this call, its caller and their variables. If any of these referred
                # to it, the request would stay in memory until the garbage collector comes.
                try:
                    raise self._error
                finally:
                    self._error = None
            if self._loop is None:
                self._loop = asyncio.get_running_loop()  # a system call
            self._reader = self._loop.create_future()
            self._woken = False
            try:
                await self._reader
            finally:
                self._reader = None  # likewise, if it has got an exception
        return self._waiting.pop(next(iter(self._waiting))).joined()

    def _wake(self) -> None:
        if self._woken:
            return
        self._woken = True
        if self._readers is not None:
            assert self._loop is not None, "it waits"
            self._readers.call(self._resume, self._loop)
        else:
            self._resume()

    def _resume(self) -> bool:
        """Hand over what waits; false if the reader has left."""
        reader = self._reader
        if reader is None or reader.done():
            return False
        try:
            if self._take is not None and self._taken(self._take):
                self._woken = False  # it still waits
                return True
        except Exception as error:  # noqa: BLE001 - handed on: the reader raises it
            reader.set_exception(error)
            del reader  # the error refers to this call, too: see ``get``
            return True
        reader.set_result(None)
        return True

    def _taken(self, take: Taker) -> bool:
        """Whether ``take`` has taken all that waits."""
        waiting = self._waiting
        while waiting:
            sequence = next(iter(waiting))
            if not take(waiting[sequence].joined()):
                return False
            del waiting[sequence]
        return self._error is None


class _Pile:
    """Deltas of one sequence, joined as they come.

    Kept apart until they are read, those of some thousand late streams make the garbage collector stop all of
    them for 0.1 s.
    """

    __slots__ = ("_first", "_last", "_logprobs", "_prompt_logprobs", "_tokens")

    def __init__(self, first: Delta) -> None:
        self._first = self._last = first
        self._tokens: list[int] | None = None  # of all, once there are several
        self._logprobs: list[TokenLogprobs] | None = None  # likewise, if a later one has some
        self._prompt_logprobs = first.prompt_logprobs

    def add(self, delta: Delta) -> None:
        if self._tokens is None:
            self._tokens = list(self._first.token_ids)
        self._tokens += delta.token_ids
        if delta.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = list(self._first.logprobs or ())
            self._logprobs += delta.logprobs
        if self._prompt_logprobs is None:
            self._prompt_logprobs = delta.prompt_logprobs
        self._last = delta

    def take_prompt_logprobs(self, other: _Pile) -> None:
        """Return those that ``other`` has, which is read later: all sequences need them."""
        if other._prompt_logprobs is not None:
            if self._tokens is None:  # else it would be returned as it came
                self._tokens = list(self._first.token_ids)
            self._prompt_logprobs, other._prompt_logprobs = other._prompt_logprobs, None

    def joined(self) -> Delta:
        """One delta in the place of all."""
        first, last = self._first, self._last
        if self._tokens is None:
            return first
        return Delta(
            tuple(self._tokens),
            last.finish_reason,
            last.cached_tokens,
            first.index,
            last.sequence,
            last.final,
            last.fingerprint,
            first.logprobs if self._logprobs is None else tuple(self._logprobs),
            self._prompt_logprobs,
        )
