"""The autoscaling rule: how many replicas the demand for KV blocks needs.

::

    demand   = referenced blocks + blocks that waiting sequences lack + 1/4 of their expected growth
               + queued requests x mean blocks of a request
    forecast = demand + its slope x startup time          (only if the rise exceeds 3 standard deviations)

    need     = max of   KV        forecast / (0.75 x pool)
                        slots     sequences x forecast / demand / (0.75 x max_num_seqs)
                        prefill   arriving uncached prompt tokens per second / (0.60 x prefill rate)
                        backlog   running x backlog seconds / (1/4 TTFT target), above 1/8; at most 2 x running
                        decode    running x step time / (0.9 x TPOT target), above 0.9 of it

    up       target = ceil(need + reserve), at once; at most double or 4 more, whichever is larger
    down     target = ceil(largest need of the scale-down window, at the lower marks 0.70 and 0.40, + reserve);
             at most a tenth of the fleet, or one replica, every 10 s
    window   2 x startup time

Demand counts what is missing, too, so unlike occupancy it exceeds 1 and does not saturate. KV is a stock and
prefill is a rate: a fleet can run out of compute while its memory is nearly empty, hence the other needs. The
target, not the number of running replicas, is compared with the need, so replicas that start are not requested
twice. The window follows the measured startup time because that is what a stopped replica costs to get back: an
idle one is worth keeping for about as long (the ski-rental rule), and twice as long allows for the latency of
requests that wait for it.

Marks and shares are options, in ``scaling_config.py``; the length of the window and the guards of all rules
(bounds, missing reports, starting replicas, time between stops) are in ``scaling_state.py``. The constants of
this rule and its own guards, ``_held_by``, are below.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.scaling_state import ROUNDING, ScalingState
from app.autoscaling.snapshot import Decision, ReplicaStats, Snapshot

__all__ = ["ScalingState", "decide"]

_HEAVY_TAIL = 2.0
"""Variance of the requests' sizes: the mean of squares over the square of the mean."""
_MAX_NEED = 1e6
"""Replicas; beyond it an input is wrong."""
_BACKLOG_SHARE = 0.125
"""Of the TTFT target: a smaller backlog is no need."""
_BACKLOG_TARGET = 0.25
"""Of the TTFT target: the backlog of each replica that the fleet aims at."""
_STEP_SHARE = 0.9
"""Of the TPOT target: shorter steps are no need."""
_STRAGGLERS = 0.1
"""Share of the replicas, at least one, whose slow steps are their own: a larger fleet would not help."""
_MOST_ADDED = 4
"""Replicas that one decision may add even where that is more than double."""


@dataclass(frozen=True, slots=True)
class _Load:
    """Load of all running replicas, capacity of one; silent replicas count as the mean of the others."""

    demand: float  # blocks
    mean_blocks: float  # of a sequence, with all of its expected growth
    sequences: float
    arrived: float  # uncached prompt tokens since the last decision
    backlog_s: float  # seconds of prefill that wait at a replica, without the largest backlog
    idle: bool
    pool: float  # blocks of one replica
    slots: float  # sequence slots of one replica; 0 if unknown
    prefill_rate: float  # tokens/s of one replica
    step_s: float  # mean
    slow: bool  # steps take too long, and not just on a straggler


@dataclass(frozen=True, slots=True)
class _Needs:
    """Replicas for each kind of demand at the upper marks, and for their largest at the lower marks."""

    kv: float
    prefill: float
    decode: float
    lower: float

    @property
    def largest(self) -> float:
        return max(self.kv, self.prefill, self.decode)

    @property
    def reason(self) -> str:
        return "kv" if self.largest == self.kv else "prefill" if self.largest == self.prefill else "decode"


def decide(snapshot: Snapshot, config: ScalingConfig, state: ScalingState) -> Decision:
    """Decide how many replicas there should be; changes nothing but ``state``. O(replicas)."""
    unknown = state.hold_or_start(snapshot, config)
    if unknown is not None:
        return unknown

    now, target = snapshot.now, snapshot.target
    load = _load(snapshot, config, state)
    needs = _needs(snapshot, config, state, load)
    busy = not load.idle or snapshot.queued > 0
    state.worked(now, busy)
    reserve = config.reserve if busy or snapshot.minimum else 0.0
    state.add_low(now, max(needs.lower + reserve, needs.decode), state.window_s(config))
    wanted = math.ceil(needs.largest + reserve - ROUNDING)
    proposed = Decision(
        target=min(wanted, max(2 * target, target + _MOST_ADDED)),
        reason=needs.reason,
        need_kv=needs.kv,
        need_prefill=needs.prefill,
        need_decode=needs.decode,
        held_by=_held_by(now, config, state, load),
        demand=_ratio(load.demand, load.pool * snapshot.running),
    )
    return state.settle(snapshot, config, proposed)


