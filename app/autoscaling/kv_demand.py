"""How many replicas KV demand needs.

Demand is counted in KV blocks: those referenced, those that waiting and preempted sequences still lack, and a
share of what the running ones will grow by. It can exceed the pool, so unlike occupancy it does not saturate.
Two rates guard what a stock of blocks cannot see: uncached prompt tokens against what the fleet prefills, and
the time of a decode step against its target. The largest need wins. Up at once, counted against the target and
not against what runs already; down by the largest need of a window, a little at a time.
"""

from __future__ import annotations

import math
from typing import Any

from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.scaling_state import ROUNDING, ScalingState
from app.autoscaling.snapshot import Decision, Snapshot

__all__ = ["ScalingState", "decide"]

_HEAVY_TAIL = 2.0
"""Variance of requests' sizes: the mean of squares over the square of the mean."""
_MOST = 1e6
"""Replicas; beyond it a figure is an error."""


def decide(snapshot: Snapshot, config: ScalingConfig, state: ScalingState) -> Decision:
    """Decide how many replicas there should be; changes nothing but ``state``. O(replicas)."""
    now, target = snapshot.now, snapshot.target
    low, high = snapshot.minimum, snapshot.most
    unknown = state.hold_or_start(snapshot, config)
    if unknown is not None:
        return unknown

    stats = snapshot.replicas.values()
    demand, growth, pool, sequences, backlog, largest, rate, slowest, step, seats = _sums(stats, config)
    # Replicas without a report are taken to be like the others.
    reporting = len(stats)
    scale = snapshot.running / reporting
    demand, sequences = demand * scale, sequences * scale
    size = pool / reporting
    each = (demand + growth * scale) / max(sequences, 1.0)
    demand += growth * scale * config.growth_share + snapshot.queued * each
    arrived = _arrived(snapshot, state, now) * scale
    per_second = _rate_of_arrivals(state, config, now, arrived)
    start = state.startup_s(config)
    forecast = _forecast(state, config, now, demand, each, size, start)

    capacity = rate / reporting
    # Without the largest: one long prompt keeps one replica busy however many there are.
    shared = (backlog - largest) / (reporting - 1) if reporting > 1 else backlog
    seconds = _over(shared, capacity)
    need_kv = _over(forecast, size * config.kv_high)
    # Short sequences run out of seats before they run out of blocks.
    seated = sequences + snapshot.queued
    need_kv = max(need_kv, _over(seated * max(_over(forecast, demand), 1.0), seats * config.kv_high))
    need_prefill = _over(per_second, capacity * config.prefill_high)
    if seconds > 0.125 * config.ttft_target_s:
        need_prefill = max(need_prefill, snapshot.running * min(2.0, seconds / (0.25 * config.ttft_target_s)))
    need_decode = 0.0
    if step > 0.9 * config.tpot_target_s:
        need_decode = snapshot.running * _over(step, 0.9 * config.tpot_target_s)
    need = max(need_kv, need_prefill, need_decode)
    # Between two reports short requests come and go.
    busy = demand > 0 or backlog > 0 or snapshot.queued > 0 or arrived > 0
    state.worked(now, busy)
    reserve = config.reserve if busy or low else 0.0

    lowest = max(
        _over(demand, size * config.kv_low),
        _over(seated, seats * config.kv_low),
        _over(per_second, capacity * config.prefill_low),
    )
    state.add_low(now, max(lowest + reserve, need_decode), config.down_window_s)

    filled = _over(demand, size * snapshot.running)

    def decision(count: int, reason: str, held_by: str = "", intended: int = 0) -> Decision:
        return Decision(count, reason, need_kv, need_prefill, need_decode, held_by, filled, intended)

    if not low <= target <= high:
        return decision(min(max(target, low), high), "maximum" if target > high else "minimum")
    wanted = math.ceil(need + reserve - ROUNDING)
    if wanted > target:
        count = min(wanted, max(2 * target, target + 4), high)
        if count == target:
            return decision(target, "hold", "maximum")
        state.started_up(now, count)
        return decision(count, _largest(need_kv, need_prefill, need_decode))

    at_once = config.most_stopped(target)
    fewer = max(math.ceil(state.lows[0][1] - ROUNDING), state.floor(snapshot, config))
    if fewer >= target:
        return decision(target, "hold", intended=state.intended(snapshot, config, wanted, at_once))
    held = _held(snapshot, config, state, start, slowest)
    if held:
        return decision(target, "hold", held, state.intended(snapshot, config, wanted, at_once))
    count = max(fewer, target - at_once)
    state.lowered(now, config)
    return decision(count, "less needed", intended=0 if config.shadow else target - count)


