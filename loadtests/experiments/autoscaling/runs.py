"""One policy against one workload, and what came of it."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from app.autoscaling.snapshot import ReplicaStats
from loadtests.experiments.autoscaling import constants as given
from loadtests.experiments.autoscaling.fleet import Fleet, Floats
from loadtests.experiments.autoscaling.policies import ScalingPolicy, View
from loadtests.experiments.autoscaling.workloads import Workload

AFTERMATH_S = 600.0
"""How long requests may take to end after the last has come."""


@dataclass(slots=True)
class Outcome:
    policy: str
    served: float  # share of the requests whose first token and pace were within the targets
    replica_hours: float
    reversals: int  # of the target's changes while requests came
    most_stopped: float  # largest share of the fleet that one decision stopped, where it was not one replica
    reaction_s: float  # from the first request of an overload that waits to a higher target; else infinite
    ttft_p99: float


def simulate(
    workload: Workload,
    policy: ScalingPolicy,
    first: int = 1,
    most: int = given.MAX_REPLICAS,
    startup_s: float = given.STARTUP_S,
    *,
    every_s: float = given.REPORT_EVERY_S,
    delay_s: float = given.REPORT_DELAY_S,
    aftermath_s: float = AFTERMATH_S,
) -> Outcome:
    """Run a workload to its end, or ``aftermath_s`` beyond it; replica-hours count until its last arrival.

    Reports are sampled every ``every_s`` seconds, each then followed by a decision, which sees those that are
    ``delay_s`` old.
    """
    fleet = Fleet(workload, most, first, startup_s)
    late: deque[tuple[float, dict[int, ReplicaStats]]] = deque()
    moves: list[int] = []
    most_stopped = 0.0
    ups: list[float] = []
    ticks = round(every_s / given.TICK_S)
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
        fleet.tick()
        count += 1
        if fleet.now <= workload.seconds:
            hours = fleet.replica_seconds / 3600.0
    wait = fleet.first - workload.arrival
    ended = np.isfinite(fleet.done)
    pace = np.subtract(fleet.done, fleet.first, where=ended, out=np.full(len(ended), np.inf))
    pace /= np.maximum(workload.output - 1, 1)
    # Half a microsecond for sums of floats.
    good = (wait <= given.TTFT_TARGET_S) & (pace <= given.TPOT_TARGET_S + 5e-7)
    return Outcome(
        policy.name,
        float(good.mean()) if len(good) else 1.0,
        hours,
        sum(a != b for a, b in itertools.pairwise(moves)),
        most_stopped,
        _reaction(workload, wait - fleet.uncached / fleet.service.prefill_rate, ups),
        float(np.quantile(wait, 0.99, method="higher")) if len(wait) else 0.0,
    )


def _reaction(workload: Workload, waited: Floats, ups: list[float]) -> float:
    """Seconds until the target rose; 0 where it did so between the overload's start and the first wait.

    A request waits if its prompt takes a tick longer than its tokens alone would.
    """
    late = workload.arrival[(workload.arrival >= workload.overload_at) & (waited > given.TICK_S)]
    answers = [up for up in ups if up >= workload.overload_at]
    if not len(late) or not answers:
        return math.inf
    return max(0.0, answers[0] - float(late[0]))