def _load(snapshot: Snapshot, config: ScalingConfig, state: ScalingState) -> _Load:
    stats: Collection[ReplicaStats] = snapshot.replicas.values()
    held = growth = sequences = backlog = largest = slots = pool = rate = steps = 0.0
    num_with_slots = num_slow = 0
    for replica in stats:
        held += replica.referenced_blocks + replica.waiting_blocks
        growth += replica.growth_blocks
        sequences += replica.sequences
        backlog += replica.backlog_tokens
        largest = max(largest, replica.backlog_tokens)
        pool += replica.num_blocks
        rate += replica.prefill_rate
        steps += replica.step_seconds
        num_slow += replica.step_seconds > config.tpot_target_s
        if replica.max_running:  # unknown for replicas of an earlier version
            slots += replica.max_running
            num_with_slots += 1
    reporting = len(stats)
    scale = snapshot.running / reporting
    held, growth, sequences = held * scale, growth * scale, sequences * scale
    mean_blocks = (held + growth) / max(sequences, 1.0)
    arrived = _arrived(snapshot, state)
    # Without the largest: one long prompt keeps one replica busy, however many there are.
    shared = (backlog - largest) / (reporting - 1) if reporting > 1 else backlog
    return _Load(
        demand=held + growth * config.growth_share + snapshot.queued * mean_blocks,
        mean_blocks=mean_blocks,
        sequences=sequences,
        arrived=arrived * scale,
        backlog_s=_ratio(shared, rate / reporting),
        idle=not (held or growth or backlog or arrived),
        pool=pool / reporting,
        slots=slots / max(num_with_slots, 1),
        prefill_rate=rate / reporting,
        step_s=steps / reporting,
        slow=num_slow == reporting or num_slow > max(1.0, _STRAGGLERS * reporting),
    )


def _needs(snapshot: Snapshot, config: ScalingConfig, state: ScalingState, load: _Load) -> _Needs:
    forecast = _forecast(snapshot.now, config, state, load)
    arrival_rate = _arrival_rate(snapshot.now, config, state, load.arrived)
    sequences = snapshot.queued + load.sequences
    rise = max(_ratio(forecast, load.demand), 1.0)

    kv = _ratio(forecast, config.kv_high * load.pool)
    slots = _ratio(sequences * rise, config.kv_high * load.slots)
    prefill = _ratio(arrival_rate, config.prefill_high * load.prefill_rate)
    if load.backlog_s > _BACKLOG_SHARE * config.ttft_target_s:
        excess = load.backlog_s / (_BACKLOG_TARGET * config.ttft_target_s)
        prefill = max(prefill, snapshot.running * min(excess, 2.0))
    decode = 0.0
    if load.step_s > _STEP_SHARE * config.tpot_target_s:
        decode = snapshot.running * _ratio(load.step_s, _STEP_SHARE * config.tpot_target_s)
    lower = max(
        _ratio(load.demand, config.kv_low * load.pool),
        _ratio(sequences, config.kv_low * load.slots),
        _ratio(arrival_rate, config.prefill_low * load.prefill_rate),
    )
    return _Needs(max(kv, slots), prefill, decode, lower)


def _ratio(amount: float, unit: float) -> float:
    """``amount / unit``; 0 where the unit is unknown, and at most ``_MAX_NEED``."""
    return min(amount / unit, _MAX_NEED) if unit > 1e-6 else 0.0


def _arrived(snapshot: Snapshot, state: ScalingState) -> float:
    """Prompt tokens since the last decision, of the replicas that both decisions know; notes preemptions."""
    tokens = 0.0
    # A replica that misses a report stays known; of those that have left, at most as many as run do.
    counters = state.counters if len(state.counters) <= 2 * snapshot.running else {}
    for name, replica in snapshot.replicas.items():
        known, arrived = state.counters.get(name), replica.arrived_tokens
        counters[name] = (arrived, replica.preemptions)
        if known is None:
            continue
        # A counter that fell has restarted at 0.
        tokens += arrived - known[0] if arrived >= known[0] else arrived
        if replica.preemptions > known[1]:
            state.last_preemption = snapshot.now
    state.counters = counters
    return tokens


def _arrival_rate(now: float, config: ScalingConfig, state: ScalingState, arrived: float) -> float:
    """Uncached prompt tokens per second, over the trend's window."""
    arrivals = state.arrivals
    arrivals.append((now, arrived))
    while arrivals[0][0] < now - config.trend_window_s:
        arrivals.popleft()
    past = now - arrivals[0][0]
    if past <= 0:
        return 0.0
    return (sum(tokens for _, tokens in arrivals) - arrivals[0][1]) / past


def _forecast(now: float, config: ScalingConfig, state: ScalingState, load: _Load) -> float:
    """Demand when a replica that starts now will serve, if it rises as during the trend's window.

    Concurrency varies like a Poisson number even under constant load, so a rise counts only if it exceeds
    ``trend_sigmas`` standard deviations of such a difference; otherwise a small fleet would flap.
    """
    demand, history = load.demand, state.demand
    history.append((now, demand))
    while history[0][0] < now - config.trend_window_s:
        history.popleft()
    past = now - history[0][0]
    if past < config.trend_window_s / 2:
        return demand
    third = max(len(history) // 3, 1)
    points = list(history)
    (earlier, low), (later, high) = _mean(points[:third]), _mean(points[-third:])
    deviation = math.sqrt(2.0 * _HEAVY_TAIL * load.mean_blocks * max(demand, load.mean_blocks))
    if later <= earlier or high - low <= config.trend_sigmas * deviation:
        return demand
    slope = (high - low) / (later - earlier)
    return min(demand + slope * state.startup_s(config), 2.0 * demand + load.pool)


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(time for time, _ in points) / len(points), sum(value for _, value in points) / len(points)


def _held_by(now: float, config: ScalingConfig, state: ScalingState, load: _Load) -> str:
    """Why this rule stops no replica now, beyond the guards of all rules; empty if nothing prevents it."""
    if now - state.last_up < 2.0 * state.startup_s(config):
        return "scaled up lately"
    if now - state.last_preemption < state.window_s(config):
        return "preemptions"
    if load.slow:
        return "slow steps"
    return ""
