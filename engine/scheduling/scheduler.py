"""Continuous batching over paged KV: chooses which sequences run in each step, with which tokens and blocks."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Iterable

from engine.errors import ConfigError
from engine.kv.block_pool import BlockPool, InvariantError
from engine.kv.host_pool import HostPool
from engine.kv.prefix_index import PrefixIndex
from engine.request import FinishReason, Request, TokenDelta
from engine.scheduling.admission import (
    admit_waiting,
    first_that_fits,
    preempt_for_first,
    preempt_held_beams,
)
from engine.scheduling.candidates import Choice, Outcome
from engine.scheduling.intake import Intake
from engine.scheduling.latency_stats import LatencyStats
from engine.scheduling.outcomes import Outcomes
from engine.scheduling.preemption import grow
from engine.scheduling.prefill import begin_prefills, lengthen_held_back
from engine.scheduling.recovery import RecoveryPolicy
from engine.scheduling.scheduler_config import ModelTraits, SchedulerConfig
from engine.scheduling.scheduler_stats import SchedulerStats
from engine.scheduling.sequence import ScheduledChunk, Sequence, SequenceState
from engine.scheduling.sequence_groups import SequenceGroups
from engine.scheduling.speculation import Speculation
from engine.scheduling.state import SchedulerState
from engine.scheduling.step import StepPlan, StepTiming
from engine.scheduling.workload_stats import WorkloadStats


class Scheduler:
    """Plans steps and accounts for them; one thread uses it.

    A step is ``plan = schedule()``, then carrying out its transfers and running its chunks, then
    ``commit(plan, outcomes)``. There is no prefill or decode phase: each sequence has ``computed`` tokens, and
    a step brings it closer to the end of ``token_ids``.

    *Order* means (priority, start in the fair queue, arrival, id, sequence), and is fixed once a sequence has
    run. Guarantees within one priority:

    - a request that fits the pool by itself ends; :meth:`add` rejects one that can never fit;
    - blocks are taken from the last running sequence in order; the first is never preempted for a later one;
    - clients that always have requests waiting get equal work; see ``engine/scheduling/fair_queue.py``;
    - while a preempted sequence waits, later ones take only blocks that it does not need;
    - a waiting sequence that does not fit is overtaken at most ``max_overtakes`` times.

    Args:
        host: blocks to swap to; ``None`` is none.
        speculation: adds guessed tokens to steps; ``None`` adds none.
        clock: monotonic seconds; stamps requests without an ``arrival``.

    Raises:
        ConfigError: the model's limits are not those of the pool.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        recovery: RecoveryPolicy,
        model: ModelTraits,
        config: SchedulerConfig,
        *,
        host: HostPool | None = None,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = model.limits
        if (limits.num_blocks, limits.block_size) != (pool.num_blocks, pool.block_size):
            raise ConfigError(
                f"limits name {limits.num_blocks} blocks of {limits.block_size} tokens but the pool has "
                f"{pool.num_blocks} of {pool.block_size}"
            )
        self.state = SchedulerState(pool, index, HostPool(0) if host is None else host, recovery, config)
        self._lone_budget = config.token_budget if config.lone_budget is None else config.lone_budget
        self._workload = WorkloadStats(self.state.output_lengths)
        self._latency = LatencyStats(clock)
        self._outcomes = Outcomes(self.state, self._workload, self._latency)
        self._groups = SequenceGroups(self.state, self._outcomes)
        self._intake = Intake(
            self.state,
            self._groups,
            self._workload,
            model,
            priority_aging=config.priority_aging,
            clock=clock,
        )
        self.speculation = speculation
        self._drafted_tokens = self._accepted_tokens = 0
        self._copied_blocks = 0
        self._finished = dict.fromkeys(FinishReason, 0)
        self._uncommitted: StepPlan | None = None
        self._check_invariants = config.check_invariants

    def add(self, request: Request, seed: int = 0) -> None:
        """Queue a request whose random draws begin with ``seed``.

        Raises:
            InvalidRequestError: it can never run, or its id is in use.
        """
        self._intake.add(request, seed)
        self._workload.arrived(request)
        self._maybe_check()

    def schedule(self) -> StepPlan:
        """Plan the next step. Work that was planned but not committed is planned again.

        The plan's transfers must be carried out before the next call, even if its chunks are not run.
        """
        state = self.state
        state.settle_swaps()
        state.shares.reset()
        budget = self._lone_budget if len(state.sequences) == 1 else state.token_budget
        plan = self._uncommitted = StepPlan(budget)
        if state.waiting:
            moved = state.fair.settle()
            if moved:
                state.reorder(moved)
            preempt_for_first(state, plan)
        _continue_running(state, plan)
        state.reserve.adapt(plan.out_of_blocks)
        if plan.out_of_blocks:
            state.num_lacking = state.num_waiting
        else:
            state.num_blocked = state.num_lacking = 0
            if state.waiting:
                preempt_held_beams(state, plan)
                state.num_blocked, state.num_lacking = admit_waiting(state, plan)
            if state.shares.limited:
                _share_rest(state, plan)
        if self.speculation is not None:
            self.speculation.add_drafts(state, plan)
        plan.num_blocked, plan.num_lacking = state.num_blocked, state.num_lacking
        for sequence in plan.admitted:
            self._workload.admitted(sequence, state.prefix_caching)
        if plan.admitted:
            self._latency.admitted(plan.admitted)
        self._copied_blocks += len(plan.transfers.copies)
        self._maybe_check()
        return plan

    def commit(
        self, plan: StepPlan, outcomes: abc.Sequence[Outcome], timing: StepTiming | None = None
    ) -> list[TokenDelta]:
        """Account for a step that ran. ``outcomes`` has one entry for each chunk that samples, in order.

        Outcomes of sequences that ended since :meth:`schedule` are dropped.

        Raises:
            InvariantError: plan and outcomes do not belong together, or the plan is not the last one made.
        """
        if plan is not self._uncommitted:
            raise InvariantError("the plan is stale: it was committed before, or another one was made since")
        samples = plan.num_samples
        if len(outcomes) != samples:
            raise InvariantError(f"a step that samples {samples} tokens was committed with {len(outcomes)}")
        self._uncommitted = None
        state = self.state
        state.settle_swaps()
        if timing is not None:
            state.recoveries.account(plan, timing)
        by_chunk: Iterable[Outcome | None] = outcomes
        if samples < len(plan.chunks):
            following = iter(outcomes)
            by_chunk = [next(following) if chunk.samples else None for chunk in plan.chunks]
        deltas: list[TokenDelta] = []
        caching, size = state.prefix_caching, state.pool.block_size
        finished, appended = SequenceState.FINISHED, 0
        for chunk, outcome in zip(plan.chunks, by_chunk, strict=True):
            sequence = chunk.sequence
            if sequence.state is finished:
                continue
            if isinstance(outcome, tuple):
                deltas += self._commit_drafts(plan, chunk, outcome)
                continue
            computed = sequence.computed = chunk.start + chunk.length
            if caching and computed >= (sequence.indexed + 1) * size:
                self._index_full_blocks(sequence)
            if isinstance(outcome, int):
                tokens = sequence.token_ids
                index = len(tokens) - sequence.output_start
                if outcome in sequence.end_token_ids or len(tokens) + 1 >= sequence.max_total_tokens:
                    deltas += self._count_finished(self._groups.append(sequence, outcome, 0.0))
                    continue
                # Outcomes.append, inlined for tokens that cannot be the last one: nearly all of them.
                tokens.append(outcome)
                appended += 1
                cached, number = sequence.cached_tokens or 0, sequence.number
                deltas.append(TokenDelta(sequence.request_id, index, (outcome,), None, cached, None, number))
            elif outcome is not None:
                deltas += self._count_finished(self._groups.advance(sequence, outcome))
        self._outcomes.generated_tokens += appended
        if samples:
            state.output_lengths.passed(1.0 + plan.accepted_tokens / samples)
        self._drafted_tokens += plan.drafted_tokens
        self._accepted_tokens += plan.accepted_tokens
        self._latency.committed(deltas)
        self._maybe_check()
        return deltas

    def _commit_drafts(
        self, plan: StepPlan, chunk: ScheduledChunk, choices: abc.Sequence[Choice]
    ) -> list[TokenDelta]:
        """Account for a chunk with drafts as if each of its ``choices`` had been made in a separate step.

        ``choices`` are of the rows whose preceding tokens were all right. Choices after the sequence's end are
        dropped.
        """
        sequence = chunk.sequence
        deltas: list[TokenDelta] = []
        plan.drafted_tokens += len(chunk.drafts)
        for place, choice in enumerate(choices):
            sequence.computed = chunk.start + chunk.length + place
            if self.state.prefix_caching:
                self._index_full_blocks(sequence)
            plan.accepted_tokens += place > 0
            if isinstance(choice, int):
                deltas += self._groups.append(sequence, choice, 0.0)
            else:
                deltas += self._groups.advance(sequence, choice)
            if sequence.state is SequenceState.FINISHED:
                break
        if len(deltas) > 1 and not sequence.params.ranked:
            deltas = [_joined(deltas)]
        return self._count_finished(deltas)

    def abort(self, request_id: str) -> list[TokenDelta]:
        """End all sequences of a request in any state; empty when there is no such request."""
        deltas = self._end(request_id, FinishReason.ABORT)
        self._maybe_check()
        return deltas

    def end_sequence(self, request_id: str, number: int) -> list[TokenDelta]:
        """End one sequence of a request because its client needs no more of it; empty if it does not exist.

        Ranked sequences continue: each may turn out to be among the best.
        """
        sequence = self.state.sequences.get((request_id, number))
        if sequence is None or sequence.params.ranked or sequence.group is None or not sequence.group.forked:
            return []
        delta = self._outcomes.finish(sequence, FinishReason.STOP)
        deltas = self._count_finished(self._groups.finished(sequence, delta))
        self._maybe_check()
        return deltas

    def fail(self, request_ids: Iterable[str], message: str) -> list[TokenDelta]:
        """End requests whose step raised an exception and was not committed, so nothing it wrote can be found.

        The plan's other requests may be committed with it (samples of ended ones are dropped) or planned again.
        """
        deltas = [
            delta
            for request_id in dict.fromkeys(request_ids)
            for delta in self._end(request_id, FinishReason.ERROR, message)
        ]
        self._maybe_check()
        return deltas

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; running requests keep their blocks. Returns how many became free."""
        freed = self.state.index.reset()
        self._maybe_check()
        return freed

    def has_work(self) -> bool:
        """Whether any request has not ended; then :meth:`schedule` plans at least one chunk."""
        return bool(self.state.sequences)

    def stats(self) -> SchedulerStats:
        """Return a snapshot; O(1)."""
        state, workload = self.state, self._workload
        pool, host = state.pool, state.host
        return SchedulerStats(
            referenced_blocks=pool.num_referenced,
            cached_blocks=pool.num_cached,
            free_blocks=pool.num_free,
            shared_blocks=pool.num_shared,
            running=len(state.running),
            waiting=len(state.waiting) - state.num_preempted - state.num_swapped,
            preempted=state.num_preempted,
            swapped=state.num_swapped,
            prompt_tokens=workload.prompt_tokens,
            generated_tokens=self._outcomes.generated_tokens + self._groups.beam_tokens,
            prefix_query_tokens=workload.query_tokens,
            prefix_hit_tokens=workload.hit_tokens,
            preemptions=state.num_preemptions,
            host_blocks=host.num_blocks,
            host_blocks_used=host.num_used,
            copied_blocks=self._copied_blocks,
            recovery=state.recoveries.stats(),
            finished=dict(self._finished),
            latency=self._latency,
            arrived_tokens=workload.arrived_tokens,
            remaining_output=workload.remaining_output,
            running_limit=state.running_limit,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
        )

    def check(self) -> None:
        """Verify pools, index, state and groups; O(blocks), for tests and debugging.

        Raises:
            InvariantError: says what is wrong.
        """
        state = self.state
        state.pool.check([sequence.block_table for sequence in state.sequences.values()])
        state.index.check()
        state.check()
        self._groups.check()

    def _index_full_blocks(self, sequence: Sequence) -> None:
        """Hand full blocks to the prefix index: only now is their KV sure to be there."""
        state = self.state
        full = sequence.computed // state.pool.block_size
        if full <= sequence.indexed:
            return
        sequence.node = state.index.extend(
            sequence.root, sequence.node, sequence.token_ids, sequence.block_table, full
        )
        sequence.indexed = full

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> list[TokenDelta]:
        """End every sequence of a request."""
        if request_id in self._groups:
            sequences = self._groups.sequences(request_id)
        else:
            sequence = self.state.sequences.get((request_id, 0))
            sequences = [] if sequence is None else [sequence]
        deltas: list[TokenDelta] = []
        for sequence in sequences:
            delta = self._outcomes.finish(sequence, reason, error=error)
            deltas += self._groups.finished(sequence, delta)
        return self._count_finished(deltas)

    def _count_finished(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._finished[delta.finish_reason] += 1
        return deltas

    def _maybe_check(self) -> None:
        if self._check_invariants:
            self.check()


def _joined(deltas: list[TokenDelta]) -> TokenDelta:
    """One delta for consecutive ones of a sequence."""
    joined = deltas[-1]
    joined.index = deltas[0].index
    joined.token_ids = tuple(token for delta in deltas for token in delta.token_ids)
    if joined.logprobs is not None:
        joined.logprobs = tuple(entry for delta in deltas for entry in delta.logprobs or ())
    return joined


def _share_rest(state: SchedulerState, plan: StepPlan) -> None:
    """Tokens that the shares left over go by the order alone, so that none is idle.

    Without any, admission still counts who lacks blocks: it did not look at those that got no share.
    """
    shares = state.shares
    # Those that this step has started may come before others.
    held_back = sorted(shares.held_back, key=lambda sequence: sequence.order)
    if plan.budget_left > 0:
        if shares.quotas:
            lengthen_held_back(state, plan, held_back, shares.quotas)
        if state.waiting and held_back:
            # One that waits may come before one that runs: otherwise a client of many short prompts, which all
            # begin and end within its quota, would get none of what is left.
            first = state.waiting[0].order
            later = [sequence for sequence in held_back if sequence.order > first]
            if later:
                lengthen_held_back(state, plan, [each for each in held_back if each.order < first])
                shares.lift(plan.budget_left)
                admit_waiting(state, plan, before=later[0].order)
        lengthen_held_back(state, plan, held_back)
    if state.waiting:
        shares.lift(plan.budget_left)
        state.num_blocked, state.num_lacking = admit_waiting(state, plan)


def _continue_running(state: SchedulerState, plan: StepPlan) -> None:
    """Give each running sequence its tokens, in order; prefills share the tokens that no decode needs.

    Blocks are taken from the end of the order, so once a sequence was preempted itself, none is left behind it.
    """
    running, chunks, shares = state.running, plan.chunks, state.shares
    next_to_start: Sequence | None = None
    for position, sequence in enumerate(running):
        computed = sequence.computed
        length = len(sequence.token_ids) - computed
        if length == 1:  # as nearly always, and nearly always its last block has room
            if computed >= sequence.writable and not grow(state, sequence, 1, plan):
                return
            chunk = sequence.decode_chunk
            if chunk is None:
                chunk = sequence.decode_chunk = ScheduledChunk(sequence, computed, 1, True)
            chunk.start = computed
            chunk.drafts = ()
            chunks.append(chunk)
            continue
        if length == 0:  # a held beam, which has nothing to compute
            continue
        if not shares.begun:
            later = len(running) - position
            decodes = sum(other.remaining == 1 for other in running[position + 1 :])
            begin_prefills(state, plan.budget_left - decodes, later - decodes)
            next_to_start = first_that_fits(state)
        if next_to_start is not None and next_to_start.order < sequence.order:
            shares.hold_back(sequence)
            continue
        allowed = shares.allowed(sequence, length)
        shares.take(sequence, length, allowed)
        if allowed == 0:
            continue
        length = grow(state, sequence, allowed, plan)
        if length == 0:
            return
        plan.add(sequence, length)
