"""How many replicas the occupancy of their KV memory asks for: the usual ratio rule.

Occupancy ends at one, so it cannot say how much is missing, and it does not see a fleet that is out of compute
while its memory is nearly empty; ``kv_demand`` does both. This is for those who want the plain rule.
"""

from __future__ import annotations

import math

from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.scaling_state import ScalingState
from app.autoscaling.snapshot import Decision, Snapshot

_TOLERANCE = 0.1
"""A ratio this near to one leaves the number of replicas."""
_EXACT = 1e-6


def decide_by_occupancy(snapshot: Snapshot, config: ScalingConfig, state: ScalingState) -> Decision:
    """Decide how many replicas there should be: running ones x occupancy / ``occupancy_target``.

    Up at once; down by the largest answer of the scale-down window, a little at a time. Changes nothing but
    ``state``. O(replicas).
    """
    now, target, high = snapshot.now, snapshot.target, snapshot.most
    unknown = state.hold_or_start(snapshot, config)
    if unknown is not None:
        return unknown
    stats = snapshot.replicas.values()
    used = sum(one.referenced_blocks for one in stats)
    occupancy = min(used / max(sum(one.num_blocks for one in stats), 1.0), 1.0)
    state.worked(now, used > 0 or any(one.sequences for one in stats) or snapshot.queued > 0)

    ratio = occupancy / config.occupancy_target
    need = snapshot.running * ratio
    answer = snapshot.running if abs(ratio - 1.0) <= _TOLERANCE else math.ceil(need - _EXACT)
    state.add_low(now, answer, state.window_s(config))

    def decision(count: int, reason: str, held_by: str = "", intended: int = 0) -> Decision:
        return Decision(count, reason, need, held_by=held_by, demand=occupancy, intended=intended)

    if not snapshot.minimum <= target <= high:
        return decision(min(max(target, snapshot.minimum), high), "maximum" if target > high else "minimum")
    if answer > target:
        if target == high:
            return decision(target, "hold", "maximum")
        count = min(answer, high)
        state.started_up(now, count)
        return decision(count, "occupancy")

    # Serve goes to zero from one only, too.
    floor = 1 if target > 1 else 0
    fewer = max(math.ceil(state.lows[0][1]), state.floor(snapshot, config), floor)
    at_once = config.most_stopped(target)
    held = ""
    if fewer < target:
        held = state.unsettled(snapshot, config)
        if not held and not state.window_full(now, config):
            held = "window not full"
        if not held and now - state.last_down < config.down_interval_s:
            held = "scaled down lately"
    if fewer >= target or held:
        return decision(target, "hold", held, state.intended(snapshot, config, max(answer, floor), at_once))
    count = max(fewer, target - at_once)
    state.lowered(now, config)
    return decision(count, "less needed", intended=0 if config.shadow else target - count)
