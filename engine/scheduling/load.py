"""How busy an engine is, for whoever routes requests to it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_index import PrefixIndex
from engine.scheduling.backlog import Backlog
from engine.scheduling.request_table import RequestTable
from engine.scheduling.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Work and blocks of one engine as of the end of a step."""

    waiting_tokens: int  # to be computed before all that is here decodes; shared blocks count once
    running: int  # sequences
    kv_tokens: int  # that the running ones read in each step
    referenced: int  # blocks
    free: int
    evictable: int
    prefill_rate: float  # tokens per second, measured at start; 0 if it was not
    step_seconds: float  # of the last step that only decoded; 0 before the first
    waiting: int  # sequences that do not run: never did, or were preempted
    held_up: int  # of those, behind which whoever comes has to stay, for want of seats or blocks
    max_running: int  # sequences at once


class LoadMeter:
    """Reads the scheduler's tables after each step; belongs to the engine's thread."""

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
        self._table = table
        self._backlog = Backlog(table, index, pool.block_size, prefix_caching)
        self._prefill_rate = prefill_rate
        self._max_running = max_running
        self._step_seconds = 0.0
        self._held_up = 0

    def stepped(self, plan: StepPlan, seconds: float) -> None:
        """A step has been run."""
        self._held_up = plan.held_up
        if not plan.prefill and not plan.transfers:
            self._step_seconds = seconds

    def read(self) -> EngineLoad:
        """The load now; 50 ns for each running sequence, and what the backlog costs."""
        table, pool = self._table, self._pool
        return EngineLoad(
            waiting_tokens=self._backlog.tokens(),
            running=len(table.running),
            kv_tokens=sum([entry.request.computed for entry in table.running]),
            referenced=pool.num_referenced,
            free=pool.num_free,
            evictable=pool.num_cached,
            prefill_rate=self._prefill_rate,
            step_seconds=self._step_seconds,
            waiting=len(table.waiting),
            held_up=min(self._held_up, len(table.waiting)),
            max_running=self._max_running,
        )
