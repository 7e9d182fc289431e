"""The autoscaling rule: how many replicas the demand for KV blocks needs.

::

    demand   = referenced blocks + blocks that waiting sequences lack + 1/10 of their expected growth
               + queued requests x mean blocks of a request

    need     = max of   KV        mean demand / (0.75 x pool), or demand / (0.9 x pool)
                        slots     the same of sequences and max_num_seqs
                        prefill   arriving uncached prompt tokens per second / (0.60 x prefill rate)
                        backlog   running x backlog seconds / (1/4 TTFT target), above 1/8; at most 2 x running
                        (of the half of the replicas with less; now or in the mean of 5 s, the lower one)
                        decode    running x median step time / (0.9 x TPOT target), above 0.9 of it

    up       target = ceil(need, with the reserve added to prefill and backlog), at once;
             at most double or 4 more, whichever is larger
    down     target = ceil(largest need of the scale-down window, of which less counts the older it is), where
             demand counts in full at a mark of 0.70, prompts with three times their usual rise, and short steps
             like long ones; at most a tenth of the fleet, or one replica, every 10 s; as many as a burst that
             may return needs are kept
    window   2 x startup time

Demand includes what is missing, so unlike occupancy it can exceed 1 and does not saturate. KV is a stock and
prefill is a rate: a fleet can run out of compute while its memory is nearly empty, hence the other needs. The
need is compared with the target, not with the number of running replicas, so starting replicas are not
requested twice. The window follows the measured startup time because that is the cost of getting a stopped
replica back: an idle one is worth keeping for about as long (the ski-rental rule), and twice as long allows for
the latency of requests that wait for it. Earlier needs fade, so of several idle replicas only the last is kept
for the whole window.

Arrivals jump, but demand for memory does not: it grows while requests are answered, and its mark leaves a
quarter of each pool free. So the reserve is for prompts only. The rule does not extrapolate a rise of demand:
every new load rises until as many requests end as arrive, and would be overestimated. Arrivals and demand count
by their means, over half a minute and a quarter of the window, because a peak that ends before a replica has
started needs none. Nor does a backlog that ends within seconds, which long prompts often leave. But arrivals
count over five seconds if a backlog shows that more arrive than before, and demand that nearly fills the pools
counts at once. A smaller fleet must also withstand peaks: of memory, and of prompts the usual rise from one
half minute to the next. That rise is learned: it is small in a large fleet, and large if prompts are long or
arrive together.

Bursts in which prompts had to wait are remembered, with the lulls between them (``bursts.py``). Replicas are
kept for the next burst if, over the last lulls, that would have cost less than its late requests.

Marks and shares are options, in ``scaling_config.py``. The length of the window and the guards that all rules
share (bounds, missing reports, starting replicas, time between stops) are in ``scaling_state.py``. The
constants of this rule and its own guards, ``_held_by``, are below.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median_low

from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.scaling_state import ROUNDING, ScalingState
from app.autoscaling.snapshot import ReplicaStats, ScalingDecision, Snapshot

__all__ = ["ScalingState", "decide"]

_MAX_NEED = 1e6
"""Replicas; beyond it an input is wrong."""
_BACKLOG_SHARE = 0.125
"""Of the TTFT target: a smaller backlog is no need."""
_BACKLOG_TARGET = 0.25
"""Of the TTFT target: the backlog of each replica that the fleet aims at."""
_STEP_SHARE = 0.9
"""Of the TPOT target: shorter steps are no need."""
_STRAGGLERS = 0.1
"""Share of the replicas, at least one, whose slow steps do not prevent a smaller fleet."""
_RISES = 3.0
"""Usual rises of the prompt rate that a smaller fleet must withstand; standard deviations of a steady one."""
_MOST_ADDED = 4
"""Replicas that one decision may add even if that more than doubles the fleet."""


@dataclass(frozen=True, slots=True)
class _Load:
    """Load of all running replicas, capacity of one.

    Silent replicas count as the mean of the others, and those that have never reported have no load.
    """

    demand: float  # blocks
    sequences: float
    backlog_s: float  # seconds of prefill that wait at a replica, of the half with the least
    late: bool  # prompts wait too long, at more replicas than one
    idle: bool
    pool: float  # blocks of one replica
    slots: float  # sequence slots of one replica; 0 if unknown
    prefill_rate: float  # tokens/s of one replica
    step_s: float  # median, the lower of two
    slow: bool  # steps take too long, and not just on a straggler


@dataclass(frozen=True, slots=True)
class _Needs:
    """Replicas for each kind of demand, and what a smaller fleet must bear."""

    kv: float
    prefill: float
    decode: float
    lower: float  # of memory and slots, at the lower mark
    lower_prefill: float  # with the usual rise
    lower_decode: float  # if steps took longer in proportion

    @property
    def largest(self) -> float:
        return max(self.kv, self.prefill, self.decode)

    @property
    def reason(self) -> str:
        return "kv" if self.largest == self.kv else "prefill" if self.largest == self.prefill else "decode"


def decide(snapshot: Snapshot, config: ScalingConfig, state: ScalingState) -> ScalingDecision:
    """Decide how many replicas there should be; changes nothing but ``state``. O(n log n) of n replicas."""
    unknown = state.hold_or_start(snapshot, config)
    if unknown is not None:
        return unknown

    now, target = snapshot.now, snapshot.target
    load = _load(snapshot, config, state)
    needs = _needs(snapshot, config, state, load)
    busy = not load.idle or snapshot.queued > 0
    state.worked(now, busy)
    reserve = config.reserve if busy or snapshot.minimum else 0.0
    wanted = math.ceil(max(needs.largest, needs.prefill + reserve) - ROUNDING)
    count = min(wanted, max(2 * target, target + _MOST_ADDED))
    lowest = max(needs.lower, needs.lower_prefill + reserve, needs.lower_decode)
    # What raises the target counts in the window, too, because no other need includes a backlog.
    lowest = max(lowest, min(count, snapshot.limit)) if count > target else lowest
    state.add_low(now, lowest, state.window_s(config))
    proposed = ScalingDecision(
        target=count,
        reason=needs.reason,
        need_kv=needs.kv,
        need_prefill=needs.prefill,
        need_decode=needs.decode,
        held_by=_held_by(now, config, state, load),
        demand=_ratio(load.demand, load.pool * snapshot.running),
    )
    kept = math.ceil(state.bursts.kept(now) - ROUNDING)
    return state.settle(snapshot, config, proposed, state.faded_need(now, config), kept)


def _load(snapshot: Snapshot, config: ScalingConfig, state: ScalingState) -> _Load:
    stats: Collection[ReplicaStats] = snapshot.replicas.values()
    held = growth = sequences = backlog = slots = pool = rate = 0.0
    num_with_slots = num_slow = 0
    for replica in stats:
        held += replica.referenced_blocks + replica.waiting_blocks
        growth += replica.growth_blocks
        sequences += replica.sequences
        backlog += replica.backlog_tokens
        pool += replica.num_blocks
        rate += replica.prefill_rate
        num_slow += replica.step_seconds > config.tpot_target_s
        if replica.max_running:  # unknown for replicas of an earlier version
            slots += replica.max_running
            num_with_slots += 1
    reporting = len(stats)
    scale = state.known(snapshot) / reporting
    held, growth, sequences = held * scale, growth * scale, sequences * scale
    mean_blocks = (held + growth) / max(sequences, 1.0)
    arrived = _arrived(snapshot, state)
    state.arrivals.add(snapshot.now, arrived * scale, config.rate_window_s)
    # Long prompts keep some replicas busy, however many there are, and the next prompts go to the others.
    least = sorted(replica.backlog_tokens for replica in stats)[: (reporting + 1) // 2]
    most = max(replica.backlog_tokens for replica in stats)
    others = (backlog - most) / (reporting - 1) if reporting > 1 else backlog
    return _Load(
        demand=held + growth * config.growth_share + snapshot.queued * mean_blocks,
        sequences=sequences,
        backlog_s=_ratio(sum(least) / len(least), rate / reporting),
        late=_ratio(others, rate / reporting) > config.ttft_target_s,
        idle=not (held or growth or backlog or arrived),
        pool=pool / reporting,
        slots=slots / max(num_with_slots, 1),
        prefill_rate=rate / reporting,
        # If at least half are fast, more replicas make no step faster: the others are slow for reasons of their
        # own.
        step_s=median_low(replica.step_seconds for replica in stats),
        slow=num_slow == reporting or num_slow > max(1.0, _STRAGGLERS * reporting),
    )


def _needs(snapshot: Snapshot, config: ScalingConfig, state: ScalingState, load: _Load) -> _Needs:
    now, burst_s, arrivals = snapshot.now, config.burst_window_s, state.arrivals
    steady = arrivals.rate(now, config.rate_window_s)
    waits = load.backlog_s > _BACKLOG_TARGET * config.ttft_target_s
    rate = max(steady, arrivals.rate(now, burst_s)) if waits else steady

    pools = max(_ratio(load.demand, load.pool), _ratio(snapshot.queued + load.sequences, load.slots))
    recent_s = state.recent_s(config)
    state.pools.add_level(now, pools, recent_s)
    mean = state.pools.rate(now, recent_s) or pools  # the first decision has no mean
    kv = max(mean / config.kv_high, pools / config.kv_full)
    prompts = config.prefill_high * load.prefill_rate  # tokens per second of one replica
    prefill = _ratio(rate, prompts)
    state.backlogs.add_level(now, load.backlog_s, burst_s)
    lasting = min(load.backlog_s, state.backlogs.rate(now, burst_s) or load.backlog_s)
    if lasting > _BACKLOG_SHARE * config.ttft_target_s:
        prefill = max(prefill, snapshot.running * min(lasting / (_BACKLOG_TARGET * config.ttft_target_s), 2.0))
    longest_s = _STEP_SHARE * config.tpot_target_s
    lower_decode = state.known(snapshot) * _ratio(load.step_s, longest_s)  # one that just started took no part
    decode = lower_decode if load.step_s > longest_s else 0.0
    state.bursts.see(now, max(mean / config.kv_high, _ratio(steady, prompts)), late=load.late)
    lower_prefill = _ratio(steady + _RISES * arrivals.rise, prompts)
    return _Needs(kv, prefill, decode, pools / config.kv_low, lower_prefill, lower_decode)


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


def _held_by(now: float, config: ScalingConfig, state: ScalingState, load: _Load) -> str:
    """Why this rule stops no replica now, beyond the guards of all rules; empty if nothing prevents it."""
    if now - state.last_preemption < state.window_s(config):
        return "preemptions"
    if load.slow:
        return "slow steps"
    return ""
