"""One simulated run: what it is made of, and what is kept of it."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean

from loadtests.experiments.routing.arms import Arm
from loadtests.experiments.routing.constants import RAMP_FULL, RAMP_STEPS, RAMP_WINDOW, Served, Shape
from loadtests.experiments.routing.fleet import Fleet, Mark, Outcome, Record
from loadtests.experiments.routing.workloads import (
    Conversations,
    Workload,
    burst,
    mixed,
    poisson,
    rising,
    shared,
    unshared,
)
from loadtests.in_processes import in_processes

Make = Callable[["Run"], Workload]

WORKLOADS: dict[str, Make] = {
    "shared": lambda run: shared(run.shape, run.times(), run.seed, vary=False),
    "shared, lengths vary": lambda run: shared(run.shape, run.times(), run.seed, vary=True),
    "unshared": lambda run: unshared(run.shape, run.times(), run.seed),
    "mixed": lambda run: mixed(run.shape, run.times(), run.seed),
    "burst of distinct prefixes": lambda run: burst(run.shape, run.seed, distinct=True),
    "burst of one prefix": lambda run: burst(run.shape, run.seed, distinct=False),
    "conversations": lambda run: Conversations(run.shape, run.times(), run.seed),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One arm, one seed. The rate of a ``saturated`` run rises; others end with their last request.

    ``first`` replicas are there from the beginning and the rest of the load's join after the warm-up; 0 is all.
    """

    name: str
    workload: str
    shape: Shape
    load: Served
    arm: Arm
    seed: int
    saturated: bool = False
    ingresses: int = 1
    first: int = 0

    @property
    def until(self) -> float:
        """When the last request arrives."""
        return self.load.warm_up + self.load.seconds

    def times(self) -> list[float]:
        """When requests arrive by themselves."""
        arrivals = rising if self.saturated else poisson
        return arrivals(self.load.rate, self.until, Random(f"arrivals {self.seed}"))

    def marks(self) -> list[float]:
        """When sums are taken."""
        if not self.saturated:
            return [self.load.warm_up, self.until]
        return [self.until * step / RAMP_STEPS for step in range(RAMP_STEPS + 1)]


@dataclass(slots=True)
class Summary:
    """Figures of one run, or of several with different seeds.

    They are of the time after the warm-up; of a saturated run, of the window in which it generated most.
    """

    throughput: float
    """Generated tokens per second."""
    hit_rate: float
    """Share of the prompt tokens of started requests that was cached."""
    itl: float
    """Mean seconds between tokens, over requests."""
    ttft: dict[str, array[float]]
    """Seconds to the first token, by kind of request."""
    balance: float
    """Tokens of the busiest replica over the mean."""
    preemptions: float
    offered: int
    unfinished: int
    filled: bool
    """Whether each saturated run came to more requests that wait than run."""
    replicas_used: int
    """That got any request."""
    kept: float
    """Share of the later turns of conversations that went where the turn before went."""
    kept_tokens: float
    """Share of their prompt tokens that was cached."""
    choices: list[tuple[float, int]] = field(default_factory=list)
    """When and where requests were routed; only for runs in which replicas join."""
    took: float = field(default=0.0, compare=False)
    """Seconds of real time that the simulation took."""

    def quantile(self, share: float, kind: str | None = None) -> float:
        """Of the seconds to the first token, of one kind of request or of all."""
        times = sorted(at for name, of in self.ttft.items() if kind in (None, name) for at in of)
        return times[min(len(times) - 1, int(share * len(times)))] if times else float("nan")


def simulate(run: Run) -> Summary:
    """Run it; takes seconds to a minute."""
    collecting = gc.isenabled()
    began = time.monotonic()
    gc.disable()  # prefix trees are many objects that live long
    try:
        load = run.load
        first = run.first or load.replicas
        fleet = Fleet(
            run.arm,
            WORKLOADS[run.workload](run),
            replicas=first,
            blocks=load.blocks,
            ingresses=run.ingresses,
            seed=run.seed,
            joins={load.warm_up: load.replicas - first} if first < load.replicas else None,
        )
        until = run.until if run.saturated else None
        summary = _summary(run, fleet.run(until, run.marks(), full=RAMP_FULL if run.saturated else 0))
        summary.took = time.monotonic() - began
        return summary
    finally:
        if collecting:
            gc.enable()


