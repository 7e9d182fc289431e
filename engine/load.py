"""How busy an engine is, for whoever routes requests to it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.prefix_index import PrefixIndex
from engine.request import Request
from engine.request_table import Entry, RequestTable
from engine.step_plan import StepPlan

LOOKED_UP = 32
"""Waiting sequences whose prefixes are looked up again for each report."""


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
        prefix_caching: bool,
        prefill_rate: float,
    ) -> None:
        self._pool = pool
        self._index = index
        self._table = table
        self._prefix_caching = prefix_caching
        self._prefill_rate = prefill_rate
        self._step_seconds = 0.0
        self._next = 0  # place in the waiting list of the next sequence to look up

    def added(self, request: Request) -> None:
        """A request waits: look its prefix up, so that no report takes it for longer than it is."""
        entry = self._table.entries.get(request.key)
        if entry is not None and self._prefix_caching:
            self._match(entry)

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """A step has been run."""
        if not plan.prefill and not plan.transfers:
            self._step_seconds = seconds

    def read(self) -> EngineLoad:
        """The load now; O(running and waiting sequences), some tens of nanoseconds each."""
        table, size = self._table, self._pool.block_size
        self._look_up()
        waiting = kv = 0
        for entry in table.running:
            request = entry.request
            computed = request.computed
            kv += computed
            left = len(request.token_ids) - computed
            if left > 1:
                waiting += left
        for entry in table.waiting:
            request = entry.request
            node = entry.node
            waiting += len(request.token_ids)
            if entry.host_table:
                waiting -= request.computed
            elif node is not None and node.alive:
                waiting -= node.depth * size
        return EngineLoad(
            waiting_tokens=waiting,
            running=len(table.running),
            kv_tokens=kv,
            referenced=self._pool.num_referenced,
            free=self._pool.num_free,
            evictable=self._pool.num_cached,
            prefill_rate=self._prefill_rate,
            step_seconds=self._step_seconds,
        )

    def _look_up(self) -> None:
        """Find the prefixes of some waiting sequences again, of each in its turn."""
        waiting = self._table.waiting
        if not self._prefix_caching or not waiting:
            return
        for _ in range(min(LOOKED_UP, len(waiting))):
            if self._next >= len(waiting):
                self._next = 0
            self._match(waiting[self._next])
            self._next += 1

    def _match(self, entry: Entry) -> None:
        if not entry.host_table:
            tokens = entry.request.token_ids
            entry.node = self._index.match(entry.root, tokens, len(tokens) - 1, entry.node)
