"""Figures of a running engine."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.scheduler_stats import SchedulerStats


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot between two steps."""

    scheduler: SchedulerStats
    num_blocks: int
    block_size: int
    token_budget: int  # tokens per step
    prefill_rate: float  # tokens per second, measured at start; 0 if not measured
    steps: int  # steps run since start
    step_seconds: float  # duration of the last step
    failed_steps: int = 0  # that were run again in parts
    grammar_faults: int = 0  # forms that could not be tried, for no fault of their own
