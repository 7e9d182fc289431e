"""A replica's report, for tests of scaling."""

from __future__ import annotations

from app.autoscaling.snapshot import ReplicaStats

BLOCKS = 1_000.0
RATE = 10_000.0


def stats(referenced: float = 0.0, **more: float) -> ReplicaStats:
    values = dict.fromkeys(ReplicaStats._fields, 0.0)
    values.update(num_blocks=BLOCKS, prefill_rate=RATE, step_seconds=0.01, referenced_blocks=referenced)
    values["sequences"] = max(referenced / 50.0, 1.0) if referenced else 0.0
    values.update(more)
    return ReplicaStats(**values)