def simulate_all(runs: Sequence[Run], workers: int) -> Iterator[tuple[int, Summary]]:
    """Run all, several at a time; yield the place of each that has ended and what came of it."""
    return in_processes(simulate, runs, workers)


def merge(summaries: Sequence[Summary]) -> Summary:
    """Means over seeds; times and counts together."""
    ttft: dict[str, array[float]] = {}
    for one in summaries:
        for kind, times in one.ttft.items():
            ttft.setdefault(kind, array("d")).extend(times)
    return Summary(
        throughput=fmean(one.throughput for one in summaries),
        hit_rate=fmean(one.hit_rate for one in summaries),
        itl=fmean(one.itl for one in summaries),
        ttft=ttft,
        balance=fmean(one.balance for one in summaries),
        preemptions=fmean(one.preemptions for one in summaries),
        offered=sum(one.offered for one in summaries),
        unfinished=sum(one.unfinished for one in summaries),
        filled=all(one.filled for one in summaries),
        replicas_used=max(one.replicas_used for one in summaries),
        kept=fmean(one.kept for one in summaries),
        kept_tokens=fmean(one.kept_tokens for one in summaries),
    )


def _summary(run: Run, outcome: Outcome) -> Summary:
    before, after = _window(outcome.marks) if run.saturated else (outcome.marks[0], outcome.marks[1])
    generated = _gained(before.generated, after.generated)
    queried = sum(_gained(before.queried, after.queried))
    hit = sum(_gained(before.hit, after.hit))
    start, until = before.at, after.at
    if run.saturated:
        counted = [record for record in outcome.records if start <= record.last < until]
    else:
        counted = [record for record in outcome.records if start <= record.arrival < until]
    ttft: dict[str, array[float]] = {}
    for record in counted:
        ttft.setdefault(record.kind, array("d")).append(record.ttft)
    work: dict[int, int] = {}
    for record in counted:
        work[record.replica] = work.get(record.replica, 0) + record.prompt + record.output
    kept, kept_tokens = _kept(counted, outcome.records)
    return Summary(
        throughput=sum(generated) / (until - start) if until > start else 0.0,
        hit_rate=hit / queried if queried else 0.0,
        itl=fmean(record.itl for record in counted) if counted else 0.0,
        ttft=ttft,
        balance=max(work.values()) * run.load.replicas / sum(work.values()) if work else 0.0,
        preemptions=outcome.preemptions,
        offered=outcome.offered,
        unfinished=outcome.unfinished,
        filled=outcome.filled or not run.saturated,
        replicas_used=len(work),
        kept=kept,
        kept_tokens=kept_tokens,
        choices=outcome.choices if run.first else [],
    )


def _window(marks: Sequence[Mark]) -> tuple[Mark, Mark]:
    """Beginning and end of the window in which most was generated."""
    steps = min(RAMP_WINDOW, len(marks) - 1)
    pairs = list(zip(marks, marks[steps:], strict=False))
    return max(pairs, key=lambda pair: sum(_gained(pair[0].generated, pair[1].generated)))


def _gained(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Replicas that have joined in between began at 0."""
    return [now - (before[i] if i < len(before) else 0) for i, now in enumerate(after)]


def _kept(counted: Sequence[Record], records: Sequence[Record]) -> tuple[float, float]:
    at = {(record.session, record.turn): record.replica for record in records}
    later = [record for record in counted if record.turn > 0]
    if not later:
        return 1.0, 1.0
    same = sum(at[record.session, record.turn - 1] == record.replica for record in later)
    cached = sum(record.cached for record in later)
    return same / len(later), cached / sum(record.prompt for record in later)
