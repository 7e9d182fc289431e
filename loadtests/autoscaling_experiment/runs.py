"""One policy against one workload, and what came of it."""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from app.autoscaling.snapshot import ReplicaStats
from loadtests.autoscaling_experiment.constants import (
    MAX_REPLICAS,
    REPORT_DELAY_S,
    REPORT_EVERY_S,
    STARTUP_S,
    TICK_S,
    TPOT_TARGET_S,
    TTFT_TARGET_S,
)
from loadtests.autoscaling_experiment.fleet import Fleet
from loadtests.autoscaling_experiment.policies import ScalingPolicy, View
from loadtests.autoscaling_experiment.workloads import Workload

AFTERMATH_S = 600.0
"""How long requests may take to end after the last has come."""


@dataclass(slots=True)
class Outcome:
    """Figures of one run. ``series``: demand, target and running for each second; arrivals, and 1 for those in
    time.
    """

    policy: str
    workload: str
    served: float  # share of the requests whose first token and pace were within the targets
    replica_hours: float
    ups: int
    downs: int
    reversals: int
    worst_step: int  # replicas stopped by one decision beyond what is allowed
    preemptions: int
    mean_replicas: float
    ttft_p99: float
    cpu_s: float  # processor time of the simulation
    series: dict[str, list[float]] = field(default_factory=dict)


def simulate(
    workload: Workload,
    policy: ScalingPolicy,
    first: int = 1,
    most: int = MAX_REPLICAS,
    startup_s: float = STARTUP_S,
) -> Outcome:
    """Run a workload to its end, or ``AFTERMATH_S`` beyond it; replica-hours count until its last arrival."""
    began = time.process_time()
    fleet = Fleet(workload, most, first, startup_s)
    late: deque[tuple[float, dict[int, ReplicaStats]]] = deque()
    series: dict[str, list[float]] = {"demand": [], "target": [], "running": []}
    moves: list[int] = []
    worst_step = 0
    ticks = round(REPORT_EVERY_S / TICK_S)
    count = 0
    hours = 0.0
    reports: dict[int, ReplicaStats] = {}
    while fleet.now < workload.seconds or (not fleet.idle and fleet.now < workload.seconds + AFTERMATH_S):
        if count % ticks == 0:
            late.append((fleet.now + REPORT_DELAY_S, fleet.reports()))
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
                if change < 0:
                    worst_step = max(worst_step, -change - max(1, int(0.1 * fleet.target)))
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
    pace = (fleet.done - fleet.first) / np.maximum(workload.output - 1, 1)
    # Half a microsecond for sums of floats.
    good = (wait <= TTFT_TARGET_S) & (pace <= TPOT_TARGET_S + 5e-7) & np.isfinite(fleet.done)
    series["arrival"] = workload.arrival.tolist()
    series["good"] = good.astype(float).tolist()
    return Outcome(
        policy.name,
        workload.name,
        float(good.mean()) if len(good) else 1.0,
        hours,
        moves.count(1),
        moves.count(-1),
        sum(a != b for a, b in itertools.pairwise(moves)),
        worst_step,
        fleet.preemptions,
        float(np.mean(series["running"])),
        float(np.quantile(wait, 0.99)) if len(wait) else 0.0,
        time.process_time() - began,
        series,
    )
