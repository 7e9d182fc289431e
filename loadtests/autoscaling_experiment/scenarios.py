"""The parts of the autoscaling experiment: which policies meet which loads, and what must come of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from app.autoscaling.kv_demand import ScalingState, decide
from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.snapshot import ReplicaStats, Snapshot
from loadtests.autoscaling_experiment import policies, workloads
from loadtests.autoscaling_experiment.constants import MAX_REPLICAS, STARTUP_S
from loadtests.autoscaling_experiment.policies import ScalingPolicy
from loadtests.autoscaling_experiment.runs import Outcome, simulate
from loadtests.autoscaling_experiment.workloads import Workload
from loadtests.findings import Findings, Plot, Table
from loadtests.report import Figure

OURS = "kv demand"
TRACE_TIMES = 30
SEEDS = 10
FLAP_REPLICAS = range(1, 11)
_RATE_OF_ONE = 7.5
"""Chat requests per second for each replica that there will be, about."""
FLEET = 1_000


@dataclass(frozen=True, slots=True)
class Run:
    """A policy by name against a load by name: cheap to send to another process."""

    load: str
    policy: str
    seed: int = 1
    first: int = 2
    trace: Path | None = None
    times: int = TRACE_TIMES

    def workload(self) -> Workload:
        """Make the requests."""
        if self.trace is not None:
            return workloads.trace(self.trace, self.times, self.seed)
        if self.load.startswith("constant"):
            return workloads.constant(self.seed, _RATE_OF_ONE * float(self.load.split()[1]))
        return LOADS[self.load](self.seed)

    def run(self) -> Outcome:
        """Simulate it."""
        most = FLEET + 200 if self.load == "thousand" else MAX_REPLICAS
        return simulate(self.workload(), POLICIES[self.policy](), self.first, most)


LOADS: dict[str, Callable[[int], Workload]] = {
    "day": workloads.day,
    "step x3": workloads.step_up,
    "saw-tooth": workloads.saw_tooth,
    "idle, burst": workloads.burst,
    "long decode": workloads.long_decode,
    "long prompts": workloads.long_prompts,
    "thousand": lambda seed: workloads.many(seed, FLEET, 3_600.0),
}
POLICIES: dict[str, Callable[[], ScalingPolicy]] = {
    OURS: policies.KvDemand,
    "occupancy": policies.Occupancy,
    "saturation": policies.Saturation,
    "ray slow": lambda: policies.RayDefault(MAX_REPLICAS, 32, 30, 600),
    "ray quick": lambda: policies.RayDefault(MAX_REPLICAS, 32, 5, 120),
    "static": lambda: policies.Static(MAX_REPLICAS),
}
COMPARED = (OURS, "occupancy", "saturation", "ray slow", "ray quick")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Runs, and what follows from their outcomes, which come in the same order."""

    runs: tuple[Run, ...]
    judge: Callable[[Sequence[Outcome]], Findings]


def _row(outcome: Outcome) -> tuple[str, ...]:
    return (
        outcome.policy,
        f"{100 * outcome.served:.2f}",
        f"{outcome.replica_hours:.2f}",
        f"{outcome.ttft_p99:.2f}",
        f"{outcome.ups}",
        f"{outcome.downs}",
        f"{outcome.reversals}",
        f"{outcome.preemptions}",
    )


_HEADER = ("policy", "in time %", "replica-h", "TTFT p99 s", "ups", "downs", "reversals", "preempted")


def _table(title: str, outcomes: Sequence[Outcome], note: str = "") -> Table:
    return Table(title, _HEADER, tuple(map(_row, outcomes)), note)


def _plot(name: str, outcome: Outcome) -> Plot:
    seconds = tuple(float(second) for second in range(len(outcome.series["target"])))
    arrival, good = np.array(outcome.series["arrival"]), np.array(outcome.series["good"])
    edges = np.arange(0.0, seconds[-1] + 30.0, 30.0)
    counts = np.histogram(arrival, edges)[0]
    share = np.histogram(arrival, edges, weights=good)[0] / np.maximum(counts, 1)
    most = max(outcome.series["target"])
    in_time = tuple(float(most * one) for one, count in zip(share, counts, strict=True) if count)
    middles = tuple(float(edge + 15.0) for edge, count in zip(edges, counts, strict=False) if count)
    return Plot(
        f"autoscaling-{name}",
        f"{outcome.workload}: {outcome.policy}",
        "seconds",
        "replicas (in time: the top is 100 %)",
        {
            "demand, in pools": (seconds, tuple(outcome.series["demand"])),
            "target": (seconds, tuple(outcome.series["target"])),
            "running": (seconds, tuple(outcome.series["running"])),
            "in time": (middles, in_time),
        },
    )


