"""Owns the live requests: takes them in, plans each step, accounts for it, lets them go."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from engine.block_pool import BlockPool, InvariantError
from engine.errors import ConfigError, InvalidRequestError
from engine.prefix_index import PrefixIndex
from engine.recovery import RecoveryPolicy
from engine.request import FinishReason, ModelLimits, Request, RequestState, TokenDelta, validate
from engine.request_table import Entry, RequestTable
from engine.step_plan import ScheduledChunk, SchedulerStats, StepPlan
from engine.step_planner import StepPlanner

__all__ = ["ScheduledChunk", "Scheduler", "SchedulerStats", "StepPlan"]


class Scheduler:
    """Decides who runs, with which tokens and which blocks; one thread uses it.

    A step is ``plan = schedule()``, running it, then ``commit(plan, tokens)``. There is no prefill or decode
    phase: each request has ``computed`` tokens and a step brings it nearer to the end of ``token_ids``.

    Promises, within one priority and with order meaning ``Request.order``:

    - a request that fits the pool alone ends; what can never fit is refused by :meth:`add`;
    - blocks are taken from the last running request in order, so the first is never preempted;
    - while preempted requests wait, those behind them take only blocks that they do not need;
    - a waiting request that does not fit is overtaken at most ``max_overtakes`` times.

    Args:
        max_num_seqs: most running requests; never above ``token_budget``, so that each can decode in each step.
        token_budget: most tokens in one step.
        model_key: what KV depends on in the model (revision, dtype); part of the root of its prefix trees.
        look_ahead: waiting requests that do not fit and are passed over in one step.
        max_overtakes: admissions past a waiting request after which nothing passes it.
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
        self._pool = pool
        self._index = index
        self._table = RequestTable(pool)
        self._planner = StepPlanner(
            pool,
            index,
            self._table,
            recovery,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            prefix_caching=prefix_caching,
            look_ahead=look_ahead,
            max_overtakes=max_overtakes,
        )
        self._prefix_caching = prefix_caching
        self._eos = frozenset(eos_token_ids)
        self._model_key = model_key
        self._limits = limits
        self._clock = clock
        self._check_invariants = check_invariants
        self._prompt_tokens = self._generated_tokens = 0
        self._query_tokens = self._hit_tokens = 0
        self._finished = dict.fromkeys(FinishReason, 0)

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
        check_invariants: bool = False,
    ) -> Scheduler:
        """Make a scheduler with a pool and an index of its own."""
        pool = BlockPool(num_blocks, block_size)
        return cls(
            pool,
            PrefixIndex(pool),
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            prefix_caching=prefix_caching,
            eos_token_ids=eos_token_ids,
            model_key=model_key,
            limits=limits,
            recovery=recovery,
            check_invariants=check_invariants,
        )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never run, or its id is in use.
        """
        if request.request_id in self._table.entries:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use by a request that has not ended",
                "request_id",
                "duplicate_id",
            )
        total = validate(request.token_ids, request.params, self._limits, request.generated_before)
        if len(request.token_ids) >= total:
            raise InvalidRequestError(
                f"the request has {len(request.token_ids)} tokens, {request.generated_before} of them "
                f"generated before, and may reach {total}: none is left to generate",
                "max_tokens",
            )
        request.max_total_tokens = total
        request.arrival = request.arrival or self._clock()
        namespace = request.namespace
        # Parts at fixed places: an adapter's name can never pass for a salt.
        root = (self._model_key, self._pool.block_size, namespace.adapter, namespace.salt)
        self._table.queue(Entry(request, root, request.order))

    def abort(self, request_id: str) -> TokenDelta | None:
        """End a request in any state; ``None`` when there is no such request."""
        entry = self._table.entries.get(request_id)
        if entry is None:
            return None
        delta = self._finish(entry, FinishReason.ABORT)
        self._maybe_check()
        return delta

    def fail(self, request_ids: Iterable[str], message: str) -> list[TokenDelta]:
        """End requests whose step raised and was not committed: nothing that it wrote can be found.

        The others of that plan may be committed with it (samples of ended ones are dropped) or planned anew.
        """
        entries = [
            self._table.entries[name] for name in dict.fromkeys(request_ids) if name in self._table.entries
        ]
        deltas = [self._finish(entry, FinishReason.ERROR, error=message) for entry in entries]
        self._maybe_check()
        return deltas

    def has_work(self) -> bool:
        """Whether any request has not ended; then :meth:`schedule` plans at least one chunk."""
        return bool(self._table.entries)

    def stats(self) -> SchedulerStats:
        """Return a snapshot; O(1)."""
        pool, table = self._pool, self._table
        return SchedulerStats(
            referenced_blocks=pool.num_referenced,
            cached_blocks=pool.num_cached,
            free_blocks=pool.num_free,
            running=len(table.running),
            waiting=len(table.waiting) - table.num_preempted,
            preempted=table.num_preempted,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            prefix_query_tokens=self._query_tokens,
            prefix_hit_tokens=self._hit_tokens,
            preemptions=self._planner.num_preemptions,
            finished=dict(self._finished),
        )

    def schedule(self) -> StepPlan:
        """Plan the next step; work that is planned but not committed is planned again."""
        plan = self._planner.plan()
        for request in plan.admitted:
            self._prompt_tokens += request.num_prompt_tokens
            if self._prefix_caching:
                self._query_tokens += request.num_prompt_tokens
                self._hit_tokens += request.cached_tokens or 0
        self._maybe_check()
        return plan

    def commit(self, plan: StepPlan, tokens: Sequence[int]) -> list[TokenDelta]:
        """Account for a step that ran; ``tokens`` are its samples, in the order of the chunks that sample.

        Tokens of requests that ended since :meth:`schedule` are dropped.

        Raises:
            InvariantError: plan and tokens do not belong together, or the plan is stale.
        """
        expected = sum(chunk.samples for chunk in plan.chunks)
        if len(tokens) != expected:
            raise InvariantError(f"a step that samples {expected} tokens was committed with {len(tokens)}")
        samples = iter(tokens)
        deltas = []
        for chunk in plan.chunks:
            request = chunk.request
            token = next(samples) if chunk.samples else None
            entry = self._table.entries.get(request.request_id)
            if entry is None or entry.request is not request:
                continue
            if request.computed != chunk.start or request.state is not RequestState.RUNNING:
                raise InvariantError(f"the plan for request {request.request_id!r} is stale")
            request.computed += chunk.length
            self._make_findable(entry)
            if token is not None:
                deltas.append(self._append(entry, token))
        self._maybe_check()
        return deltas

    def check(self) -> None:
        """Verify pool, index, tables and lists; O(blocks), for tests and debugging.

        Raises:
            InvariantError: says what is wrong.
        """
        self._pool.check([entry.request.block_table for entry in self._table.entries.values()])
        self._index.check()
        self._table.check()

    def _make_findable(self, entry: Entry) -> None:
        """Hand full blocks to the index: only now is their KV sure to be there."""
        request = entry.request
        full = request.computed // self._pool.block_size
        if self._prefix_caching and full > entry.findable:
            entry.node = self._index.extend(
                entry.root, entry.node, request.token_ids, request.block_table, full
            )
            entry.findable = full

    def _append(self, entry: Entry, token: int) -> TokenDelta:
        request = entry.request
        index = request.num_generated
        request.token_ids.append(token)
        self._generated_tokens += 1
        reason = self._stop_reason(request, token)
        if reason is not None:
            return self._finish(entry, reason, index, (token,))
        return TokenDelta(request.request_id, index, (token,), cached_tokens=request.cached_tokens or 0)

    def _stop_reason(self, request: Request, token: int) -> FinishReason | None:
        params = request.params
        generated = request.num_generated
        ends = token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)
        if ends and generated > params.min_tokens:
            return FinishReason.STOP
        if generated == params.max_tokens or len(request.token_ids) >= request.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def _finish(
        self,
        entry: Entry,
        reason: FinishReason,
        index: int | None = None,
        tokens: tuple[int, ...] = (),
        error: str | None = None,
    ) -> TokenDelta:
        request = entry.request
        if index is None:
            index = request.num_generated
        self._table.finish(entry, reason)
        self._finished[reason] += 1
        return TokenDelta(request.request_id, index, tokens, reason, request.cached_tokens or 0, error)

    def _maybe_check(self) -> None:
        if self._check_invariants:
            self.check()
