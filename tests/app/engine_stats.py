"""Figures of an engine, all different."""

from __future__ import annotations

from app.autoscaling.snapshot import ReplicaStats
from engine.request import FinishReason
from engine.scheduling.latency_stats import LatencyStats
from engine.scheduling.recovery import Rates, Recovery, RecoveryStats
from engine.scheduling.scheduler_stats import SchedulerStats
from engine.stats import EngineStats

RECOVERY = RecoveryStats(
    decisions={Recovery.SWAP: 5, Recovery.RECOMPUTE: 2},
    finished={Recovery.SWAP: 4, Recovery.RECOMPUTE: 1},
    abandoned=1,
    fallbacks=3,
    trials=0,
    estimates={Recovery.SWAP: 0.5, Recovery.RECOMPUTE: 0.25},
    outcomes={Recovery.SWAP: 0.75, Recovery.RECOMPUTE: 0.125},
    median_ratio={Recovery.SWAP: None, Recovery.RECOMPUTE: None},
    median_error={Recovery.SWAP: None, Recovery.RECOMPUTE: None},
    rates=Rates(),
    survival=0.5,
)
SCHEDULER = SchedulerStats(
    referenced_blocks=30,
    cached_blocks=20,
    free_blocks=50,
    shared_blocks=10,
    running=7,
    waiting=6,
    preempted=5,
    swapped=4,
    prompt_tokens=100,
    generated_tokens=90,
    prefix_query_tokens=80,
    prefix_hit_tokens=70,
    preemptions=8,
    host_blocks=16,
    host_blocks_used=9,
    copied_blocks=11,
    recovery=RECOVERY,
    finished={FinishReason.STOP: 12},
    latency=LatencyStats(lambda: 0.0),
)
STATS = EngineStats(
    scheduler=SCHEDULER,
    num_blocks=100,
    block_size=16,
    token_budget=256,
    prefill_rate=0.0,
    steps=1,
    step_seconds=0.125,
)
SCALING = ReplicaStats(
    num_blocks=100.0,
    referenced_blocks=30.0,
    waiting_blocks=12.0,
    growth_blocks=8.0,
    sequences=22.0,
    backlog_tokens=0.0,
    arrived_tokens=0.0,
    prefill_rate=0.0,
    step_seconds=0.125,
    preemptions=8.0,
)