def _stopped(name: str, outcomes: Sequence[Outcome]) -> Figure:
    worst = max(one.worst_step for one in outcomes if one.policy == OURS)
    return Figure(f"{name}: replicas stopped at once beyond max(1, 10 %)", worst, "", 0, at_most=True)


def _compare(load: str, title: str) -> Scenario:
    """A load without a bar of its own."""
    runs = tuple(Run(load, policy) for policy in COMPARED)

    def judge(outcomes: Sequence[Outcome]) -> Findings:
        slug = load.replace(", ", "-").replace(" ", "-")
        return Findings([_table(title, outcomes)], [_stopped(load, outcomes)], [_plot(slug, outcomes[0])])

    return Scenario(runs, judge)


def _recorded(trace: Path | None, times: int) -> Scenario:
    """The trace, or a synthetic day where there is none, also against a static fleet for its peak."""
    first = 10 if trace is not None else 2
    name = f"{trace.stem} x {times}" if trace is not None else "day"
    runs = tuple(Run("day", policy, first=first, trace=trace, times=times) for policy in (*COMPARED, "static"))

    def judge(outcomes: Sequence[Outcome]) -> Findings:
        by_name = dict(zip((*COMPARED, "static"), outcomes, strict=True))
        ours, ray = by_name[OURS], by_name["ray slow"]
        peak = int(max(ours.series["target"]))
        # A static fleet of another size costs in proportion.
        static = by_name["static"].replica_hours * peak / MAX_REPLICAS
        return Findings(
            [_table(f"{name}, {STARTUP_S:g} s to start a replica", outcomes)],
            [
                Figure(f"{name}: in time", 100 * ours.served, " %", 97.0),
                Figure(
                    f"{name}: replica-hours, of Ray's", ours.replica_hours / ray.replica_hours, "", 0.80, True
                ),
                Figure(f"{name}: Ray's requests in time", 100 * ray.served, " %"),
                Figure(
                    f"{name}: in time, of what a static fleet of {MAX_REPLICAS} reaches",
                    100 * ours.served / by_name["static"].served,
                    " %",
                    95.0,
                ),
                Figure(
                    f"{name}: replica-hours, of a static peak of {peak}",
                    ours.replica_hours / static,
                    "",
                    0.75,
                    True,
                ),
                _stopped(name, outcomes),
            ],
            [_plot("recorded", ours), _plot("recorded-ray", ray)],
        )

    return Scenario(runs, judge)


def _kv_bound() -> Scenario:
    seeds = (1, 2, 3)
    runs = tuple(Run("long decode", policy, seed) for policy in (OURS, "ray quick") for seed in seeds)

    def judge(outcomes: Sequence[Outcome]) -> Findings:
        ours, ray = (outcomes[i : i + len(seeds)] for i in range(0, len(outcomes), len(seeds)))
        hours = sum(one.replica_hours for one in ours) / sum(one.replica_hours for one in ray)
        return Findings(
            [_table("Long answers: KV-bound", outcomes, f"seeds {', '.join(map(str, seeds))} of each")],
            [
                Figure(
                    "long decode: in time, least of three seeds", 100 * min(o.served for o in ours), " %", 99.0
                ),
                Figure("long decode: replica-hours, of Ray's", hours, "", 0.85, True),
                _stopped("long decode", outcomes),
            ],
            [_plot("long-decode", ours[0])],
        )

    return Scenario(runs, judge)


def _prefill_bound() -> Scenario:
    runs = tuple(Run("long prompts", policy, first=6) for policy in COMPARED)

    def judge(outcomes: Sequence[Outcome]) -> Findings:
        ours, occupancy = outcomes[0], outcomes[1]
        return Findings(
            [_table("Long prompts: prefill-bound", outcomes)],
            [
                Figure(
                    "long prompts: in time, more than by occupancy",
                    100 * (ours.served - occupancy.served),
                    " points",
                    20.0,
                ),
                _stopped("long prompts", outcomes),
            ],
            [_plot("long-prompts", ours), _plot("long-prompts-occupancy", occupancy)],
        )

    return Scenario(runs, judge)


