"""One simulated run: what it is made of, and what is kept of it."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from loadtests.arrivals import poisson
from loadtests.experiments.routing.arms import Arm
from loadtests.experiments.routing.constants import RAMP_FULL, RAMP_STEPS, RAMP_WINDOW, Load, Shape
from loadtests.experiments.routing.fleet import Fleet, Outcome, Record
from loadtests.experiments.routing.workloads import Workload, rising
from loadtests.stats import mean, quantile


@dataclass(frozen=True, slots=True)
class Run:
    """One arm, one seed. The rate of a ``saturated`` run rises; others end with their last request.

    ``workload`` gets shape, arrival times and seed. ``first`` replicas are there from the beginning and the
    rest of the load's join after the warm-up; 0 is all.
    """

    name: str
    workload: Callable[[Shape, Sequence[float], int], Workload]
    shape: Shape
    load: Load
    arm: Arm = Arm.PREFIX
    seed: int = 1
    saturated: bool = False
    ingresses: int = 1
    first: int = 0

    @property
    def until(self) -> float:
        """When the last request arrives."""
        return self.load.warm_up + self.load.seconds

    def times(self) -> list[float]:
        """When requests arrive by themselves."""
        if not self.load.rate:
            return []
        arrivals = rising if self.saturated else poisson
        return list(arrivals(self.load.rate, self.until, Random(f"arrivals {self.seed}")))

    def marks(self) -> list[float]:
        if not self.saturated:
            return [self.load.warm_up, self.until]
        return [self.until * step / RAMP_STEPS for step in range(RAMP_STEPS + 1)]


@dataclass(slots=True)
class Summary:
    """Figures of one run after its warm-up; of a saturated run, of the window in which it generated most."""

    throughput: float  # generated tokens per second
    hit_rate: float  # cached share of the prompt tokens of requests that started
    itl: float  # mean seconds between tokens, over requests
    ttft: dict[str, array[float]]  # seconds to the first token, by kind of request
    balance: float  # tokens of the busiest replica over the mean
    unfinished: int
    filled: bool  # whether a saturated run came to more requests that wait than run
    replicas_used: int  # that got any request
    kept: float  # share of the later turns of conversations that went where the turn before went
    kept_tokens: float  # share of their prompt tokens that was cached
    choices: list[tuple[float, int]] = field(default_factory=list)
    """When and where requests were routed; only for runs in which replicas join."""


def ttft(summaries: Sequence[Summary], share: float, kind: str | None = None) -> float:
    """That quantile of the seconds to the first token, over runs, of one kind of request or of all."""
    times = (of for one in summaries for name, of in one.ttft.items() if kind in (None, name))
    return quantile([at for of in times for at in of], share)


def simulate(run: Run) -> Summary:
    """Run it; takes seconds to a minute."""
    collecting = gc.isenabled()
    gc.disable()  # prefix trees are many objects that live long
    try:
        load = run.load
        first = run.first or load.replicas
        fleet = Fleet(
            run.arm,
            run.workload(run.shape, run.times(), run.seed),
            load.replica,
            replicas=first,
            ingresses=run.ingresses,
            seed=run.seed,
            joins={load.warm_up: load.replicas - first},
        )
        until = run.until if run.saturated else None
        return _summary(run, fleet.run(until, run.marks(), full=RAMP_FULL if run.saturated else 0))
    finally:
        if collecting:
            gc.enable()


def _summary(run: Run, outcome: Outcome) -> Summary:
    marks = outcome.marks
    before, after = marks[0], marks[1]
    if run.saturated:
        steps = min(RAMP_WINDOW, len(marks) - 1)
        windows = zip(marks, marks[steps:], strict=False)
        before, after = max(windows, key=lambda window: window[1].generated - window[0].generated)
    start, until = before.at, after.at
    records = outcome.records
    counted = [one for one in records if start <= (one.last if run.saturated else one.job.arrival) < until]
    first: dict[str, array[float]] = {}
    work: dict[int, int] = {}
    for record in counted:
        first.setdefault(record.job.kind, array("d")).append(record.ttft)
        tokens = len(record.job.prompt.tokens) + record.output
        work[record.replica] = work.get(record.replica, 0) + tokens
    queried = after.queried - before.queried
    kept, kept_tokens = _kept(counted, records)
    return Summary(
        throughput=(after.generated - before.generated) / (until - start) if until > start else 0.0,
        hit_rate=(after.hit - before.hit) / queried if queried else 0.0,
        itl=mean([record.itl for record in counted]),
        ttft=first,
        balance=max(work.values()) * run.load.replicas / sum(work.values()) if work else 0.0,
        unfinished=outcome.unfinished,
        filled=outcome.filled or not run.saturated,
        replicas_used=len(work),
        kept=kept,
        kept_tokens=kept_tokens,
        choices=outcome.choices if run.first else [],
    )


def _kept(counted: Sequence[Record], records: Sequence[Record]) -> tuple[float, float]:
    at = {(record.job.session, record.job.turn): record.replica for record in records}
    later = [record for record in counted if record.job.turn > 0]
    if not later:
        return 1.0, 1.0
    same = sum(at[record.job.session, record.job.turn - 1] == record.replica for record in later)
    cached = sum(record.cached for record in later)
    return same / len(later), cached / sum(len(record.job.prompt.tokens) for record in later)
