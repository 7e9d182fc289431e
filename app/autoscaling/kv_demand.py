"""How many replicas KV demand needs.

Demand is counted in KV blocks: those referenced, those that waiting and preempted sequences still lack, and a
share of what the running ones will grow by. It can exceed the pool, so unlike occupancy it does not saturate.
Two rates guard what a stock of blocks cannot see: uncached prompt tokens against what the fleet prefills, and
the time of a decode step against its target. The largest need wins. Up at once, counted against the target and
not against what runs already; down by the largest need of a window, a little at a time.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.snapshot import Decision, Snapshot

_ROUNDING = 0.1
"""Replicas: a need this little above a whole number does not ask for one more."""
_HEAVY_TAIL = 2.0
"""Variance of requests' sizes: the mean of squares over the square of the mean."""
_KEPT_STARTS = 20
_PATIENCE = 10.0
"""Times to start after which a replica that does not run is not waited for: there may be no room for it."""
_MOST = 1e6
"""Replicas; beyond it a figure is an error."""
_LONGEST_START_S = 3600.0


@dataclass(slots=True, eq=False)
class ScalingState:
    """What earlier decisions leave behind."""

    demand: deque[tuple[float, float]] = field(default_factory=deque)  # (time, blocks)
    arrivals: deque[tuple[float, float]] = field(default_factory=deque)  # (time, tokens that came since)
    lows: deque[tuple[float, float]] = field(default_factory=deque)  # (time, need at the lower marks), falling
    counters: dict[Any, tuple[float, float]] = field(default_factory=dict)  # arrived tokens, preemptions
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STARTS))
    awaited: deque[tuple[float, int]] = field(default_factory=deque)  # (time of an up, the target then)
    since: float | None = None  # the first decision with enough reports
    last_up: float = -math.inf
    last_down: float = -math.inf
    last_preemption: float = -math.inf
    last_work: float = -math.inf


def decide(snapshot: Snapshot, config: ScalingConfig, state: ScalingState) -> Decision:
    """Decide how many replicas there should be; changes nothing but ``state``. O(replicas)."""
    now, target = snapshot.now, snapshot.target
    low, high = snapshot.minimum, max(snapshot.minimum, snapshot.maximum)
    _learn_starts(snapshot, state)
    if not snapshot.running:
        if target or not snapshot.queued:
            return Decision(target, "hold", held_by="no replica runs")
        _started_up(state, now, max(low, 1))
        state.last_work = now
        return Decision(max(low, 1), "cold start")
    reporting = len(snapshot.replicas)
    if reporting < (1.0 - config.max_missing) * snapshot.running or not reporting:
        state.since = None
        return Decision(min(max(target, low), high), "hold", held_by="reports missing")
    if state.since is None:
        state.since = now

    stats = snapshot.replicas.values()
    demand, growth, pool, sequences, backlog, rate, slowest, step = _sums(stats, config)
    # Replicas without a report are taken to be like the others.
    scale = snapshot.running / reporting
    demand, sequences, backlog = demand * scale, sequences * scale, backlog * scale
    size = pool / reporting
    each = (demand + growth * scale) / max(sequences, 1.0)
    demand += growth * scale * config.growth_share + snapshot.queued * each
    arrived = _arrived(snapshot, state, now) * scale
    per_second = _rate_of_arrivals(state, config, now, arrived)
    start = _startup(config, state)
    forecast = _forecast(state, config, now, demand, each, size, start)

    capacity = rate / reporting
    seconds = _over(backlog, snapshot.running * capacity)
    need_kv = _over(forecast, size * config.kv_high)
    need_prefill = _over(per_second, capacity * config.prefill_high)
    if seconds > 0.125 * config.ttft_target_s:
        need_prefill = max(need_prefill, snapshot.running * min(2.0, seconds / (0.25 * config.ttft_target_s)))
    need_decode = 0.0
    if step > 0.9 * config.tpot_target_s:
        need_decode = snapshot.running * _over(step, 0.9 * config.tpot_target_s)
    need = max(need_kv, need_prefill, need_decode)
    busy = demand > 0 or backlog > 0 or snapshot.queued > 0
    if busy or state.last_work == -math.inf:
        state.last_work = now
    reserve = config.reserve if busy or low else 0.0

    lowest = max(_over(demand, size * config.kv_low), _over(per_second, capacity * config.prefill_low))
    _slide_max(state.lows, now, max(lowest + reserve, need_decode), config.down_window_s)

    def decision(count: int, reason: str, held_by: str = "") -> Decision:
        return Decision(count, reason, need_kv, need_prefill, need_decode, held_by)

    if not low <= target <= high:
        return decision(min(max(target, low), high), "maximum" if target > high else "minimum")
    wanted = math.ceil(need + reserve - _ROUNDING)
    if wanted > target:
        count = min(wanted, max(2 * target, target + 4), high)
        if count == target:
            return decision(target, "hold", "maximum")
        _started_up(state, now, count)
        return decision(count, _largest(need_kv, need_prefill, need_decode))

    floor = max(low, 0 if not low and now - state.last_work >= config.zero_after_s else 1)
    fewer = max(math.ceil(state.lows[0][1] - _ROUNDING), floor)
    if fewer >= target:
        return decision(target, "hold")
    held = _held(snapshot, config, state, start, slowest)
    if held:
        return decision(target, "hold", held)
    count = max(fewer, target - max(1, int(config.down_share * target)))
    state.last_down = now
    return decision(count, "less needed")


