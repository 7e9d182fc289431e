"""The engine's loop, step by step: schedule, run, commit."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.config import EngineConfig
from engine.devices import usable_cores
from engine.errors import EngineDeadError
from engine.execution.calibration import (
    CPU_TRIAL_TOKENS,
    DECODE_SHARE,
    GPU_BUDGET,
    LONE_STEP,
    MAX_BUDGET,
    OFFLINE_CPU_BUDGET,
    Calibration,
    calibrate,
    decode_row_cost,
    processor_clock,
    steady_prefill_rate,
    swap_costs,
)
from engine.execution.model_runner import ModelRunner
from engine.kv.block_keys import KeyScheme
from engine.kv.block_pool import BlockPool
from engine.kv.host_pool import HostPool
from engine.kv.kv_events import KvEvents, root_key_of
from engine.kv.pool_size import free_ram
from engine.kv.prefix_index import PrefixIndex
from engine.request import COMPUTATION, ModelLimits, Request, TokenDelta
from engine.scheduling.candidates import Outcome
from engine.scheduling.load_report import LoadReporter
from engine.scheduling.recovery import Rates, RecoveryMode, RecoveryPolicy
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.scheduler_config import ModelTraits, SchedulerConfig
from engine.scheduling.sequence import ScheduledChunk
from engine.scheduling.speculation import MAX_DRAFTS, Speculation
from engine.scheduling.step import StepTiming
from engine.seeds import request_seed
from engine.stats import EngineStats
from engine.structured.compiler import GrammarCompiler
from engine.structured.lexers import lexer_memory
from engine.structured_output import FORM_FAILED

logger = logging.getLogger(__name__)


class Engine:
    """One model on one device, driven by calls of :meth:`step`. Not thread-safe: one thread owns it.

    ``offline`` takes a larger default token budget: throughput before the latency of a single step. Otherwise,
    with prefix caching, ``kv_events`` records the blocks that become findable.

    Raises:
        ConfigError: the model cannot be served with these options.
    """

    def __init__(self, config: EngineConfig, *, offline: bool = False) -> None:
        self.config = config
        self.runner = ModelRunner(config)
        if self.runner.device.type == "cuda":
            self.runner.warm_up()
        if not offline:
            self.runner.record_steps()
        self.limits: ModelLimits = self.runner.limits()
        calibration = self._calibrate(offline)
        self.token_budget = calibration.token_budget
        self._prefill_rate = calibration.prefill_rate
        max_num_seqs, lone_budget = min(config.max_num_seqs, self.token_budget), self.token_budget
        if config.token_budget is None and not offline and self.runner.device.type == "cpu":
            max_num_seqs = min(max_num_seqs, int(self.token_budget * DECODE_SHARE))
            lone_budget = min(int(self.token_budget * LONE_STEP), MAX_BUDGET)
        pool = BlockPool(self.limits.num_blocks, self.limits.block_size)
        self.window: int | None = self.runner.model.largest_window
        self.kv_events = None
        if config.prefix_caching and not offline:
            self.kv_events = KvEvents(pool.block_size, root_key_of)
        index = PrefixIndex(pool, window=self.window, observer=self.kv_events)
        self.scheduler = Scheduler(
            pool,
            index,
            self._recovery_policy(calibration),
            ModelTraits(self.limits, self.runner.model_key, self.runner.eos_token_ids),
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                token_budget=self.token_budget,
                lone_budget=lone_budget,
                prefix_caching=config.prefix_caching,
                priority_aging=config.priority_aging,
                check_invariants=config.check_invariants,
            ),
            host=HostPool(self.runner.memory.host_blocks),
            speculation=self._speculation(),
        )
        self.grammars = GrammarCompiler(
            self.runner.folder,
            self.limits.vocab_size,
            self.runner.eos_token_ids,
            checked=not offline,
            memory=lexer_memory(free_ram() // config.memory_sharers),
        )
        self.fills_cores = self.runner.device.type == "cpu" and self.runner.num_threads >= usable_cores()
        """Whether a step leaves no core to anything else."""
        self.load = LoadReporter(self.scheduler.state, prefill_rate=self._prefill_rate)
        self._steps = 0
        self._step_seconds = 0.0
        self._failed_steps = 0
        rate = f", prefill {self._prefill_rate:.0f} tokens/s" if self._prefill_rate else ""
        logger.info(
            "at most %d tokens in a step, %d sequences at once%s", self.token_budget, max_num_seqs, rate
        )

    def add(self, request: Request) -> None:
        """Queue ``request``; it runs from the next step on.

        Raises:
            InvalidRequestError: it can never run here, or its id is that of a live request.
        """
        form = request.params.structured_output
        if form is not None and request.grammar is None:
            request = replace(request, grammar=self.grammars.compile(form, request.client))
        seed = request.params.seed
        if seed is None:
            seed = request_seed(self.config.seed, request.request_id)
        self.scheduler.add(request, seed)

    @property
    def key_scheme(self) -> KeyScheme:
        """What the keys in ``kv_events`` depend on."""
        return KeyScheme(*self.runner.model_key)

    def abort(self, request_id: str) -> list[TokenDelta]:
        """End a request in any state; its blocks are free at once. Empty if there is no such request."""
        return self.scheduler.abort(request_id)

    def end_sequence(self, request_id: str, number: int) -> list[TokenDelta]:
        """End one sequence of a request that asks for several; the others go on. Empty if it is not there."""
        return self.scheduler.end_sequence(request_id, number)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; running requests keep their blocks. Returns how many became free."""
        return self.scheduler.reset_prefix_cache()

    @property
    def layers_run(self) -> int:
        """Layers computed since the start; may be read from other threads."""
        return self.runner.decoder.layers_run

    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return self.scheduler.has_work()

    def prefault(self) -> bool:
        """Map pages of the KV pool ahead of use, for a few milliseconds; returns whether more are left."""
        return self.runner.kv_cache.prefault(self.scheduler.state.pool.high_water_mark)

    def many_steps(self) -> contextlib.AbstractContextManager[None]:
        """See :meth:`ModelRunner.many_steps`."""
        return self.runner.many_steps()

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
        swap_out, swap_in = (0.0, 0.0)
        if plan.transfers:
            swap_out, swap_in = self.runner.transfer(plan.transfers, plan.chunks)
        deltas: list[TokenDelta] = []
        computing = time.perf_counter()
        outcomes, failed = self._run(plan.chunks)
        for message, ids in _by_message(failed).items():
            deltas += self.scheduler.fail(ids, message)
        ended = time.perf_counter()
        deltas += self.scheduler.commit(plan, outcomes, StepTiming(ended - computing, swap_out, swap_in))
        self._steps += 1
        self._step_seconds = ended - started
        self.load.stepped(plan, self._step_seconds)
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
            failed_steps=self._failed_steps,
            grammar_faults=self.grammars.faults,
        )

    def _run(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[Outcome], dict[str, str]]:
        """Run a step, by parts if it fails; see :meth:`_run_in_parts`.

        Returns the outcomes of all chunks that sample, and the message of each request that failed.
        """
        failed = self._advance_grammars(chunks)
        try:
            return self.runner.run(chunks), failed
        except Exception:
            self._failed_steps += 1
            logger.warning("a step of %d requests failed; rerunning it in parts", len(chunks), exc_info=True)
        # Only here has the exception released the failed step's tensors.
        outcomes, others = self._run_in_parts(chunks)
        return outcomes, {**failed, **others}

    def _advance_grammars(self, chunks: Sequence[ScheduledChunk]) -> dict[str, str]:
        """Bring the grammars of a step up to date; those that became too complex fail their requests."""
        failed: dict[str, str] = {}
        for sequence, reason in self.runner.advance_grammars(chunks):
            failed[sequence.request_id] = f"{FORM_FAILED}: {reason}"
            if sequence.params.structured_output is not None:
                self.grammars.forget(sequence.params.structured_output)
        self.grammars.bound_memory()
        return failed

    def _run_in_parts(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[Outcome], dict[str, str]]:
        """Run a failed step by halves, and a chunk that runs out of memory by halves of its tokens.

        Drafts are left out, because no request may fail because of a guess. Returns the outcomes of all chunks
        that sample (0 for a failed one), and the message of each failed request. If every chunk fails, a probe
        of the model decides whether the requests or the engine are at fault.
        """
        outcomes: dict[tuple[str, int], Outcome] = {}
        failed: dict[tuple[str, int], str] = {}
        for chunk in chunks:
            chunk.drafts = ()
        parts = [chunks]
        while parts:
            part = parts.pop()
            if part[0].sequence.key in failed:  # the rest of a chunk whose beginning has failed
                continue
            try:
                made = self.runner.run(part)
            except Exception as error:  # noqa: BLE001 - the request that causes it gets it
                no_memory, reason = _out_of_memory(error), str(error)  # not the error: it holds tensors
            else:
                sampling = (chunk.sequence.key for chunk in part if chunk.samples)
                outcomes.update(zip(sampling, made, strict=True))
                continue
            if len(part) > 1:
                parts += [part[len(part) // 2 :], part[: len(part) // 2]]
            elif no_memory and part[0].length > 1:
                parts += [[half] for half in _halves(part[0])]
            else:
                what = "ran out of memory" if no_memory else "failed"
                failed[part[0].sequence.key] = f"{COMPUTATION} {what}: {reason}"
        if len(failed) == len(chunks):
            self.runner.probe()
        messages = {request_id: message for (request_id, _), message in failed.items()}
        return [outcomes.get(chunk.sequence.key, 0) for chunk in chunks if chunk.samples], messages

    def _recovery_policy(self, calibration: Calibration) -> RecoveryPolicy:
        """The policy of the options, with rates as measured now."""
        rates = Rates(calibration.prefill_rate)
        if self.runner.memory.host_blocks:
            out, back = swap_costs(self.runner.kv_cache)
            rates = Rates(calibration.prefill_rate, out.rate, back.rate, out.call_seconds, back.call_seconds)
        mode, refit = RecoveryMode(self.config.recovery), self.runner.device.type == "cpu"  # see CopyClock
        return RecoveryPolicy(mode, self.limits.block_size, rates, refit_calls=refit)

    def _speculation(self) -> Speculation | None:
        """Measures what a row costs here, unless there is to be none."""
        most = MAX_DRAFTS if self.config.speculation is None else self.config.speculation
        if not most:
            return None
        runner = self.runner
        clock = processor_clock(runner.num_threads) if runner.device.type == "cpu" else time.perf_counter
        return Speculation(most, decode_row_cost(runner.decode, clock))

    def _calibrate(self, offline: bool) -> Calibration:
        """Choose the token budget; measure the prefill rate if that, a router or a recovery needs it."""
        runner, given = self.runner, self.config.token_budget
        cpu = runner.device.type == "cpu"
        clock = processor_clock(runner.num_threads) if cpu else time.perf_counter
        if given is None and cpu and not offline:
            return calibrate(runner.prefill, self.limits.max_tokens, clock)
        budget = given or (OFFLINE_CPU_BUDGET if cpu else GPU_BUDGET)
        rate = 0.0
        if runner.memory.host_blocks or not offline:
            # On a CPU longer prompts are no faster, and would hold up the start.
            tokens = min(budget, self.limits.max_tokens, CPU_TRIAL_TOKENS if cpu else budget)
            rate = steady_prefill_rate(runner.prefill, tokens, clock)
        return Calibration(rate, budget)


def _out_of_memory(error: Exception) -> bool:
    """Whether a smaller step may succeed."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _halves(chunk: ScheduledChunk) -> tuple[ScheduledChunk, ScheduledChunk]:
    """The second half of a chunk's tokens, and the first."""
    sequence, start, length = chunk.sequence, chunk.start, chunk.length
    first = length // 2
    return (
        ScheduledChunk(sequence, start + first, length - first, chunk.samples),
        ScheduledChunk(sequence, start, first, False),
    )


def _by_message(failed: dict[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for request_id, message in failed.items():
        groups.setdefault(message, []).append(request_id)
    return groups
