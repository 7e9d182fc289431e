"""The figures of one engine replica."""

from __future__ import annotations

import math
from collections.abc import Mapping

from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.snapshot import ReplicaStats
from app.metrics.samples import Samples
from engine.scheduling.recovery import Recovery
from engine.stats import EngineStats

_GROWTH_SHARE = ScalingConfig().growth_share


def engine_samples(
    stats: EngineStats, scaling: ReplicaStats, lost_leases: int, free_disk: float = math.inf
) -> Samples:
    """Every metric of the table that an engine counts; ``free_disk`` is in bytes."""
    scheduler, recovery = stats.scheduler, stats.scheduler.recovery
    demand = scaling.referenced_blocks + scaling.waiting_blocks + _GROWTH_SHARE * scaling.growth_blocks
    single: dict[str, float] = {
        "kv_shared_blocks": scheduler.shared_blocks,
        "kv_demand_blocks": demand,
        "kv_occupancy": scheduler.referenced_blocks / stats.num_blocks,
        "copied_blocks": scheduler.copied_blocks,
        "prefix_query_tokens": scheduler.prefix_query_tokens,
        "prefix_hit_tokens": scheduler.prefix_hit_tokens,
        "step_seconds": stats.step_seconds,
        "prefill_rate": stats.prefill_rate,
        "steps": stats.steps,
        "prompt_tokens": scheduler.prompt_tokens,
        "generated_tokens": scheduler.generated_tokens,
        "drafted_tokens": scheduler.drafted_tokens,
        "accepted_tokens": scheduler.accepted_tokens,
        "preemptions": scheduler.preemptions,
        "recovery_fallbacks": recovery.fallbacks,
        "lost_leases": lost_leases,
        "free_disk_bytes": free_disk,
        "failed_steps": stats.failed_steps,
        "grammar_faults": stats.grammar_faults,
    }
    by_recovery: dict[str, Mapping[Recovery, float]] = {
        "recovery_decisions": recovery.decisions,
        "recoveries": recovery.finished,
        "recovery_estimated_seconds": recovery.estimates,
        "recovery_seconds": recovery.outcomes,
    }
    latency = scheduler.latency
    return {
        **{name: {(): value} for name, value in single.items()},
        **{name: {(kind.value,): n for kind, n in found.items()} for name, found in by_recovery.items()},
        "kv_blocks": {
            ("referenced",): scheduler.referenced_blocks,
            ("cached",): scheduler.cached_blocks,
            ("free",): scheduler.free_blocks,
        },
        "host_blocks": {
            ("used",): scheduler.host_blocks_used,
            ("free",): scheduler.host_blocks - scheduler.host_blocks_used,
        },
        "requests": {
            ("running",): scheduler.running,
            ("waiting",): scheduler.waiting,
            ("preempted",): scheduler.preempted,
            ("swapped",): scheduler.swapped,
        },
        "finished_requests": {(reason.value,): count for reason, count in scheduler.finished.items()},
        "queue_seconds": {(): latency.queue.totals},
        "prefill_seconds": {(): latency.prefill.totals},
        "decode_seconds": {(): latency.decode.totals},
    }