def _constant() -> Scenario:
    runs = tuple(
        Run(f"constant {size}", OURS, seed, first=size)
        for size in FLAP_REPLICAS
        for seed in range(1, SEEDS + 1)
    )

    def judge(outcomes: Sequence[Outcome]) -> Findings:
        rows = []
        for place, size in enumerate(FLAP_REPLICAS):
            some = outcomes[place * SEEDS : (place + 1) * SEEDS]
            rows.append(
                (
                    f"{_RATE_OF_ONE * size:g} requests/s",
                    f"{sum(one.mean_replicas for one in some) / SEEDS:.1f}",
                    f"{max(one.reversals for one in some)}",
                    f"{sum(one.reversals for one in some) / SEEDS:.1f}",
                    f"{100 * min(one.served for one in some):.2f}",
                )
            )
        header = ("constant load", "mean replicas", "most reversals", "mean", "least in time %")
        worst = max(one.reversals for one in outcomes)
        return Findings(
            [Table("30 minutes of constant load, ten seeds of each", header, tuple(rows))],
            [
                Figure("constant: most reversals in 30 minutes", worst, "", 2, at_most=True),
                _stopped("constant", outcomes),
            ],
        )

    return Scenario(runs, judge)


def _reaction() -> Scenario:
    runs = tuple(Run("step x3", policy) for policy in COMPARED)

    def judge(outcomes: Sequence[Outcome]) -> Findings:
        ours = outcomes[0]
        middle = round(1_800.0 / 3)
        before = ours.series["target"][middle]
        delay = next(
            (s - middle for s, t in enumerate(ours.series["target"]) if s > middle and t > before), 1e9
        )
        return Findings(
            [_table("Three times the rate in the middle third", outcomes)],
            [
                Figure("step x3: seconds from the step to a new target", delay, " s"),
                _stopped("step x3", outcomes),
            ],
            [_plot("step", ours)],
        )

    return Scenario(runs, judge)


def _thousand() -> Scenario:
    runs = (Run("thousand", OURS, first=FLEET),)

    def judge(outcomes: Sequence[Outcome]) -> Findings:
        milliseconds = 1e3 * decision_seconds(FLEET)
        return Findings(
            [_table("A thousand replicas for an hour", outcomes)],
            [
                Figure("thousand: processor seconds of the simulation", outcomes[0].cpu_s, " s", 60.0, True),
                Figure("thousand: milliseconds of a decision", milliseconds, " ms", 5.0, True),
                _stopped("thousand", outcomes),
            ],
        )

    return Scenario(runs, judge)


def decision_seconds(replicas: int, repeats: int = 200) -> float:
    """Median processor time of a decision among so many replicas whose load varies."""
    draw = np.random.default_rng(1)
    config, state = ScalingConfig(), ScalingState()
    seconds = []
    arrived = np.zeros(replicas)
    for turn in range(repeats):
        arrived += draw.random(replicas) * 1e4
        columns = draw.random((replicas, 3))
        reports = {
            place: ReplicaStats(25_000, a * 15_000, b * 100, 500, 60, c * 1e3, came, 20_000, 0.02, 0)
            for place, ((a, b, c), came) in enumerate(zip(columns.tolist(), arrived.tolist(), strict=True))
        }
        snapshot = Snapshot(float(turn), replicas, replicas, 1, 2 * replicas, reports)
        began = time.process_time()
        decide(snapshot, config, state)
        seconds.append(time.process_time() - began)
    return float(np.median(seconds))


def scenarios(trace: Path | None, times: int) -> dict[str, Scenario]:
    """All parts, by name."""
    return {
        "recorded": _recorded(trace, times),
        "kv-bound": _kv_bound(),
        "prefill-bound": _prefill_bound(),
        "constant": _constant(),
        "step": _reaction(),
        "saw-tooth": _compare("saw-tooth", "Six ramps that end at once"),
        "burst": _compare("idle, burst", "Idle, ten minutes of load, idle"),
        "thousand": _thousand(),
    }
