"""One policy against one workload, and what came of it."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from app.autoscaling.snapshot import ReplicaStats
from loadtests.experiments.autoscaling.constants import (
    MAX_REPLICAS,
    REPORT_DELAY_S,
    REPORT_EVERY_S,
    STARTUP_S,
    TICK_S,
    TPOT_TARGET_S,
    TTFT_TARGET_S,
)
from loadtests.experiments.autoscaling.fleet import Fleet, Floats
from loadtests.experiments.autoscaling.policies import ScalingPolicy, View
from loadtests.experiments.autoscaling.workloads import Workload

AFTERMATH_S = 600.0
"""How long requests may take to end after the last has come."""
IN_TIME_S = 30.0
"""Requests that come within so many seconds are one value of a series."""


@dataclass(slots=True)
class Outcome:
    """Figures of one run.

    ``series``: demand in pools, target and running replicas at each decision, and ``in time``, the share of the
    requests that came within each ``IN_TIME_S`` (not a number where none came).
    """

    policy: str
    workload: str
    served: float  # share of the requests whose first token and pace were within the targets
    replica_hours: float
    ups: int
    downs: int
    reversals: int
    most_stopped: float  # largest share of the fleet that one decision stopped, where it was not one replica
    reaction_s: float  # from the first request of an overload that waits to a higher target; else infinite
    preemptions: int
    mean_replicas: float
    ttft_p99: float
    cpu_s: float  # processor time of the simulation
    every_s: float  # between decisions
    series: dict[str, list[float]] = field(default_factory=dict)


def simulate(
    workload: Workload,
    policy: ScalingPolicy,
    first: int = 1,
    most: int = MAX_REPLICAS,
    startup_s: float = STARTUP_S,
    *,
    every_s: float = REPORT_EVERY_S,
    delay_s: float = REPORT_DELAY_S,
    aftermath_s: float = AFTERMATH_S,
) -> Outcome:
    """Run a workload to its end, or ``aftermath_s`` beyond it; replica-hours count until its last arrival.

    Reports are sampled every ``every_s`` seconds, each then followed by a decision, which sees those that are
    ``delay_s`` old.
    """
    began = time.process_time()
    fleet = Fleet(workload, most, first, startup_s)
    late: deque[tuple[float, dict[int, ReplicaStats]]] = deque()
    series: dict[str, list[float]] = {"demand": [], "target": [], "running": []}
    moves: list[int] = []
    most_stopped = 0.0
    ups: list[float] = []
    ticks = round(every_s / TICK_S)
    count = 0
    hours = 0.0
    reports: dict[int, ReplicaStats] = {}
    while fleet.now < workload.seconds or (not fleet.idle and fleet.now < workload.seconds + aftermath_s):
        if count % ticks == 0:
            late.append((fleet.now + delay_s, fleet.reports()))
            while late and late[0][0] <= fleet.now:
                reports = late.popleft()[1]
            names = set(fleet.names[fleet.serving & ~fleet.stopping].tolist())
            view = View(
                fleet.now,
                fleet.target,
                fleet.running,
                most,
                reports if reports.keys() <= names else {n: r for n, r in reports.items() if n in names},
                fleet.queued,
                fleet.ongoing,
            )
            target = policy(view)
            if target != fleet.target:
                change = target - fleet.target
                if fleet.now < workload.seconds:
                    moves.append(1 if change > 0 else -1)
                if change > 0:
                    ups.append(fleet.now)
                if change < -1:
                    most_stopped = max(most_stopped, -change / fleet.target)
                fleet.set_target(target)
            pool = fleet.service.pool_tokens
            series["demand"].append(float((fleet.held.sum() + fleet.lacking.sum()) / pool))
            series["target"].append(fleet.target)
            series["running"].append(fleet.running)
        fleet.tick()
        count += 1
        if fleet.now <= workload.seconds:
            hours = fleet.replica_seconds / 3600.0
    wait = fleet.first - workload.arrival
    ended = np.isfinite(fleet.done)
    pace = np.subtract(fleet.done, fleet.first, where=ended, out=np.full(len(ended), np.inf))
    pace /= np.maximum(workload.output - 1, 1)
    # Half a microsecond for sums of floats.
    good = (wait <= TTFT_TARGET_S) & (pace <= TPOT_TARGET_S + 5e-7)
    series["in time"] = _shares(workload.arrival, good)
    return Outcome(
        policy.name,
        workload.name,
        float(good.mean()) if len(good) else 1.0,
        hours,
        moves.count(1),
        moves.count(-1),
        sum(a != b for a, b in itertools.pairwise(moves)),
        most_stopped,
        _reaction(workload, wait - fleet.uncached / fleet.service.prefill_rate, ups),
        fleet.preemptions,
        float(np.mean(series["running"])),
        float(np.quantile(wait, 0.99, method="higher")) if len(wait) else 0.0,
        time.process_time() - began,
        every_s,
        series,
    )


def _shares(arrival: Floats, good: npt.NDArray[np.bool_]) -> list[float]:
    part = (arrival / IN_TIME_S).astype(np.int64)
    counts = np.bincount(part)
    sums = np.bincount(part, good.astype(float))
    return [
        float(one) if count else math.nan
        for one, count in zip(sums / np.maximum(counts, 1), counts, strict=True)
    ]


def _reaction(workload: Workload, waited: Floats, ups: list[float]) -> float:
    """Seconds until the target rose; 0 where it did so between the overload's start and the first wait.

    A request waits if its prompt takes a tick longer than its tokens alone would.
    """
    late = workload.arrival[(workload.arrival >= workload.overload_at) & (waited > TICK_S)]
    answers = [up for up in ups if up >= workload.overload_at]
    if not len(late) or not answers:
        return math.inf
    return max(0.0, answers[0] - float(late[0]))
