"""The thread that runs an engine in a replica."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from engine.config import EngineConfig
from engine.errors import EngineDeadError, InvalidRequestError
from engine.kv.block_groups import GroupBy, by_holder, by_prefix
from engine.kv.block_keys import KeyScheme
from engine.kv.block_map import BlockMap, block_map
from engine.kv.kv_events import KvBatch, KvSnapshot
from engine.models.identity import ModelIdentity
from engine.request import FinishReason, ModelLimits, Request, TokenDelta, check
from engine.scheduling.load_report import EngineLoad
from engine.stats import EngineStats
from engine.structured.grammar import Grammar
from engine.structured_output import StructuredOutput

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.structured.compiler import GrammarCompiler

logger = logging.getLogger(__name__)

WARM_AFTER_S = 5.0
"""Structured output loads what it needs this long after the rest, or later, so as not to delay the start."""

PREFAULT_PAUSE_S = 0.01
"""How long an idle engine waits for requests between two slices of the KV pool that it prefaults."""

FIRST_TOKEN_S = 0.002
"""How long an engine that computes on all cores leaves them alone after the first token of its only request. A
dozen wake-ups carry that token to the client; beside the next step they take more than twice as long."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The results of one turn of the engine's loop, which handles the inbox and runs a step."""

    deltas: list[TokenDelta]
    added: list[str]  # ids of the requests that were added, or refused; ``load`` counts them
    kv: KvBatch | None  # blocks that can be found now, and those that no longer can
    load: EngineLoad


