"""Ours beside Ray's policy, whose settings are swept for each load: at its defaults and at its best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from loadtests.experiments.autoscaling.policies import OURS, RAY_DEFAULT, RAY_SWEEP
from loadtests.experiments.autoscaling.runs import Outcome
from loadtests.findings import Table

TOLERANCE = 0.005
"""A share of requests in time that is lower by at most this counts as the same."""


@dataclass(frozen=True, slots=True)
class Result:
    """One policy under one load, over all seeds."""

    policy: str
    served: float  # share of the requests in time, in the worst run
    hours: float  # replica-hours, mean
    ttft_p99: float  # of the worst run
    moves: float  # changes of the target, mean
    reversals: int  # of the worst run
    peak: int  # highest target


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of all policies under one load, by policy."""

    load: str
    results: dict[str, Result]

    @property
    def ours(self) -> Result:
        """Our policy."""
        return self.results[OURS]

    def serves(self, policy: str) -> bool:
        """Whether at least as many requests are in time as with ours."""
        return self.results[policy].served >= self.ours.served - TOLERANCE

    @property
    def ray_best(self) -> Result:
        """Of the settings that serve as ours, the cheapest; if none does, the one with the most in time."""
        swept = [self.results[policy] for policy in RAY_SWEEP]
        serving = [one for one in swept if self.serves(one.policy)]
        if serving:
            return min(serving, key=lambda one: one.hours)
        return max(swept, key=lambda one: (one.served, -one.hours))

    def table(self, title: str) -> Table:
        """Ours, Ray's default and best, and the policies without settings."""
        others = [policy for policy in self.results if policy not in (OURS, *RAY_SWEEP)]
        shown = {
            "ours": self.ours,
            f"Ray's default: {RAY_DEFAULT}": self.results[RAY_DEFAULT],
            f"Ray's best here: {self.ray_best.policy}": self.ray_best,
        } | {policy: self.results[policy] for policy in others}
        rows = []
        for name, one in shown.items():
            figures = (f"{100 * one.served:.2f}", f"{one.hours:.2f}", f"{one.ttft_p99:.2f}", f"{one.moves:.0f}")
            rows.append((name, *figures, f"{one.reversals}"))
        header = ("policy", "in time %", "replica-h", "TTFT p99 s", "moves", "reversals")
        return Table(title, header, tuple(rows))


def compared(load: str, runs: Sequence[tuple[str, Outcome]]) -> Comparison:
    """Sum up the runs (policy, outcome) of one load."""
    results = {}
    for policy in dict.fromkeys(policy for policy, _ in runs):
        some = [outcome for name, outcome in runs if name == policy]
        results[policy] = Result(
            policy,
            min(one.served for one in some),
            fmean(one.replica_hours for one in some),
            max(one.ttft_p99 for one in some),
            fmean(one.moves for one in some),
            max(one.reversals for one in some),
            max(one.peak for one in some),
        )
    return Comparison(load, results)


def one_setting(comparisons: Sequence[Comparison]) -> str:
    """Ray's setting that serves as ours under the most loads; among equals, with the fewest replica-hours."""

    def rank(policy: str) -> tuple[int, float]:
        served = sum(one.serves(policy) for one in comparisons)
        return -served, sum(one.results[policy].hours / one.ours.hours for one in comparisons)

    return min(RAY_SWEEP, key=rank)


def overview(comparisons: Sequence[Comparison]) -> Table:
    """Whether one setting of Ray's fits all loads."""
    fixed = one_setting(comparisons)

    def figures(one: Result) -> str:
        return f"{100 * one.served:.1f} %, {one.hours:.2f} h"

    rows = []
    for one in comparisons:
        ours, default, best = map(figures, (one.ours, one.results[RAY_DEFAULT], one.ray_best))
        rows.append((one.load, ours, default, best, one.ray_best.policy, figures(one.results[fixed])))
    header = ("load", "ours", "Ray's default", "Ray's best for the load", "its setting", fixed)
    note = (
        f"requests in time, replica-hours; of Ray's settings, {fixed} serves at least as many requests in time "
        f"as ours (within {100 * TOLERANCE:g} points) under the most loads"
    )
    return Table("Ray's policy over its own settings", header, tuple(rows), note)