def _over(amount: float, unit: float) -> float:
    """How many units an amount is; none of a unit that is not known, and never more than a fleet can be."""
    return min(amount / unit, _MOST) if unit > 1e-6 else 0.0


def _sums(
    stats: Any, config: ScalingConfig
) -> tuple[float, float, float, float, float, float, float, float, float, float]:
    demand = growth = pool = sequences = backlog = largest = rate = slowest = steps = seats = 0.0
    seating = 0
    for one in stats:
        demand += one.referenced_blocks + one.waiting_blocks
        growth += one.growth_blocks
        pool += one.num_blocks
        sequences += one.sequences
        backlog += one.backlog_tokens
        largest = max(largest, one.backlog_tokens)
        rate += one.prefill_rate
        steps += one.step_seconds
        if one.max_running:  # of an earlier version it is not known
            seats += one.max_running
            seating += 1
        slowest = max(slowest, one.step_seconds)
    step, seats = steps / len(stats), seats / max(seating, 1)
    return demand, growth, pool, sequences, backlog, largest, rate, slowest, step, seats


def _arrived(snapshot: Snapshot, state: ScalingState, now: float) -> float:
    """Tokens that came since the last decision, by the replicas that both know."""
    came = 0.0
    # One that misses a report is still known; of those that have gone there are as many as run, at most.
    counters = state.counters if len(state.counters) <= 2 * snapshot.running else {}
    for name, one in snapshot.replicas.items():
        known = state.counters.get(name)
        counters[name] = (one.arrived_tokens, one.preemptions)
        if known is None:
            continue
        # A counter that fell was started anew.
        came += one.arrived_tokens - known[0] if one.arrived_tokens >= known[0] else one.arrived_tokens
        if one.preemptions > known[1]:
            state.last_preemption = now
    state.counters = counters
    return came


def _rate_of_arrivals(state: ScalingState, config: ScalingConfig, now: float, arrived: float) -> float:
    """Uncached prompt tokens per second, over the trend's window."""
    arrivals = state.arrivals
    arrivals.append((now, arrived))
    while arrivals[0][0] < now - config.trend_window_s:
        arrivals.popleft()
    past = now - arrivals[0][0]
    if past <= 0:
        return 0.0
    return (sum(tokens for _, tokens in arrivals) - arrivals[0][1]) / past


def _forecast(
    state: ScalingState,
    config: ScalingConfig,
    now: float,
    demand: float,
    each: float,
    size: float,
    start: float,
) -> float:
    """Demand when a replica that is started now will serve, if it grows as during the trend's window.

    The number of requests at a time varies as a Poisson number does even under constant load, so a rise counts
    only where it exceeds ``trend_sigmas`` deviations of such a difference; a small fleet would flap.
    """
    history = state.demand
    history.append((now, demand))
    while history[0][0] < now - config.trend_window_s:
        history.popleft()
    past = now - history[0][0]
    if past < config.trend_window_s / 2:
        return demand
    third = max(len(history) // 3, 1)
    points = list(history)
    (earlier, low), (later, high) = _mean(points[:third]), _mean(points[-third:])
    noise = math.sqrt(2.0 * _HEAVY_TAIL * each * max(demand, each))
    if later <= earlier or high - low <= config.trend_sigmas * noise:
        return demand
    slope = (high - low) / (later - earlier)
    return min(demand + slope * start, 2.0 * demand + size)


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(time for time, _ in points) / len(points), sum(value for _, value in points) / len(points)


def _held(snapshot: Snapshot, config: ScalingConfig, state: ScalingState, start: float, slowest: float) -> str:
    """Why no replica is stopped now although fewer would do; empty if nothing speaks against it."""
    now = snapshot.now
    unsettled = state.unsettled(snapshot, config)
    if unsettled:
        return unsettled
    if not state.window_full(now, config):
        return "window not full"
    if now - state.last_up < 2.0 * start:
        return "scaled up lately"
    if now - state.last_down < config.down_interval_s:
        return "scaled down lately"
    if now - state.last_preemption < config.down_window_s:
        return "preemptions"
    if slowest > config.tpot_target_s:
        return "slow steps"
    return ""


def _largest(kv: float, prefill: float, decode: float) -> str:
    most = max(kv, prefill, decode)
    return "kv" if most == kv else "prefill" if most == prefill else "decode"
