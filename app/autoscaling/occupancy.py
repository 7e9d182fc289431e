"""The usual ratio rule: how many replicas the occupancy of their KV memory calls for.

Occupancy cannot exceed one, so it does not show how much is missing, and it does not show that a fleet is out
of compute while its memory is nearly empty; ``kv_demand`` shows both. This rule is for comparison.
"""

from __future__ import annotations

import math

from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.scaling_state import ScalingState
from app.autoscaling.snapshot import ScalingDecision, Snapshot

_TOLERANCE = 0.1
"""A ratio this near to one leaves the number of replicas."""
_EXACT = 1e-6


def decide_by_occupancy(snapshot: Snapshot, config: ScalingConfig, state: ScalingState) -> ScalingDecision:
    """Decide how many replicas there should be: running ones x occupancy / ``occupancy_target``.

    Up at once; down by the largest answer of the scale-down window, a little at a time. Changes nothing but
    ``state``. O(replicas).
    """
    unknown = state.hold_or_start(snapshot, config)
    if unknown is not None:
        return unknown
    now, stats = snapshot.now, snapshot.replicas.values()
    used = sum(replica.referenced_blocks for replica in stats)
    occupancy = min(used / max(sum(replica.num_blocks for replica in stats), 1.0), 1.0)
    state.worked(now, used > 0 or any(replica.sequences for replica in stats) or snapshot.queued > 0)

    ratio = occupancy / config.occupancy_target
    need = snapshot.running * ratio
    answer = snapshot.running if abs(ratio - 1.0) <= _TOLERANCE else math.ceil(need - _EXACT)
    state.add_low(now, answer, state.window_s(config))
    proposed = ScalingDecision(answer, "occupancy", need, demand=occupancy)
    return state.settle(snapshot, config, proposed, state.largest_need())
