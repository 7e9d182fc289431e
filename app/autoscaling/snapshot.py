"""What is known about a fleet at one moment, and what was decided from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class ReplicaStats(NamedTuple):
    """What one engine replica reports; every field is finite and not negative."""

    num_blocks: float
    referenced_blocks: float
    waiting_blocks: float  # that waiting and preempted sequences still lack, beyond their prefix hits
    growth_blocks: float  # that running sequences are expected to grow by
    sequences: float  # running and waiting
    backlog_tokens: float  # uncached prompt tokens of waiting and running sequences
    arrived_tokens: float  # such tokens of all that ever came; only grows
    prefill_rate: float  # tokens per second, calibrated
    step_seconds: float  # of a decode step
    preemptions: float  # since the start; only grows
    started_at: float = 0.0  # seconds since the epoch; 0 if not known
    node: float = 0.0  # a number below 2**48 that stands for its node; 0 if not known
    on_head: float = 0.0  # 1 on Ray's head node
    max_running: float = 0.0  # sequences at once; 0 if not known


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known at ``now``. ``replicas`` has the fresh reports of running replicas, by their ids."""

    now: float
    target: int
    running: int
    minimum: int
    maximum: int
    replicas: Mapping[Any, ReplicaStats]
    queued: float = 0.0  # requests at the ingresses; with no replica, Serve starts one before it asks

    @property
    def limit(self) -> int:
        """The maximum number of replicas; the minimum if the two contradict each other."""
        return max(self.minimum, self.maximum)


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """The new target, the needs behind it in replicas, and what held it back.

    A rule proposes one, too, before bounds and guards are applied: see ``ScalingState.settle``.
    """

    target: int
    reason: str
    need_kv: float = 0.0
    need_prefill: float = 0.0
    need_decode: float = 0.0
    held_by: str = ""
    demand: float = 0.0  # share of the running replicas' pools; can exceed 1
    intended: int = 0  # replicas fewer than the target are intended, or stopped by this decision


def figure(value: Any) -> float | None:
    """The value as a float; None if it is no finite number or negative."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
