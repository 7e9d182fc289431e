"""The loop (schedule, run, commit) and the thread that runs it in a replica."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from engine.calibration import (
    DECODE_SHARE,
    GPU_BUDGET,
    OFFLINE_CPU_BUDGET,
    Calibration,
    calibrate,
    processor_clock,
    swap_rates,
)
from engine.config import EngineConfig
from engine.errors import EngineDeadError, InvalidRequestError
from engine.model_runner import ModelRunner
from engine.random import request_seed
from engine.recovery import Rates, RecoveryMode, RecoveryPolicy
from engine.request import FinishReason, ModelLimits, Request, TokenDelta, validate
from engine.scheduler import ScheduledChunk, Scheduler, SchedulerStats
from engine.step_plan import Candidates, StepTiming

_log = logging.getLogger("quire.engine")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot between two steps."""

    scheduler: SchedulerStats
    num_blocks: int
    block_size: int
    token_budget: int  # tokens per step
    prefill_rate: float  # tokens per second, measured at start; 0 if not measured
    steps: int  # steps run since start
    step_seconds: float  # duration of the last step


class Engine:
    """One model on one device, driven by calls of :meth:`step`. Not thread-safe: one thread owns it.

    ``offline`` takes a larger default token budget: throughput before the latency of a single step.

    Raises:
        ConfigError: the model cannot be served with these options.
    """

    def __init__(self, config: EngineConfig, *, offline: bool = False) -> None:
        self.config = config
        self.runner = ModelRunner(config)
        self.limits: ModelLimits = self.runner.limits()
        calibration = self._calibrate(offline)
        self.token_budget = calibration.token_budget
        self._prefill_rate = calibration.prefill_rate
        max_num_seqs = min(config.max_num_seqs, self.token_budget)
        if self._prefill_rate:
            max_num_seqs = min(max_num_seqs, int(self.token_budget * DECODE_SHARE))
        self.scheduler = Scheduler.create(
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            max_num_seqs=max_num_seqs,
            token_budget=self.token_budget,
            prefix_caching=config.prefix_caching,
            eos_token_ids=self.runner.eos_token_ids,
            model_key=self.runner.model_key,
            limits=self.limits,
            recovery=self._recovery_policy(calibration),
            host_blocks=self.runner.memory.host_blocks,
            window=self.runner.model.largest_window,
            priority_ageing=config.priority_ageing,
            check_invariants=config.check_invariants,
        )
        self._steps = 0
        self._step_seconds = 0.0
        rate = f", prefill {self._prefill_rate:.0f} tokens/s" if self._prefill_rate else ""
        _log.info("at most %d tokens and %d requests a step%s", self.token_budget, max_num_seqs, rate)

    def add(self, request: Request) -> None:
        """Queue ``request``; it runs from the next step on.

        Raises:
            InvalidRequestError: it can never run here, or its id is that of a live request.
        """
        seed = request.params.seed
        request.seed = request_seed(self.config.seed, request.request_id) if seed is None else seed
        request.arrival = request.arrival or time.monotonic()
        self.scheduler.add(request)

    def abort(self, request_id: str) -> list[TokenDelta]:
        """End a request in whatever state; its blocks are free at once. Empty if there is none such."""
        return self.scheduler.abort(request_id)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; running requests keep their blocks. Returns the blocks that became free."""
        return self.scheduler.reset_prefix_cache()

    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return self.scheduler.has_work()

    def step(self) -> list[TokenDelta]:
        """Run one step and return what it made.

        An exception in the computation ends the requests that cause it, and only those, with an error.

        Raises:
            Exception: the engine itself is broken; it must not be used any more.
        """
        if not self.scheduler.has_work():
            return []
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        if not plan.chunks:
            raise EngineDeadError("requests are waiting but the scheduler found nothing to run")
        swap_out, swap_in = self.runner.transfer(plan.transfers) if plan.transfers else (0.0, 0.0)
        deltas: list[TokenDelta] = []
        computing = time.perf_counter()
        try:
            outcomes = self.runner.run(plan.chunks)
        except Exception as error:
            if _out_of_memory(error):
                raise
            _log.warning("a step of %d requests failed; running its parts", len(plan.chunks), exc_info=True)
            outcomes, failed = self._run_in_parts(plan.chunks)
            for message, ids in _by_message(failed).items():
                deltas += self.scheduler.fail(ids, message)
        ended = time.perf_counter()
        deltas += self.scheduler.commit(plan, outcomes, StepTiming(ended - computing, swap_out, swap_in))
        self._steps += 1
        self._step_seconds = ended - started
        if self.config.check_at_idle and not self.scheduler.has_work():
            self.scheduler.check()
        return deltas

    def stats(self) -> EngineStats:
        """Figures as of the last step."""
        return EngineStats(
            scheduler=self.scheduler.stats(),
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            token_budget=self.token_budget,
            prefill_rate=self._prefill_rate,
            steps=self._steps,
            step_seconds=self._step_seconds,
        )

    def _run_in_parts(
        self, chunks: Sequence[ScheduledChunk]
    ) -> tuple[list[int | Candidates], dict[str, str]]:
        """Run a failed step by halves.

        Returns the outcomes of all chunks that sample (0 for a failed one), and the message of each failed
        request. If every chunk fails, a probe of the model decides whether they or the engine are at fault.
        """
        outcomes: dict[tuple[str, int], int | Candidates] = {}
        failures = 0
        failed: dict[str, str] = {}
        parts = [chunks]
        while parts:
            part = parts.pop()
            try:
                made = self.runner.run(part)
            except Exception as error:
                if _out_of_memory(error):
                    raise
                if len(part) == 1:
                    failures += 1
                    failed[part[0].request.request_id] = f"the request's computation failed: {error}"
                else:
                    parts += [part[len(part) // 2 :], part[: len(part) // 2]]
                continue
            sampling = (chunk.request.key for chunk in part if chunk.samples)
            outcomes.update(zip(sampling, made, strict=True))
        if failures == len(chunks):
            self.runner.probe()
        return [outcomes.get(chunk.request.key, 0) for chunk in chunks if chunk.samples], failed

    def _recovery_policy(self, calibration: Calibration) -> RecoveryPolicy:
        """The policy of the options, with rates as measured now."""
        out = back = 0.0
        if self.runner.memory.host_blocks:
            out, back = swap_rates(self.runner.kv_cache)
        rates = Rates(prefill=calibration.prefill_rate, swap_out=out, swap_in=back)
        return RecoveryPolicy(RecoveryMode(self.config.recovery), self.limits.block_size, rates)

    def _calibrate(self, offline: bool) -> Calibration:
        given = self.config.token_budget
        if given is not None:
            return Calibration(0.0, given)
        if self.runner.device.type != "cpu":
            return Calibration(0.0, GPU_BUDGET)
        if offline:
            return Calibration(0.0, OFFLINE_CPU_BUDGET)
        cache = self.runner.kv_cache

        def prefill(tokens: int) -> None:
            self.runner.forward_alone([0] * tokens, cache)

        return calibrate(prefill, self.limits.max_tokens, processor_clock(self.runner.num_threads))


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
            return [
                TokenDelta(item.request_id, index, (), FinishReason.ERROR, error=error.message, final=True)
            ]
        return []


def _out_of_memory(error: Exception) -> bool:
    """Whether no request can be blamed: memory ran out."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _by_message(failed: dict[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for request_id, message in failed.items():
        groups.setdefault(message, []).append(request_id)
    return groups
