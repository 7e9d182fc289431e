"""Ours beside the clairvoyant, and beside Ray's policy: both at their defaults and at their best settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from loadtests.experiments.autoscaling.clairvoyant import CLAIRVOYANT
from loadtests.experiments.autoscaling.policies import OUR_SWEEP, OURS, RAY_DEFAULT, RAY_SWEEP
from loadtests.experiments.autoscaling.runs import Outcome
from loadtests.report import Figure

TOLERANCE = 0.005
"""A share of requests in time that is lower by at most this counts as the same."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """All policies under one load, each over all seeds: mean of hours, else the worst run."""

    load: str
    results: dict[str, Outcome]

    @property
    def ours(self) -> Outcome:
        return self.results[OURS]

    @property
    def ray_best(self) -> Outcome:
        """Of its settings that serve as our default, the cheapest; if none does, the one that serves most."""
        return self._best(RAY_SWEEP, self.ours.served)

    @property
    def ours_best(self) -> Outcome:
        """Of our settings that serve as Ray's best, the cheapest; if none does, the one that serves most."""
        return self._best(OUR_SWEEP, self.ray_best.served)

    @property
    def clairvoyant(self) -> Outcome:
        """Of its plans that serve as many as its best one does, the cheapest."""
        return self._best(CLAIRVOYANT, max(one.served for one in self._plans))

    def _best(self, policies: Iterable[str], served: float) -> Outcome:
        """The cheapest with so many in time; if there is none, the one with the most."""
        some = [self.results[policy] for policy in policies]
        serving = [one for one in some if one.served >= served - TOLERANCE]
        return min(serving or some, key=lambda one: (0.0 if serving else -one.served, one.replica_hours))

    def of_clairvoyant(self, policy: str) -> float:
        """Requests in time over those of the clairvoyant's best plan for at most as many replica-hours.

        Where each of its plans takes more: of the cheapest one.
        """
        mine = self.results[policy]
        plans = [one for one in self._plans if one.replica_hours <= mine.replica_hours]
        plans = plans or [min(self._plans, key=lambda one: one.replica_hours)]
        return mine.served / max(max(one.served for one in plans), 1e-9)

    @property
    def _plans(self) -> list[Outcome]:
        return [one for name, one in self.results.items() if name in CLAIRVOYANT]

    def figures(self) -> list[Figure]:
        """Ours and Ray's, at their defaults and best, and the clairvoyant's best."""
        shown = {"ours": OURS, f"Ray's default, {RAY_DEFAULT}": RAY_DEFAULT}
        shown[f"Ray's best here, {self.ray_best.policy}"] = self.ray_best.policy
        shown[f"our best here, {self.ours_best.policy}"] = self.ours_best.policy
        shown[self.clairvoyant.policy] = self.clairvoyant.policy
        return [figure for name, policy in shown.items() for figure in self.of(name, policy)]

    def of(self, name: str, policy: str) -> list[Figure]:
        one, what = self.results[policy], f"{self.load}: {name}"
        return [
            Figure(f"{what}: in time", 100 * one.served, "%"),
            Figure(f"{what}: replica-hours", one.replica_hours),
            Figure(
                f"{what}: in time, of the clairvoyant's with these hours",
                100 * self.of_clairvoyant(policy),
                "%",
            ),
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
            reversals=max(one.reversals for one in some),
            ttft_p99=max(one.ttft_p99 for one in some),
        )
    return Comparison(load, results)
