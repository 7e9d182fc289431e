"""Owns the live requests: takes them in, plans each step, accounts for it, lets them go."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from engine.errors import ConfigError
from engine.kv.block_pool import BlockPool, InvariantError
from engine.kv.host_pool import HostPool
from engine.kv.prefix_index import PrefixIndex
from engine.request import FinishReason, ModelLimits, Request, RequestState, TokenDelta
from engine.scheduling.arrivals import Arrivals
from engine.scheduling.families import Families
from engine.scheduling.preemption import Preemption
from engine.scheduling.recovery import RecoveryPolicy
from engine.scheduling.request_table import Entry, RequestTable
from engine.scheduling.step_plan import Candidates, ScheduledChunk, SchedulerStats, StepPlan, StepTiming
from engine.scheduling.step_planner import StepPlanner
from engine.scheduling.traffic import Traffic

__all__ = ["ScheduledChunk", "Scheduler", "SchedulerStats", "StepPlan"]


class Scheduler:
    """Decides who runs, with which tokens and which blocks; one thread uses it.

    A step is ``plan = schedule()``, carrying out its transfers and running its chunks, then
    ``commit(plan, outcomes)``. There is no prefill or decode phase: each sequence has ``computed`` tokens and a
    step brings it nearer to the end of ``token_ids``.

    Promises, within one priority and with order meaning (priority, arrival, id, sequence), kept for life:

    - a request that fits the pool alone ends; what can never fit is refused by :meth:`add`;
    - blocks are taken from the last running sequence in order; the first is never preempted for a younger one;
    - while preempted sequences wait, those behind them take only blocks that they do not need;
    - a waiting sequence that does not fit is overtaken at most ``max_overtakes`` times.

    Args:
        host: blocks to swap to.
        max_num_seqs: most running sequences; never above ``token_budget``, so that all can decode in each step.
        token_budget: most tokens in one step.
        model_key: what KV depends on in the model (revision, dtype); part of the root of its prefix trees.
        priority_ageing: seconds of waiting that are worth one level of priority; ``None`` makes priority
            absolute, so that better ones can hold up worse ones without bound.
        look_ahead: waiting sequences that do not fit and are passed over in one step.
        max_overtakes: admissions past a waiting sequence after which nothing passes it.
        clock: monotonic seconds; stamps requests that bring no ``arrival``.
        check_invariants: verify pool, index and tables after each call (slow; for tests).
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        *,
        max_num_seqs: int,
        token_budget: int,
        prefix_caching: bool,
        eos_token_ids: Collection[int],
        model_key: tuple[object, ...],
        limits: ModelLimits,
        recovery: RecoveryPolicy,
        host: HostPool | None = None,
        priority_ageing: float | None = None,
        look_ahead: int = 8,
        max_overtakes: int = 32,
        clock: Callable[[], float] = time.monotonic,
        check_invariants: bool = False,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("token_budget", token_budget)):
            if value < 1:
                raise ConfigError(f"{name} is {value} but must be at least 1")
        if (limits.num_blocks, limits.block_size) != (pool.num_blocks, pool.block_size):
            raise ConfigError(
                f"limits name {limits.num_blocks} blocks of {limits.block_size} tokens but the pool has "
                f"{pool.num_blocks} of {pool.block_size}"
            )
        self._pool, self._index = pool, index
        self._host = HostPool(0) if host is None else host
        self.table = RequestTable(pool, self._host)  # others may read it between two calls
        self._preemption = Preemption(pool, index, self._host, self.table, recovery)
        most = min(max_num_seqs, token_budget)
        self._planner = StepPlanner(
            pool,
            index,
            self.table,
            self._preemption,
            max_num_seqs=most,
            token_budget=token_budget,
            prefix_caching=prefix_caching,
            look_ahead=look_ahead,
            max_overtakes=max_overtakes,
        )
        self._families = Families(self.table, self._preemption, self._append, most)
        self._arrivals = Arrivals(
            self.table,
            self._families,
            max_num_seqs=most,
            eos_token_ids=eos_token_ids,
            model_key=model_key,
            limits=limits,
            priority_ageing=priority_ageing,
            clock=clock,
        )
        self._prefix_caching, self._check_invariants = prefix_caching, check_invariants
        self._traffic = Traffic()
        self._generated_tokens = self._copied_blocks = 0
        self._finished = dict.fromkeys(FinishReason, 0)
        self._planned: StepPlan | None = None  # and not committed

    @classmethod
    def create(
        cls,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        token_budget: int,
        prefix_caching: bool,
        eos_token_ids: Collection[int],
        model_key: tuple[object, ...],
        limits: ModelLimits,
        recovery: RecoveryPolicy,
        host_blocks: int = 0,
        window: int | None = None,
        priority_ageing: float | None = None,
        check_invariants: bool = False,
    ) -> Scheduler:
        """Make a scheduler with pools and an index of its own; ``window`` is the model's largest, in tokens."""
        pool = BlockPool(num_blocks, block_size)
        return cls(
            pool,
            PrefixIndex(pool, window=window),
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            prefix_caching=prefix_caching,
            eos_token_ids=eos_token_ids,
            model_key=model_key,
            limits=limits,
            recovery=recovery,
            host=HostPool(host_blocks),
            priority_ageing=priority_ageing,
            check_invariants=check_invariants,
        )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never run, or its id is in use.
        """
        self._arrivals.add(request)
        self._traffic.came(request)
        self._maybe_check()

    def abort(self, request_id: str) -> list[TokenDelta]:
        """End all sequences of a request in any state; empty when there is no such request."""
        deltas = self._end(request_id, FinishReason.ABORT)
        self._maybe_check()
        return deltas

    def fail(self, request_ids: Iterable[str], message: str) -> list[TokenDelta]:
        """End requests whose step raised and was not committed: nothing that it wrote can be found.

        The others of that plan may be committed with it (samples of ended ones are dropped) or planned anew.
        """
        deltas = [
            delta
            for request_id in dict.fromkeys(request_ids)
            for delta in self._end(request_id, FinishReason.ERROR, message)
        ]
        self._maybe_check()
        return deltas

    def reset_prefix_cache(self) -> int:
        """Forget all that could be found; running requests keep their blocks. Returns how many became free."""
        freed = self._index.reset()
        self._maybe_check()
        return freed

    def has_work(self) -> bool:
        """Whether any request has not ended; then :meth:`schedule` plans at least one chunk."""
        return bool(self.table.entries)

    def stats(self) -> SchedulerStats:
        """Return a snapshot; O(1)."""
        pool, table = self._pool, self.table
        return SchedulerStats(
            referenced_blocks=pool.num_referenced,
            cached_blocks=pool.num_cached,
            free_blocks=pool.num_free,
            running=len(table.running),
            waiting=len(table.waiting) - table.num_preempted - table.num_swapped,
            preempted=table.num_preempted,
            swapped=table.num_swapped,
            prompt_tokens=self._traffic.prompt_tokens,
            generated_tokens=self._generated_tokens + self._families.beam_tokens,
            prefix_query_tokens=self._traffic.query_tokens,
            prefix_hit_tokens=self._traffic.hit_tokens,
            preemptions=self._preemption.count,
            host_blocks=self._host.num_blocks,
            host_blocks_used=self._host.num_used,
            copied_blocks=self._copied_blocks,
            recovery=self._preemption.stats(),
            finished=dict(self._finished),
            arrived_tokens=self._traffic.arrived_tokens,
            remaining_output=self._traffic.remaining_output,
            running_limit=table.running_limit,
        )

    def schedule(self) -> StepPlan:
        """Plan the next step; work that is planned but not committed is planned again.

        The plan's transfers must be carried out before the next call, whatever becomes of its chunks.
        """
        plan = self._planned = self._planner.plan()
        for request in plan.admitted:
            self._traffic.admitted(request, self._prefix_caching)
        self._copied_blocks += len(plan.transfers.copies)
        self._maybe_check()
        return plan

    def commit(
        self, plan: StepPlan, outcomes: Sequence[int | Candidates], timing: StepTiming | None = None
    ) -> list[TokenDelta]:
        """Account for a step that ran; ``outcomes`` are of the chunks that sample, in their order.

        Outcomes of requests that ended since :meth:`schedule` are dropped.

        Raises:
            InvariantError: plan and outcomes do not belong together, or the plan is not the last one made.
        """
        if plan is not self._planned:
            raise InvariantError("the plan is stale: it was committed before, or another one was made since")
        samples = plan.num_samples
        if len(outcomes) != samples:
            raise InvariantError(f"a step that samples {samples} tokens was committed with {len(outcomes)}")
        self._planned = None
        self.table.settle()
        if timing is not None:
            self._preemption.account(plan, timing)
        by_chunk: Iterable[int | Candidates | None] = outcomes
        if samples < len(plan.chunks):
            made = iter(outcomes)
            by_chunk = [next(made) if chunk.samples else None for chunk in plan.chunks]
        deltas: list[TokenDelta] = []
        caching, size = self._prefix_caching, self._pool.block_size
        ended, appended = RequestState.FINISHED, 0
        for chunk, outcome in zip(plan.chunks, by_chunk, strict=True):
            request = chunk.request
            if request.state is ended:
                continue
            entry = chunk.entry
            assert entry is not None
            computed = request.computed = chunk.start + chunk.length
            if caching and computed >= (entry.findable + 1) * size:
                self._make_findable(entry)
            if isinstance(outcome, int):
                tokens = request.token_ids
                index = len(tokens) - entry.base
                if outcome in entry.ending or len(tokens) + 1 >= request.max_total_tokens:
                    deltas += self._count(self._append(entry, outcome, 0.0))
                    continue
                tokens.append(outcome)
                appended += 1
                cached, sequence = request.cached_tokens or 0, request.sequence
                deltas.append(TokenDelta(request.request_id, index, (outcome,), None, cached, None, sequence))
            elif outcome is not None:
                deltas += self._count(self._families.advance(entry, outcome))
        self._generated_tokens += appended
        self._maybe_check()
        return deltas

    def check(self) -> None:
        """Verify pools, index, tables and lists; O(blocks), for tests and debugging.

        Raises:
            InvariantError: says what is wrong.
        """
        self._pool.check([entry.request.block_table for entry in self.table.entries.values()])
        self._index.check()
        self.table.check()
        self._families.check()

    def _make_findable(self, entry: Entry) -> None:
        """Hand full blocks to the index: only now is their KV sure to be there."""
        request = entry.request
        full = request.computed // self._pool.block_size
        entry.node = self._index.extend(entry.root, entry.node, request.token_ids, request.block_table, full)
        entry.findable = full

    def _append(self, entry: Entry, token: int, logprob: float) -> list[TokenDelta]:
        """One token for one sequence, and what follows from it."""
        request = entry.request
        index = len(request.token_ids) - entry.base
        request.token_ids.append(token)
        request.logprob += logprob
        self._generated_tokens += 1
        reason = self._stop_reason(entry, token)
        if reason is not None:
            return self._finish(entry, reason, index, (token,))
        if request.params.ranked:
            return []
        cached, sequence = request.cached_tokens or 0, request.sequence
        return [TokenDelta(request.request_id, index, (token,), None, cached, None, sequence)]

    def _stop_reason(self, entry: Entry, token: int) -> FinishReason | None:
        request = entry.request
        if token in entry.ending and request.num_generated > request.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(request.token_ids) >= request.max_total_tokens else None

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> list[TokenDelta]:
        """End every sequence of a request."""
        if request_id in self._families:
            entries = self._families.members(request_id)
        else:
            entry = self.table.entries.get((request_id, 0))
            entries = [] if entry is None else [entry]
        return self._count([delta for entry in entries for delta in self._finish(entry, reason, error=error)])

    def _finish(
        self,
        entry: Entry,
        reason: FinishReason,
        index: int | None = None,
        tokens: tuple[int, ...] = (),
        error: str | None = None,
    ) -> list[TokenDelta]:
        request = entry.request
        if index is None:
            index = 0 if request.params.ranked else request.num_generated  # of ranked ones nothing was shown
        self._preemption.abandon(entry)
        self.table.finish(entry, reason)
        self._traffic.ended(request, reason)
        delta = TokenDelta(
            request.request_id, index, tokens, reason, request.cached_tokens or 0, error, request.sequence, True
        )
        return [delta] if request.family is None else self._families.finished(entry, delta)

    def _count(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._finished[delta.finish_reason] += 1
        return deltas

    def _maybe_check(self) -> None:
        if self._check_invariants:
            self.check()
