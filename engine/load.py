"""How busy an engine is, for whoever routes requests to it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.prefix_index import PrefixIndex
from engine.request import Request
from engine.request_table import Entry, RequestTable
from engine.step_plan import StepPlan

LOOKED_UP = 16
"""Waiting sequences whose prefixes are looked up again for each report."""

COUNTED_EACH_TIME = 64
"""Longer queues are counted only now and then; in between, what comes is added and what starts taken away."""

COUNT_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Work and blocks of one engine as of the end of a step."""

    waiting_tokens: int  # to be computed: of waiting sequences beyond their hits, and of running prefills
    running: int  # sequences
    kv_tokens: int  # that the running ones read in each step
    referenced: int  # blocks
    free: int
    evictable: int
    prefill_rate: float  # tokens per second, measured at start; 0 if it was not
    step_seconds: float  # of the last step that only decoded; 0 before the first
    waiting: int  # sequences that do not run: never did, or were preempted
    held_up: int  # of those, that had no seat or no blocks in the last step
    max_running: int  # sequences at once


class LoadMeter:
    """Reads the scheduler's tables; belongs to the engine's thread.

    What waits is counted beyond the prefix that was found when it was last looked up: when it came, when its
    admission was tried, and now and then while it waits, because others may have computed its prefix since.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        table: RequestTable,
        *,
        prefix_caching: bool,
        prefill_rate: float,
        max_running: int,
    ) -> None:
        self._pool = pool
        self._index = index
        self._table = table
        self._prefix_caching = prefix_caching
        self._prefill_rate = prefill_rate
        self._max_running = max_running
        self._held_up = 0
        self._step_seconds = 0.0
        self._waiting_tokens = 0
        self._counted_at = float("-inf")
        self._next = 0  # place in the waiting list of the next sequence to look up

    def added(self, request: Request) -> None:
        """A request waits: look its prefix up, so that no report takes it for longer than it is."""
        entry = self._table.entries.get(request.key)
        if entry is not None:
            self._look_up(entry)
            self._waiting_tokens += self._missing(entry)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """A step has been run."""
        for request in plan.admitted:
            self._waiting_tokens -= request.num_prompt_tokens - (request.cached_tokens or 0)
        self._held_up = plan.held_up
        if not plan.prefill and not plan.transfers:
            self._step_seconds = seconds

    def read(self) -> EngineLoad:
        """The load now; a tenth of a microsecond for each running sequence."""
        table = self._table
        left = kv = 0
        for entry in table.running:
            request = entry.request
            computed = request.computed
            kv += computed
            missing = len(request.token_ids) - computed
            if missing > 1:
                left += missing
        self._count_waiting()
        return EngineLoad(
            waiting_tokens=left + self._waiting_tokens,
            running=len(table.running),
            kv_tokens=kv,
            referenced=self._pool.num_referenced,
            free=self._pool.num_free,
            evictable=self._pool.num_cached,
            prefill_rate=self._prefill_rate,
            step_seconds=self._step_seconds,
            waiting=len(table.waiting),
            held_up=min(self._held_up, len(table.waiting)),
            max_running=self._max_running,
        )

    def _count_waiting(self) -> None:
        waiting = self._table.waiting
        if not waiting:
            self._waiting_tokens = 0
            return
        for _ in range(min(LOOKED_UP, len(waiting))):
            self._next = self._next + 1 if self._next + 1 < len(waiting) else 0
            self._look_up(waiting[self._next])
        now = time.monotonic()
        if len(waiting) <= COUNTED_EACH_TIME or now - self._counted_at >= COUNT_EVERY_S:
            self._counted_at = now
            self._waiting_tokens = sum(map(self._missing, waiting))
        self._waiting_tokens = max(self._waiting_tokens, 0)

    def _missing(self, entry: Entry) -> int:
        """Tokens that a waiting sequence will have to compute."""
        request = entry.request
        if entry.host_table:
            return len(request.token_ids) - request.computed
        node = entry.node
        found = node.depth if node is not None and node.alive else 0
        return len(request.token_ids) - found * self._pool.block_size

    def _look_up(self, entry: Entry) -> None:
        if self._prefix_caching and not entry.host_table:
            tokens = entry.request.token_ids
            entry.node = self._index.match(entry.root, tokens, len(tokens) - 1, entry.node)
