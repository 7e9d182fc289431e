"""Chooses how a preempted sequence gets its KV back: swap it out and in, or recompute it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.kv.block_pool import InvariantError
from engine.scheduling.estimators import STALE, CallCost, RunningMedian

_TRIAL_FACTOR = 8.0  # an alternative that seems more expensive than this is not worth trying
_SURVIVAL_START = 0.5  # the prior with the smallest possible error
_SURVIVAL_STEP = 1.0 / 16.0
_KEPT_RATIOS = 512
_KEPT_LESSONS = 32  # whose median is the typical survival


class Recovery(enum.StrEnum):
    """How a preempted sequence gets its KV back."""

    RECOMPUTE = "recompute"  # run its tokens once more, except those whose blocks are still cached
    SWAP = "swap"  # copy its blocks to the host and back, except those that are still cached


class RecoveryMode(enum.StrEnum):
    """The option ``recovery``."""

    AUTO = "auto"  # the one that is expected to take less time
    SWAP = "swap"  # whenever the host pool has room
    RECOMPUTE = "recompute"


@dataclass(slots=True)
class Rates:
    """Speeds of computing and copying KV; 0 where unknown."""

    prefill: float = 0.0  # tokens a second, once a step has begun
    swap_out: float = 0.0  # blocks a second, once a copy has begun
    swap_in: float = 0.0  # the same
    out_call: float = 0.0  # seconds of a swap-out, in addition to those of its blocks
    in_call: float = 0.0  # seconds of a swap-in, in addition to those of its blocks


@dataclass(frozen=True, slots=True)
class Victim:
    """A sequence that is about to lose its blocks."""

    tokens: int  # with computed KV
    blocks: int  # that hold them
    to_copy: int  # of the blocks, those that are not on the host yet
    findable: int  # leading blocks that the prefix index knows
    shared: int  # of the findable ones, those that other sequences hold, too: they survive
    swappable: bool  # the host pool has room


@dataclass(slots=True, eq=False, kw_only=True)
class RecoveryDecision:
    """One choice, what it was likely to cost and what it has cost so far, in seconds."""

    recovery: Recovery
    estimate: float  # the likely cost; 0 where a rate is not known
    other_estimate: float | None  # of the alternative; None where a rate is not known
    tokens: int
    blocks: int
    findable: int
    shared: int
    fallback: bool = False  # a swap was wanted but the host pool was full
    trial: bool = False  # the costlier recovery, chosen to measure it
    outcome: float = 0.0
    ended: bool = False
    survival_known: bool = False  # whether its findable blocks survived has been learned


@dataclass(frozen=True, slots=True)
class RecoveryStats:
    """Totals since the start, and what is believed now; times in seconds."""

    decisions: dict[Recovery, int]
    finished: dict[Recovery, int]
    abandoned: int
    fallbacks: int
    trials: int
    estimates: dict[Recovery, float]  # sums over the finished ones
    outcomes: dict[Recovery, float]
    median_ratio: dict[Recovery, float | None]  # outcome / estimate, of at most 512 that finished last
    median_error: dict[Recovery, float | None]  # |estimate - outcome| / outcome, of the same; may be inf
    rates: Rates
    survival: float  # mean share of the findable blocks shared with no other sequence that survive

    @property
    def pending(self) -> int:
        """Recoveries that have neither finished nor been abandoned."""
        return sum(self.decisions.values()) - sum(self.finished.values()) - self.abandoned


class RecoveryPolicy:
    """Chooses a recovery for each preempted sequence, and learns from what the choices cost.

    The expected cost of a swap is the time to copy out the blocks that are not on the host and to copy in those
    that will no longer be cached; that of a recompute is the time to run the tokens that will not be cached.
    Each copy and each step also has a fixed cost. Rates start from a calibration and are updated with
    measurements of steps. The share of findable blocks that survive until the sequence resumes is updated with
    what is found then. Usually all of them survive or none, and a few slow steps raise the mean cost. The mean
    decides, because it counts in the long run, but a decision's ``estimate`` uses the medians of survival and
    of costs.

    A recovery that is never chosen is never measured. So the more expensive one is tried now and then, under
    three conditions: its rate was not measured during the last :data:`STALE` decisions; its estimate is below 8
    times the other's; and enough decisions have passed that trials cost at most 1/64 of the expected time (not
    required for the first trial of each kind). Survival needs no trials, because both recoveries show it.

    Args:
        mode: ``auto`` chooses by expected cost, ``swap`` swaps while the host pool has
            room, ``recompute`` never does.
        block_size: tokens of one KV block.
        rates: calibrated at start; an unknown swap rate makes ``auto`` recompute.
        refit_calls: whether measured copies include their fixed parts. ``False`` where they are a time per
            block multiplied by blocks: fitting them would lose the calibrated fixed part.
    """

    def __init__(self, mode: RecoveryMode, block_size: int, rates: Rates, *, refit_calls: bool = True) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size} but must be at least 1")
        self.mode = RecoveryMode(mode)
        self._block_size = block_size
        self._prefill = CallCost(rates.prefill)
        self._out = CallCost(rates.swap_out, rates.out_call, refit=refit_calls)
        self._in = CallCost(rates.swap_in, rates.in_call, refit=refit_calls)
        self._survival = _SURVIVAL_START
        self._lessons = 0
        self._typical = RunningMedian(_KEPT_LESSONS)
        self._allowance = 0.0  # seconds that the next trial may cost beyond the cheaper recovery
        self._last_trial = 0
        self._tried: set[Recovery] = set()
        self._total = 0
        self._decisions = dict.fromkeys(Recovery, 0)
        self._finished = dict.fromkeys(Recovery, 0)
        self._abandoned = self._fallbacks = self._trials = 0
        self._estimates = dict.fromkeys(Recovery, 0.0)
        self._outcomes = dict.fromkeys(Recovery, 0.0)
        self._ratios = {recovery: RunningMedian(_KEPT_RATIOS) for recovery in Recovery}
        self._errors = {recovery: RunningMedian(_KEPT_RATIOS) for recovery in Recovery}

    @property
    def rates(self) -> Rates:
        """The present estimates."""
        return Rates(
            self._prefill.rate, self._out.rate, self._in.rate, self._out.call_seconds, self._in.call_seconds
        )

    def choose(self, victim: Victim) -> RecoveryDecision:
        """Decide how a sequence recovers; called while it still holds its blocks.

        If the host pool is full, a wanted swap becomes a recompute with ``fallback`` set.
        """
        estimates = self._expected(victim)
        wanted = self._wanted(victim, estimates)
        fallback = wanted is Recovery.SWAP and not victim.swappable
        chosen = Recovery.RECOMPUTE if fallback else wanted
        trial = (
            not fallback and self.mode is RecoveryMode.AUTO and self._is_trial_due(victim, wanted, estimates)
        )
        if trial:
            chosen = _other(wanted)
        likely = self._likely(victim)
        self._total += 1
        self._decisions[chosen] += 1
        self._fallbacks += fallback
        self._trials += trial
        return RecoveryDecision(
            recovery=chosen,
            estimate=likely[chosen] or 0.0,
            other_estimate=likely[_other(chosen)],
            tokens=victim.tokens,
            blocks=victim.blocks,
            findable=victim.findable,
            shared=victim.shared,
            fallback=fallback,
            trial=trial,
        )

    def resumed(self, decision: RecoveryDecision, found: int) -> None:
        """Learn that ``found`` leading blocks were still in the prefix index at re-admission.

        It is called earlier if only shared blocks are left. Sequences that wait longest lose the most, and
        learning only when they return would favor those that return soon. Each decision counts once.
        """
        unshared = decision.findable - decision.shared
        if unshared < 1 or decision.survival_known:
            return
        decision.survival_known = True
        survived = min(max((found - decision.shared) / unshared, 0.0), 1.0)
        self._lessons += 1
        self._typical.add(survived)
        step = max(_SURVIVAL_STEP, 1.0 / (self._lessons + 1))
        self._survival += (survived - self._survival) * step

    def spent(self, decision: RecoveryDecision, seconds: float) -> None:
        """Add to the cost of ``decision``."""
        decision.outcome += seconds

    def done(self, decision: RecoveryDecision) -> None:
        """Count a recovery that is complete.

        Raises:
            InvariantError: it had ended before.
        """
        if decision.ended:
            raise InvariantError(f"a {decision.recovery} was completed after it had ended")
        decision.ended = True
        recovery = decision.recovery
        self._finished[recovery] += 1
        self._estimates[recovery] += decision.estimate
        self._outcomes[recovery] += decision.outcome
        if decision.estimate > 0:
            ratio = decision.outcome / decision.estimate
            self._ratios[recovery].add(ratio)
            self._errors[recovery].add(abs(1.0 - ratio) / ratio if ratio else float("inf"))

    def abandon(self, decision: RecoveryDecision) -> None:
        """Drop a recovery that will not be completed; nothing happens if it has ended."""
        if not decision.ended:
            decision.ended = True
            self._abandoned += 1

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """Learn what running ``tokens`` of one prompt or recompute took, their share of a step's time."""
        self._prefill.measure(tokens, seconds, self._total)

    def saw_swap_out(self, blocks: int, seconds: float) -> None:
        """Learn what copying ``blocks`` of one request to the host took, its share of a step's copies."""
        self._out.measure(blocks, seconds, self._total)

    def saw_swap_in(self, blocks: int, seconds: float) -> None:
        """Learn what copying ``blocks`` of one request from the host took, its share of a step's copies."""
        self._in.measure(blocks, seconds, self._total)

    def stats(self) -> RecoveryStats:
        """Return a snapshot; O(1)."""
        return RecoveryStats(
            decisions=dict(self._decisions),
            finished=dict(self._finished),
            abandoned=self._abandoned,
            fallbacks=self._fallbacks,
            trials=self._trials,
            estimates=dict(self._estimates),
            outcomes=dict(self._outcomes),
            median_ratio={recovery: ratios.value for recovery, ratios in self._ratios.items()},
            median_error={recovery: errors.value for recovery, errors in self._errors.items()},
            rates=self.rates,
            survival=self._survival,
        )

    def _expected(self, victim: Victim) -> dict[Recovery, float | None]:
        """The mean cost of each recovery, which decides."""
        found = victim.shared + self._survival * (victim.findable - victim.shared)
        return _costs(
            self._out.mean(victim.to_copy),
            self._in.mean(victim.blocks - found),
            self._prefill.mean(victim.tokens - found * self._block_size),
        )

    def _likely(self, victim: Victim) -> dict[Recovery, float | None]:
        """The median cost of each recovery; costs have long tails, so it is below the mean."""
        typical = self._typical.value
        survival = self._survival if typical is None else typical
        found = victim.shared + survival * (victim.findable - victim.shared)
        return _costs(
            self._out.likely(victim.to_copy),
            self._in.likely(victim.blocks - found),
            self._prefill.likely(victim.tokens - found * self._block_size),
        )

    def _wanted(self, victim: Victim, estimates: dict[Recovery, float | None]) -> Recovery:
        if not victim.blocks or self.mode is RecoveryMode.RECOMPUTE:
            return Recovery.RECOMPUTE
        if self.mode is RecoveryMode.SWAP:
            return Recovery.SWAP
        swap, recompute = estimates[Recovery.SWAP], estimates[Recovery.RECOMPUTE]
        cheaper = swap is not None and recompute is not None and swap < recompute
        return Recovery.SWAP if cheaper else Recovery.RECOMPUTE

    def _is_trial_due(self, victim: Victim, best: Recovery, estimates: dict[Recovery, float | None]) -> bool:
        """Whether to measure the costlier recovery now; also adds to what a trial may cost."""
        other = _other(best)
        low, high = estimates[best], estimates[other]
        if low is None or high is None:
            return False
        self._allowance += low / STALE
        stale = self._is_stale(other, victim)
        rested = self._total - self._last_trial >= STALE
        affordable = other not in self._tried or high - low <= self._allowance
        possible = other is Recovery.RECOMPUTE or victim.swappable
        if not (stale and rested and affordable and possible and high <= _TRIAL_FACTOR * low):
            return False
        self._tried.add(other)
        self._last_trial = self._total
        self._allowance = 0.0
        return True

    def _is_stale(self, recovery: Recovery, victim: Victim) -> bool:
        if recovery is Recovery.RECOMPUTE:
            return self._prefill.is_stale(self._total)
        if victim.to_copy and self._out.is_stale(self._total):
            return True
        return self._in.is_stale(self._total)


def _other(recovery: Recovery) -> Recovery:
    return Recovery.SWAP if recovery is Recovery.RECOMPUTE else Recovery.RECOMPUTE


def _costs(
    swap_out: float | None, swap_in: float | None, recompute: float | None
) -> dict[Recovery, float | None]:
    swap = None if swap_out is None or swap_in is None else swap_out + swap_in
    return {Recovery.SWAP: swap, Recovery.RECOMPUTE: recompute}
