"""The scheduler's figures: gauges of now, and totals since the start."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import FinishReason
from engine.scheduling.recovery import RecoveryStats


@dataclass(slots=True)  # not frozen: one is made in each step, and that would cost four times as much
class SchedulerStats:
    """Gauges of now and totals since the start; blocks and tokens. Nobody changes it."""

    referenced_blocks: int
    cached_blocks: int
    free_blocks: int
    running: int
    waiting: int  # never admitted yet
    preempted: int  # admitted before, waiting to compute their KV again
    swapped: int  # admitted before, waiting with their KV in host blocks
    prompt_tokens: int  # of admitted requests
    generated_tokens: int
    prefix_query_tokens: int  # prompt tokens looked up at first admission
    prefix_hit_tokens: int  # of those, found
    preemptions: int
    host_blocks: int
    host_blocks_used: int
    copied_blocks: int  # by copy-on-write
    recovery: RecoveryStats
    finished: dict[FinishReason, int]  # sequences
    arrived_tokens: float = 0.0  # of prompts that ever came, without what their prefixes are expected to spare
    remaining_output: float = 0.0  # tokens that a running sequence is expected to get still
    running_limit: int = 0  # tokens that the running sequences may come to together