@dataclass(frozen=True, slots=True)
class _Reset:
    """A call to empty the prefix cache."""

    done: Future[int] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A call for a snapshot of all blocks that can be found."""

    done: Future[KvSnapshot | None] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _SequenceEnd:
    """One sequence of a request is to end."""

    request_id: str
    number: int


_Item = Request | str | _SequenceEnd | _Reset | _Snapshot | None  # add, abort that id, ..., stop


class EngineThread:
    """Loads and runs one :class:`Engine` in one daemon thread, which alone touches scheduler and pool.

    Everything goes in through one queue. ``on_outputs`` is called on the engine thread, once for each step and
    each other change, and must return quickly. ``on_death`` is called there once if the loop fails; the
    live requests then get no more deltas: their owner moves them elsewhere. An idle engine blocks on its
    queue.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_outputs: Callable[[StepOutputs], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._inbox: SimpleQueue[_Item] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="quire-engine", daemon=True)
        self._loaded = threading.Event()
        self._failure: BaseException | None = None
        self._lock = threading.Lock()  # guards _live between callers; the loop only ever discards
        self._live: set[str] = set()
        self._pending: deque[_Item] = deque()  # received, not handled yet
        self._snapshots: list[_Snapshot] = []  # handled, not answered yet
        self._closed = threading.Event()  # the inbox is not read any more
        self._turns = 0  # of the loop
        self._turned_at = 0.0  # when the last one ended
        self._idle = False  # it waits for its inbox
        self._engine: Engine | None = None
        self._stats: EngineStats | None = None
        self._load: EngineLoad | None = None

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
        """The limits for requests here."""
        return self._running().limits

    @property
    def identity(self) -> ModelIdentity:
        """What decides its answers."""
        return self._running().runner.identity

    @property
    def key_scheme(self) -> KeyScheme | None:
        """What the keys of its blocks depend on; ``None`` if it caches no prefixes."""
        engine = self._running()
        return None if engine.kv_events is None else engine.key_scheme

    @property
    def window(self) -> int | None:
        """The maximum number of tokens that any layer sees, if every layer has a sliding window."""
        return self._running().window

    def compile(self, form: StructuredOutput, client: str = "") -> Future[Grammar]:
        """Compile the grammar of a request of ``client`` in a thread of its own, or find it compiled.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        return self._running().grammars.submit(form, client)

    @property
    def num_live(self) -> int:
        """Requests submitted and not finished."""
        return len(self._live)

    def submit(self, request: Request) -> None:
        """Check ``request`` in the caller's thread and queue it.

        If it asks for structured output and has no ``grammar``, this waits until that is compiled.

        Raises:
            InvalidRequestError: it can never run here, or its id is that of a live request.
            EngineDeadError: the engine has stopped.
        """
        engine = self._running()
        check(request, engine.limits)
        form = request.params.structured_output
        if form is not None and request.grammar is None:
            request = replace(request, grammar=engine.grammars.compile(form, request.client))
        with self._lock:
            if request.request_id in self._live:
                raise InvalidRequestError(f"request id {request.request_id!r} is already running", "request_id")
            self._live.add(request.request_id)
        if not request.arrival:
            request = replace(request, arrival=time.monotonic())
        self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        """End a request in any state; an unknown or finished one is ignored. Never raises."""
        if isinstance(request_id, str):
            self._inbox.put(request_id)

    def end_sequence(self, request_id: str, number: int) -> None:
        """End one sequence of a request, unless it has ended. Never raises."""
        self._inbox.put(_SequenceEnd(request_id, number))

    def reset_prefix_cache(self) -> Future[int]:
        """Forget every cached prefix between two steps; the result is the number of blocks that became free.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        self._running()
        wanted = _Reset()
        self._ask(wanted)
        return wanted.done

    def kv_snapshot(self) -> Future[KvSnapshot | None]:
        """What is findable, between two batches of changes; ``None`` if the engine caches no prefixes.

        The batches that ``on_outputs`` gets after the snapshot's sequence continue it, whichever comes first.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        self._running()
        wanted = _Snapshot()
        self._ask(wanted)
        return wanted.done

    def block_map(
        self,
        by: GroupBy = GroupBy.STATE,
        keys: Sequence[int] = (),
        name_of: Callable[[str], str] = str,
    ) -> BlockMap:
        """What each block holds now; takes no lock, and none of the engine's thread's time.

        ``keys`` are of prefixes that have a name: see ``by_prefix``. ``name_of`` makes the name of a request of
        its id; requests of one name and tenant are one.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        state = self._running().scheduler.state
        found = block_map(state.pool, state.host)
        if by is GroupBy.PREFIX:
            groups, named = by_prefix(state.index.sample(found.each), keys)
            groups += bytes(len(found.host))
            return found._replace(groups=groups, names=tuple(f"{key:016x}" for key in named))
        if by is GroupBy.REQUEST:
            held = [
                ((name_of(request), tenant), device, host)
                for (request, tenant), device, host in state.holders()
            ]
            groups, holders = by_holder(held, found.each, len(found.device), len(found.host))
            names, tenants = (tuple(holder[at] for holder in holders) for at in (0, 1))
            return found._replace(groups=groups, names=names, tenants=tenants)
        return found

    def stats(self) -> EngineStats:
        """The last snapshot; takes no lock."""
        self._running()
        assert self._stats is not None
        return self._stats

    def load(self) -> EngineLoad:
        """The load as of the last turn of its loop; takes no lock."""
        self._running()
        assert self._load is not None
        return self._load

    def progress(self) -> tuple[int, int] | None:
        """Changes with each turn of the loop and each layer of a step; ``None`` while the engine is idle.

        A busy engine whose progress stays the same is stuck. A replayed decode step counts its layers at
        its end. Takes no lock.
        """
        engine = self._running()
        return None if self._idle else (self._turns, engine.layers_run)

    @property
    def turned_at(self) -> float:
        """``time.monotonic()`` when the last turn of its loop ended: what it freed was free by then."""
        return self._turned_at

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

    def _ask(self, wanted: _Reset | _Snapshot) -> None:
        self._inbox.put(wanted)
        if self._closed.is_set():  # perhaps only since the caller checked: then the loop reads it no more
            _refuse(self._receive())

    def _main(self) -> None:
        try:
            from engine.engine import Engine  # with torch, which processes without an engine do not load

            engine = Engine(self._config)
            self._stats, self._load = engine.stats(), engine.load.read()
            self._engine = engine
            self._loaded.set()
            warming = (engine.grammars, WARM_AFTER_S)
            threading.Thread(target=self._warm_up, args=warming, name="quire-warm-up", daemon=True).start()
            with engine.many_steps():
                self._loop(engine)
        except BaseException as error:
            self._failure = error
            if self._engine is not None:
                logger.critical("the engine thread ends", exc_info=True)
                self._on_death(error)
        finally:
            if self._engine is not None:
                self._engine.grammars.close()
            self._loaded.set()
            # No call may wait for an answer of a thread that has ended.
            self._closed.set()
            _refuse([*self._snapshots, *self._pending, *self._receive()])

    def _warm_up(self, grammars: GrammarCompiler, every_s: float) -> None:
        """Once no request runs: the tokenizer's library keeps the interpreter's lock for 0.2 s."""
        while not self._closed.wait(every_s):
            if not self._live:
                grammars.warm_up()
                return

    def _loop(self, engine: Engine) -> None:
        begun = False  # whether a request got its first token in the last turn
        while True:
            deltas: list[TokenDelta] = []
            added: list[str] = []
            self._turns += 1
            self._idle = not engine.has_work()
            if self._idle:
                self._pending = self._receive(self._wait(engine))
            else:
                gives_way = begun and engine.fills_cores and len(self._live) == 1
                self._pending = self._receive(*(self._next_within(FIRST_TOKEN_S) if gives_way else ()))
            self._idle = False
            while self._pending:
                item = self._pending[0]
                match item:
                    case None:
                        return
                    case str():
                        deltas += engine.abort(item)
                    case _SequenceEnd():
                        deltas += engine.end_sequence(item.request_id, item.number)
                    case _Reset():
                        _resolve(item.done, engine.reset_prefix_cache())
                    case _Snapshot():
                        self._snapshots.append(item)
                    case _:
                        added.append(item.request_id)
                        deltas += _add(engine, item)
                self._pending.popleft()
            events = engine.kv_events
            if events is None or not events.pending:
                self._answer(engine)  # a step may be long
            deltas += engine.step()
            begun = False
            for delta in deltas:
                begun = begun or delta.index == 0
                if delta.final:
                    self._live.discard(delta.request_id)
            self._stats, self._load = engine.stats(), engine.load.read()
            self._turned_at = time.monotonic()
            batch = None if events is None else events.drain()
            self._answer(engine)
            self._on_outputs(StepOutputs(deltas, added, batch, self._load))

    def _wait(self, engine: Engine) -> _Item:
        """The next item. Until it comes, the idle engine prefaults the KV pool."""
        while engine.prefault():
            for item in self._next_within(PREFAULT_PAUSE_S):
                return item
        return self._inbox.get()

    def _next_within(self, seconds: float) -> Iterable[_Item]:
        """The next item as soon as it comes; nothing if none comes in that time."""
        try:
            return (self._inbox.get(timeout=seconds),)
        except Empty:
            return ()

    def _receive(self, *first: _Item) -> deque[_Item]:
        """``first`` and all that is queued."""
        items = deque(first)
        with contextlib.suppress(Empty):
            while True:
                items.append(self._inbox.get_nowait())
        return items

    def _answer(self, engine: Engine) -> None:
        """Answer the calls that wait for a snapshot."""
        if self._snapshots:
            snapshot = None if engine.kv_events is None else engine.kv_events.snapshot()
            for wanted in self._snapshots:
                _resolve(wanted.done, snapshot)
            self._snapshots.clear()


def _refuse(items: Iterable[_Item]) -> None:
    for item in items:
        if isinstance(item, _Reset | _Snapshot) and item.done.set_running_or_notify_cancel():
            item.done.set_exception(EngineDeadError("the engine has stopped"))


def _resolve(done: Future[_Result], result: _Result) -> None:
    """Answer a call, unless it was canceled: such a future takes no result."""
    if done.set_running_or_notify_cancel():
        done.set_result(result)


def _add(engine: Engine, request: Request) -> list[TokenDelta]:
    try:
        engine.add(request)
    except InvalidRequestError as error:
        index = request.generated_before
        return [TokenDelta(request.request_id, index, (), FinishReason.ERROR, error=error.message, final=True)]
    return []
