"""The state that scaling decisions keep, and the guards that all rules share."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from app.autoscaling.bursts import Bursts
from app.autoscaling.recent import Recent
from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.snapshot import ScalingDecision, Snapshot

ROUNDING = 0.1
"""Replicas: a need that exceeds a whole number by less than this does not call for another replica."""
_KEPT_STARTS = 20
_PATIENCE = 10.0
"""Startup times after which the policy stops waiting for a replica: there may be no room for it."""
_LONGEST_START_S = 3600.0
_STARTS_PER_WINDOW = 2.0
_SHORTEST_WINDOW_S = 60.0
"""Unless the options say otherwise: load varies within a minute, however fast replicas start."""
_LONGEST_PAUSE_SHARE = 0.1
"""Share of the window; a longer pause between decisions leaves a gap in it."""
_INTENDED_S = 60.0
_INTENDED_SHARE = 0.25
"""A scale-down is intended once fewer have been enough for a minute, or this share of the window."""


@dataclass(slots=True, eq=False)
class ScalingState:
    """What a decision needs to know of earlier ones."""

    arrivals: Recent = field(default_factory=Recent)  # uncached prompt tokens
    pools: Recent = field(default_factory=Recent)  # demand for memory or slots, in pools
    backlogs: Recent = field(default_factory=Recent)  # seconds of prefill
    bursts: Bursts = field(default_factory=Bursts)
    lows: deque[tuple[float, float]] = field(default_factory=deque)  # (time, need at the lower marks), falling
    counters: dict[Any, tuple[float, float]] = field(default_factory=dict)  # arrived tokens, preemptions
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STARTS))
    awaited: deque[tuple[float, int]] = field(default_factory=deque)  # (time of a scale-up, its target)
    reported: int = 0  # running replicas that have reported so far
    since: float | None = None  # the first decision with enough reports
    decided_at: float | None = None
    short_since: float = -math.inf  # since when too few run; minus infinity if enough do
    last_up: float = -math.inf
    last_down: float = -math.inf
    last_preemption: float = -math.inf
    last_work: float = -math.inf

    def hold_or_start(self, snapshot: Snapshot, config: ScalingConfig) -> ScalingDecision | None:
        """The decision if demand is unknown because no replica runs or too few report; otherwise ``None``.

        After a restart, the controller first knows no running replica, then some, and finally their reports.
        """
        target = snapshot.target
        self._follow_clock(snapshot.now, config)
        if snapshot.running >= target:
            self.short_since = -math.inf
        elif self.short_since == -math.inf:
            self.short_since = snapshot.now
        self._learn_starts(snapshot, config)
        if not snapshot.running:
            self.since = None
            # In production Serve's own fast path starts one first and does not ask; this is for other callers.
            if target or not snapshot.queued:
                return ScalingDecision(target, "hold", held_by="no replica runs")
            count = max(snapshot.minimum, 1)
            self.started_up(snapshot.now, count)
            self.last_work = snapshot.now
            return ScalingDecision(count, "cold start")
        reporting = len(snapshot.replicas)
        if reporting < (1.0 - config.max_missing) * snapshot.running or not reporting:
            self.since = None
            return ScalingDecision(
                min(max(target, snapshot.minimum), snapshot.limit), "hold", held_by="reports missing"
            )
        if self.since is None:
            self.since = snapshot.now
        return None

    def known(self, snapshot: Snapshot) -> int:
        """How many running replicas have reported, now or earlier; one that just started has no load yet."""
        self.reported = min(max(self.reported, len(snapshot.replicas)), snapshot.running)
        return self.reported

    def settle(
        self, snapshot: Snapshot, config: ScalingConfig, proposed: ScalingDecision, low: float, kept: int = 0
    ) -> ScalingDecision:
        """Turn a rule's proposal into a decision: up at once, down by the window and a little at a time.

        ``proposed.target`` is the number that is needed now, ``proposed.reason`` says why it would rise, and
        ``proposed.held_by`` is the rule's own reason not to stop replicas. ``low`` is what the window of lower
        needs, which must include the current one, still calls for. ``kept`` replicas stay for a burst that may
        return.
        """
        now, target, limit = snapshot.now, snapshot.target, snapshot.limit

        def decision(count: int, reason: str, held_by: str = "", intended: int = 0) -> ScalingDecision:
            return replace(proposed, target=count, reason=reason, held_by=held_by, intended=intended)

        if not snapshot.minimum <= target <= limit:
            reason = "maximum" if target > limit else "minimum"
            return decision(min(max(target, snapshot.minimum), limit), reason)
        if proposed.target > target:
            if target == limit:
                return decision(target, "hold", "maximum")
            count = min(proposed.target, limit)
            self.started_up(now, count)
            return decision(count, proposed.reason)

        enough = max(math.ceil(low - ROUNDING), self.floor(snapshot, config))
        fewer = max(enough, kept)
        most_stopped = config.most_stopped(target)
        held_by = "a burst may return" if enough < target else ""
        if fewer < target:
            held_by = self._held_by(snapshot, config) or proposed.held_by
        if fewer >= target or held_by:
            intended = self.intended(snapshot, config, max(proposed.target, kept), most_stopped)
            return decision(target, "hold", held_by, intended)
        count = max(fewer, target - most_stopped)
        self.lowered(now, config)
        return decision(count, "less needed", intended=0 if config.shadow else target - count)

    def _held_by(self, snapshot: Snapshot, config: ScalingConfig) -> str:
        """Why no replica stops now under any rule; empty if nothing prevents it."""
        unsettled = self.unsettled(snapshot, config)
        if unsettled:
            return unsettled
        if not self.window_full(snapshot.now, config):
            return "window not full"
        if snapshot.now - self.last_down < config.down_interval_s:
            return "scaled down lately"
        return ""

    def started_up(self, now: float, count: int) -> None:
        """The target rose to ``count``."""
        self.last_up = now
        self.awaited.append((now, count))

    def lowered(self, now: float, config: ScalingConfig) -> None:
        """The target fell. In shadow mode it did not, and the number that would be requested stays the same."""
        if not config.shadow:
            self.last_down = now

    def startup_s(self, config: ScalingConfig) -> float:
        """Seconds from a decision to a serving replica; nine of ten starts took less."""
        if not self.starts:
            return config.startup_s
        ordered = sorted(self.starts)
        return ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)]

    def window_s(self, config: ScalingConfig) -> float:
        """Seconds for which the need must have been lower before a replica stops."""
        if config.down_window_s is not None:
            return config.down_window_s
        return max(_STARTS_PER_WINDOW * self.startup_s(config), _SHORTEST_WINDOW_S)

    def worked(self, now: float, busy: bool) -> None:
        """Remember when there was last work; the first decision counts as work."""
        if busy or self.last_work == -math.inf:
            self.last_work = now

    def floor(self, snapshot: Snapshot, config: ScalingConfig) -> int:
        """The minimum number of replicas: zero only if allowed, from one, after a long time without work."""
        may_be_zero = not snapshot.minimum and snapshot.target <= 1
        rested = may_be_zero and snapshot.now - self.last_work >= config.zero_after_s
        return max(snapshot.minimum, 0 if rested else 1)

    def add_low(self, now: float, need: float, width: float) -> None:
        """Add a need to the window; the first of ``lows`` is then the largest of the last ``width`` seconds."""
        lows = self.lows
        while lows and lows[-1][1] <= need:
            lows.pop()
        lows.append((now, need))
        while lows[0][0] < now - width:
            lows.popleft()

    def largest_need(self) -> float:
        """The largest need of the window."""
        return self.lows[0][1]

    def faded_need(self, now: float, config: ScalingConfig) -> float:
        """The largest need of the window, where older needs count less.

        What exceeds the current need fades along the curve of the optimal randomized strategy for the
        ski-rental problem, with many replicas in place of chance. Keeping replicas and starting them again then
        costs at most e / (e - 1) = 1.58 times as much as with knowledge of how long the need stays low. If all
        of them were kept for the whole window, it could cost twice as much. Nothing fades before a scale-down
        can be intended.
        """
        need, window_s, recent_s = self.lows[-1][1], self.window_s(config), self.recent_s(config)
        ages = ((now - time, low) for time, low in self.lows)
        return max(low if age <= recent_s else need + (low - need) * _fade(age / window_s) for age, low in ages)

    def recent_s(self, config: ScalingConfig) -> float:
        """How long a need must have been lower to be more than a fluctuation, in seconds."""
        return min(_INTENDED_S, _INTENDED_SHARE * self.window_s(config))

    def unsettled(self, snapshot: Snapshot, config: ScalingConfig) -> str:
        """Why the fleet can neither shrink nor intend to shrink now; empty if nothing prevents it."""
        # The first replicas start without a scale-up, and so does the replacement of one that crashed.
        began = max(self.last_up, self.short_since)
        late = snapshot.now - began >= _PATIENCE * self.startup_s(config)
        if snapshot.running < snapshot.target and not late:
            return "replicas start"
        if len(snapshot.replicas) < snapshot.running:
            return "reports missing"
        return ""

    def window_full(self, now: float, config: ScalingConfig) -> bool:
        """Whether the window of needs goes back as far as it should."""
        return self.since is not None and now - self.since >= self.window_s(config)

    def intended(self, snapshot: Snapshot, config: ScalingConfig, least: int, step: int) -> int:
        """By how many replicas the fleet is intended to shrink: what the last part of the window allows.

        At most ``step``, and not below ``least`` replicas. Zero in shadow mode, which stops nothing.
        """
        now = snapshot.now
        recent = self.recent_s(config)
        if config.shadow or self.since is None or now - self.since < recent or self.unsettled(snapshot, config):
            return 0
        largest = 0.0
        for time, need in reversed(self.lows):  # needs rise toward the past
            if time < now - recent:
                break
            largest = need
        fewer = max(math.ceil(largest - ROUNDING), self.floor(snapshot, config), least)
        return min(max(snapshot.target - fewer, 0), step)

    def _follow_clock(self, now: float, config: ScalingConfig) -> None:
        """Restart the windows if the clock was set, or if nothing was decided for long."""
        before, self.decided_at = self.decided_at, now
        longest = max(config.stale_s, _LONGEST_PAUSE_SHARE * self.window_s(config))
        if before is None or 0.0 <= now - before <= longest:
            return
        self.since = None
        self.last_work = now
        if now < before:  # what lies ahead of the clock would stay until it gets there
            self.arrivals, self.pools, self.backlogs, self.bursts = Recent(), Recent(), Recent(), Bursts()
            self.lows.clear()
            self.awaited.clear()
            self.short_since = min(self.short_since, now)
            self.last_up = min(self.last_up, now)
            self.last_down = min(self.last_down, now)
            self.last_preemption = min(self.last_preemption, now)

    def _learn_starts(self, snapshot: Snapshot, config: ScalingConfig) -> None:
        """Learn startup times. A replica that had to wait for room says little about them."""
        awaited = self.awaited
        while awaited and (snapshot.running >= awaited[0][1] or snapshot.target < awaited[0][1]):
            began, count = awaited.popleft()
            if snapshot.running >= count:
                longest = min(_PATIENCE * self.startup_s(config), _LONGEST_START_S)
                self.starts.append(min(snapshot.now - began, longest))


def _fade(age: float) -> float:
    """The share of an earlier need that still counts: 1 at the ``age`` of 0, and 0 from a whole window on."""
    return max(1.0 - math.expm1(age) / math.expm1(1.0), 0.0)
