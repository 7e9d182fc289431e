"""The thread that runs an engine in a replica."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from engine.config import EngineConfig
from engine.engine import Engine, EngineStats
from engine.errors import EngineDeadError, InvalidRequestError
from engine.request import FinishReason, ModelLimits, Request, TokenDelta, validate

_log = logging.getLogger("quire.engine")


class EngineThread:
    """Loads and runs one :class:`Engine` in one daemon thread, which alone touches scheduler and pool.

    Everything goes in through one queue. ``on_outputs`` is called on the engine thread, once for each step
    that made something, and must return quickly. ``on_death`` is called there once if the loop fails; the
    live requests then get no more deltas: their owner moves them elsewhere. An idle engine blocks on its
    queue.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[list[TokenDelta]], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._on_outputs = on_outputs
        self._on_death = on_death
        # a request, an id to abort, who wants to know that the prefix cache is reset, or stop
        self._inbox: SimpleQueue[Request | str | Future[int] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="quire-engine", daemon=True)
        self._loaded = threading.Event()
        self._failure: BaseException | None = None
        self._lock = threading.Lock()  # guards _live between callers; the loop only ever discards
        self._live: set[str] = set()
        self._engine: Engine | None = None
        self._stats: EngineStats | None = None

    def start(self) -> None:
        """Load the model; return when the engine can serve.

        Raises:
            ConfigError: the model cannot be served with these options.
        """
        self._thread.start()
        self._loaded.wait()
        if self._failure is not None and self._engine is None:
            raise self._failure

    @property
    def limits(self) -> ModelLimits:
        """What requests must keep to here."""
        return self._running().limits

    @property
    def num_live(self) -> int:
        """Requests submitted and not finished."""
        return len(self._live)

    def submit(self, request: Request) -> None:
        """Check ``request`` in the caller's thread and queue it.

        Raises:
            InvalidRequestError: it can never run here, or its id is that of a live request.
            EngineDeadError: the engine has stopped.
        """
        limits = self._running().limits
        validate(request.token_ids, request.params, limits, request.generated_before)
        with self._lock:
            if request.request_id in self._live:
                raise InvalidRequestError(f"request id {request.request_id!r} is already running", "request_id")
            self._live.add(request.request_id)
        request.arrival = request.arrival or time.monotonic()
        self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        """End a request, in whatever state; an unknown or finished one is ignored. Never raises."""
        self._inbox.put(request_id)

    def reset_prefix_cache(self) -> Future[int]:
        """Forget every cached prefix between two steps; the result is the number of blocks that became free.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        self._running()
        done: Future[int] = Future()
        self._inbox.put(done)
        return done

    def stats(self) -> EngineStats:
        """The last snapshot; takes no lock."""
        self._running()
        assert self._stats is not None
        return self._stats

    def is_alive(self) -> bool:
        """Whether the engine is loaded and its thread runs."""
        return self._engine is not None and self._failure is None and self._thread.is_alive()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread after its current step; live requests get no more deltas."""
        self._inbox.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _running(self) -> Engine:
        if self._engine is None or not self.is_alive():
            cause = f": {self._failure}" if self._failure is not None else ""
            raise EngineDeadError(f"the engine is not running{cause}")
        return self._engine

    def _main(self) -> None:
        try:
            engine = Engine(self._config)
            self._stats = engine.stats()
            self._engine = engine
            self._loaded.set()
            self._loop(engine)
        except BaseException as error:  # noqa: BLE001 - whatever ends this thread must reach the owner
            self._failure = error
            if self._engine is not None:
                _log.critical("the engine thread ends", exc_info=True)
                self._on_death(error)
        finally:
            self._loaded.set()

    def _loop(self, engine: Engine) -> None:
        while True:
            deltas: list[TokenDelta] = []
            for item in self._take(wait=not engine.has_work()):
                if item is None:
                    return
                deltas += self._handle(engine, item)
            deltas += engine.step()
            for delta in deltas:
                if delta.final:
                    self._live.discard(delta.request_id)
            self._stats = engine.stats()
            if deltas:
                self._on_outputs(deltas)

    def _take(self, wait: bool) -> list[Request | str | Future[int] | None]:
        """All that is queued; at least one item if ``wait``."""
        items = [self._inbox.get()] if wait else []
        with contextlib.suppress(Empty):
            while True:
                items.append(self._inbox.get_nowait())
        return items

    def _handle(self, engine: Engine, item: Request | str | Future[int]) -> list[TokenDelta]:
        if isinstance(item, str):
            return engine.abort(item)
        if isinstance(item, Future):
            item.set_result(engine.reset_prefix_cache())
            return []
        try:
            engine.add(item)
        except InvalidRequestError as error:
            index = item.generated_before
            return [TokenDelta(item.request_id, index, (), FinishReason.ERROR, error=error.message, final=True)]
        return []
