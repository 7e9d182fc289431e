"""What an engine replica reports to the scaling policy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from app.autoscaling.snapshot import ReplicaStats
from engine.scheduling.load_report import EngineLoad
from engine.stats import EngineStats

STEP_AVERAGE_S = 2.0
"""Time over which decode steps are averaged: one slow step is no slow replica."""

_NODE_DIGITS = 12  # hexadecimal ones, which a float holds exactly


class StatsReporter:
    """Belongs to one replica. ``read`` is O(1); each of its figures is a finite float."""

    def __init__(
        self,
        node_id: str,
        on_head: bool,
        started_at: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``node_id`` is Ray's, hexadecimal; ``started_at`` in seconds since the epoch, now if not given."""
        self._node = float(int(node_id[:_NODE_DIGITS], 16))
        self._on_head = float(on_head)
        self._started_at = time.time() if started_at is None else started_at
        self._clock = clock
        self._step_seconds = 0.0
        self._read_at = -math.inf

    def read(self, stats: EngineStats, load: EngineLoad) -> ReplicaStats:
        """What the engine's last turn left."""
        scheduler, size = stats.scheduler, stats.block_size
        # Swapped-out KV lies on the host: all of it comes back, beside what is to be computed. Each one that
        # waits needs a block of its own, however little of it.
        waiting = max(math.ceil(load.waiting_tokens / size), load.waiting) + scheduler.host_blocks_used
        room = max(scheduler.running_limit - load.kv_tokens, 0)
        growth = min(load.running * scheduler.remaining_output, float(room)) / size
        return ReplicaStats(
            num_blocks=float(stats.num_blocks),
            referenced_blocks=float(load.referenced),
            waiting_blocks=float(waiting),
            growth_blocks=growth,
            sequences=float(load.running + load.waiting),
            backlog_tokens=float(load.waiting_tokens),
            arrived_tokens=scheduler.arrived_tokens,
            prefill_rate=load.prefill_rate,
            step_seconds=self._average_step(load),
            preemptions=float(scheduler.preemptions),
            started_at=self._started_at,
            node=self._node,
            on_head=self._on_head,
            max_running=float(load.max_running),
        )

    def _average_step(self, load: EngineLoad) -> float:
        """Of those steps that only decoded; 0 while nothing runs, since the last one says nothing of now."""
        now = self._clock()
        past, self._read_at = now - self._read_at, now
        if not load.running or not load.step_seconds:
            self._step_seconds = 0.0
        elif not self._step_seconds:
            self._step_seconds = load.step_seconds
        else:
            kept = math.exp(-max(past, 0.0) / STEP_AVERAGE_S)
            self._step_seconds = kept * self._step_seconds + (1.0 - kept) * load.step_seconds
        return self._step_seconds
