"""Ours beside Ray's policy, whose settings are swept for each load: at its defaults and at its best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from loadtests.experiments.autoscaling.policies import OURS, RAY_DEFAULT, RAY_SWEEP
from loadtests.experiments.autoscaling.runs import Outcome
from loadtests.report import Figure

TOLERANCE = 0.005
"""A share of requests in time that is lower by at most this counts as the same."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All policies under one load, each over all seeds: means of hours and moves, else the worst run."""

    load: str
    results: dict[str, Outcome]

    @property
    def ours(self) -> Outcome:
        return self.results[OURS]

    def serves(self, policy: str) -> bool:
        """Whether at least as many requests are in time as with ours."""
        return self.results[policy].served >= self.ours.served - TOLERANCE

    @property
    def ray_best(self) -> Outcome:
        """Of the settings that serve as ours, the cheapest; if none does, the one with the most in time."""
        swept = [self.results[policy] for policy in RAY_SWEEP]
        serving = [one for one in swept if self.serves(one.policy)]
        if serving:
            return min(serving, key=lambda one: one.replica_hours)
        return max(swept, key=lambda one: (one.served, -one.replica_hours))

    def figures(self) -> list[Figure]:
        """Ours, Ray's default and best, and the policies without settings."""
        shown = {"ours": OURS, f"Ray's default, {RAY_DEFAULT}": RAY_DEFAULT}
        shown[f"Ray's best here, {self.ray_best.policy}"] = self.ray_best.policy
        shown |= {name: name for name in self.results if name not in (OURS, *RAY_SWEEP)}
        return [figure for name, policy in shown.items() for figure in self.of(name, policy)]

    def of(self, name: str, policy: str) -> list[Figure]:
        one, what = self.results[policy], f"{self.load}: {name}"
        return [
            Figure(f"{what}: in time", 100 * one.served, " %"),
            Figure(f"{what}: replica-hours", one.replica_hours),
            Figure(f"{what}: TTFT p99", one.ttft_p99, " s"),
            Figure(f"{what}: changes of the target", one.moves),
        ]


def compared(load: str, runs: Sequence[tuple[str, Outcome]]) -> Comparison:
    """Sum up the runs (policy, outcome) of one load."""
    results = {}
    for policy in dict.fromkeys(policy for policy, _ in runs):
        some = [outcome for name, outcome in runs if name == policy]
        results[policy] = replace(
            some[0],
            served=min(one.served for one in some),
            replica_hours=fmean(one.replica_hours for one in some),
            moves=fmean(one.moves for one in some),
            reversals=max(one.reversals for one in some),
            peak=max(one.peak for one in some),
            ttft_p99=max(one.ttft_p99 for one in some),
        )
    return Comparison(load, results)


def one_setting(comparisons: Sequence[Comparison]) -> str:
    """Ray's setting that serves as ours under the most loads; among equals, with the fewest replica-hours."""

    def rank(policy: str) -> tuple[int, float]:
        served = sum(one.serves(policy) for one in comparisons)
        hours = sum(one.results[policy].replica_hours / one.ours.replica_hours for one in comparisons)
        return -served, hours

    return min(RAY_SWEEP, key=rank)


def overview(comparisons: Sequence[Comparison]) -> list[Figure]:
    """How the one setting of Ray's does that fits most loads."""
    fixed = one_setting(comparisons)
    return [figure for one in comparisons for figure in one.of(f"{fixed}, which fits most loads", fixed)]
