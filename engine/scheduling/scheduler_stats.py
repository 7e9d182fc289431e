"""The scheduler's figures: gauges of now, and totals since the start."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import FinishReason
from engine.scheduling.latency_stats import LatencyStats
from engine.scheduling.recovery import RecoveryStats


@dataclass(slots=True)  # not frozen: one is made in each step, and that would cost four times as much
class SchedulerStats:
    """Gauges of now and totals since the start; blocks and tokens. Treat as frozen."""

    referenced_blocks: int
    cached_blocks: int
    free_blocks: int
    shared_blocks: int  # of the referenced ones, those that are held more than once
    running: int
    waiting: int  # never admitted yet
    preempted: int  # admitted before, waiting to recompute their KV
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
    latency: LatencyStats  # goes on counting
    arrived_tokens: float = (
        0.0  # of all prompts so far, without the tokens that prefix reuse is expected to save
    )
    remaining_output: float = 0.0  # tokens that a running sequence is expected to generate yet
    running_limit: int = 0  # tokens that the running sequences may reach together
    drafted_tokens: int = 0  # guesses that were run as further rows
    accepted_tokens: int = 0  # of those, that were right
