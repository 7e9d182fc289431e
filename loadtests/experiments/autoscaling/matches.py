"""A policy by name against a load by name: what one process runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from loadtests.experiments.autoscaling import policies, workloads
from loadtests.experiments.autoscaling.constants import (
    FLEET,
    MAX_REPLICAS,
    QUICK_REPORT_DELAY_S,
    QUICK_REPORT_EVERY_S,
    RATE_OF_ONE,
    TRACE_TIMES,
)
from loadtests.experiments.autoscaling.policies import ScalingPolicy
from loadtests.experiments.autoscaling.runs import Outcome, simulate
from loadtests.experiments.autoscaling.workloads import Workload

OURS = "kv demand"
LOADS: dict[str, Callable[[int], Workload]] = {
    "recorded": workloads.day,
    "step x3": workloads.step_up,
    "saw-tooth": workloads.saw_tooth,
    "idle, burst": workloads.burst,
    "long decode": workloads.long_decode,
    "long prompts": workloads.long_prompts,
    "short chat": workloads.short_chat,
    "thousand": lambda seed: workloads.many(seed, FLEET, 3_600.0),
}
SIZED_LOADS: dict[str, Callable[[int, int], Workload]] = {
    "constant": lambda seed, size: workloads.constant(seed, RATE_OF_ONE * size),
    "prompts x10": lambda seed, size: workloads.overload(seed, RATE_OF_ONE * size),
}
"""Loads for about as many replicas as follow the name."""
RAY_DEFAULT = policies.ray_name(2, 30, 600)
"""As Ray Serve has it: ongoing requests of a replica, seconds before an up and before a down."""
_SETTINGS = [
    (target, *delays)
    for target, delays in product((2, 4, 8, 16, 32, 64, 128, 192), ((30, 600), (30, 120), (5, 120)))
]
RAY_SWEEP = tuple(policies.ray_name(*setting) for setting in _SETTINGS)
POLICIES: dict[str, Callable[[], ScalingPolicy]] = {
    OURS: policies.KvDemand,
    "occupancy": policies.Occupancy,
    "static": partial(policies.Static, MAX_REPLICAS),
    **{
        policies.ray_name(*setting): partial(policies.RayDefault, MAX_REPLICAS, *setting)
        for setting in _SETTINGS
    },
}
COMPARED = (OURS, "occupancy", *RAY_SWEEP)


@dataclass(frozen=True, slots=True)
class Match:
    """Cheap to send to another process. ``quick`` measures the reaction: see the constants of that name."""

    load: str
    policy: str
    seed: int = 1
    first: int = 2
    trace: Path | None = None
    times: int = TRACE_TIMES
    most: int = MAX_REPLICAS
    quick: bool = False

    def workload(self) -> Workload:
        """Make the requests.

        Raises:
            ConfigError: a trace that cannot be read.
        """
        if self.trace is not None:
            return workloads.trace(self.trace, self.times, self.seed)
        name, _, size = self.load.rpartition(" ")
        if name in SIZED_LOADS:
            return SIZED_LOADS[name](self.seed, int(size))
        return LOADS[self.load](self.seed)

    def run(self) -> Outcome:
        """Simulate it."""
        workload, policy = self.workload(), POLICIES[self.policy]()
        if not self.quick:
            return simulate(workload, policy, self.first, self.most)
        return simulate(
            workload,
            policy,
            self.first,
            self.most,
            every_s=QUICK_REPORT_EVERY_S,
            delay_s=QUICK_REPORT_DELAY_S,
            aftermath_s=0.0,
        )