def _started_up(state: ScalingState, now: float, count: int) -> None:
    state.last_up = now
    state.awaited.append((now, count))


def _over(amount: float, unit: float) -> float:
    """How many units an amount is; none of a unit that is not known, and never more than a fleet can be."""
    return min(amount / unit, _MOST) if unit > 1e-6 else 0.0


def _sums(stats: Any, config: ScalingConfig) -> tuple[float, float, float, float, float, float, float, float]:
    demand = growth = pool = sequences = backlog = rate = slowest = steps = 0.0
    for one in stats:
        demand += one.referenced_blocks + one.waiting_blocks
        growth += one.growth_blocks
        pool += one.num_blocks
        sequences += one.sequences
        backlog += one.backlog_tokens
        rate += one.prefill_rate
        steps += one.step_seconds
        slowest = max(slowest, one.step_seconds)
    return demand, growth, pool, sequences, backlog, rate, slowest, steps / len(stats)


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
    if snapshot.running < snapshot.target and now - state.last_up < _PATIENCE * start:
        return "replicas start"
    if len(snapshot.replicas) < snapshot.running:
        return "reports missing"
    if state.since is None or now - state.since < config.down_window_s:
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


def _learn_starts(snapshot: Snapshot, state: ScalingState) -> None:
    awaited = state.awaited
    while awaited and (snapshot.running >= awaited[0][1] or snapshot.target < awaited[0][1]):
        began, count = awaited.popleft()
        if snapshot.running >= count:
            state.starts.append(min(snapshot.now - began, _LONGEST_START_S))


def _startup(config: ScalingConfig, state: ScalingState) -> float:
    """Seconds from a decision to a serving replica: longer than nine of ten starts took."""
    if not state.starts:
        return config.startup_s
    ordered = sorted(state.starts)
    return ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)]


def _slide_max(window: deque[tuple[float, float]], now: float, value: float, width: float) -> None:
    """Add a value to a window whose first entry is then the largest of the last ``width`` seconds."""
    while window and window[-1][1] <= value:
        window.pop()
    window.append((now, value))
    while window[0][0] < now - width:
        window.popleft()


def _largest(kv: float, prefill: float, decode: float) -> str:
    most = max(kv, prefill, decode)
    return "kv" if most == kv else "prefill" if most == prefill else "decode"
