"""The parts of the autoscaling experiment: which policies meet which loads, and what must come of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from app.autoscaling.kv_demand import ScalingState, decide
from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.snapshot import ReplicaStats, Snapshot
from loadtests.experiments.autoscaling import constants as given
from loadtests.experiments.autoscaling import workloads
from loadtests.experiments.autoscaling.clairvoyant import CLAIRVOYANT, Clairvoyant
from loadtests.experiments.autoscaling.comparison import compared
from loadtests.experiments.autoscaling.policies import OUR_SWEEP, OURS, POLICIES, RAY_SWEEP
from loadtests.experiments.autoscaling.runs import Outcome, simulate
from loadtests.experiments.autoscaling.workloads import Workload
from loadtests.report import Figure, most

IN_TIME, HOURS = 97.0, 1.25
"""Requests in time, in % of the clairvoyant's, at least; replica-hours over its own, at most."""
SEEDS = 3
FLAP_REPLICAS = range(1, 11)
STEADY = 5 * given.RATE_OF_ONE
"""Requests per second of the constant load that all policies meet."""
OVERLOADED = ((3, 20), (200, 5))
"""Replicas before the overload, seeds."""
QUICK = {"every_s": given.QUICK_REPORT_EVERY_S, "delay_s": given.QUICK_REPORT_DELAY_S, "aftermath_s": 0.0}


@dataclass(frozen=True, slots=True)
class Match:
    """A policy by its name, or a plan of the clairvoyant, against a load: what one process runs."""

    load: Callable[[int], Workload]  # by seed
    policy: str
    seed: int = 1
    first: int = 2
    most: int = given.MAX_REPLICAS
    options: Mapping[str, float] = field(default_factory=dict)

    def run(self) -> Outcome:
        load = self.load(self.seed)
        share = CLAIRVOYANT.get(self.policy)
        if share is None:
            policy = POLICIES[self.policy]()
        else:
            policy = Clairvoyant(load, share, self.first, self.most, given.STARTUP_S)
        return simulate(load, policy, self.first, self.most, **self.options)


@dataclass(slots=True)
class Judgment:
    """What follows from the outcomes of a scenario."""

    figures: list[Figure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Matches, and what follows from their outcomes, which come in the same order."""

    matches: tuple[Match, ...]
    judge: Callable[[Sequence[Outcome]], Judgment]


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that ours, the clairvoyant and Ray's settings meet, and the bars of ours."""

    title: str
    load: Callable[[int], Workload]
    first: int = 2
    seeds: int = 1
    in_time: float | None = None  # %, at least
    beside: bool = False  # held to the bars beside the clairvoyant

    def scenario(self) -> Scenario:
        policies = (*OUR_SWEEP, *RAY_SWEEP, *CLAIRVOYANT)
        seeds = range(1, self.seeds + 1)
        matches = (Match(self.load, policy, seed, self.first) for policy in policies for seed in seeds)
        return Scenario(tuple(matches), partial(self._judge, policies))

    def _judge(self, policies: Sequence[str], outcomes: Sequence[Outcome]) -> Judgment:
        runs = [(policies[place // self.seeds], outcome) for place, outcome in enumerate(outcomes)]
        comparison, name = compared(self.title, runs), self.title
        ours, best, ray = comparison.ours, comparison.ours_best, comparison.ray_best
        known = comparison.clairvoyant
        served, hours = (IN_TIME, HOURS) if self.beside else (None, None)
        over = ours.replica_hours / known.replica_hours
        figures = [
            Figure(f"{name}: in time", 100 * ours.served, "%", self.in_time),
            Figure(f"{name}: in time, of the clairvoyant's", 100 * ours.served / known.served, "%", served),
            Figure(f"{name}: replica-hours, of the clairvoyant's", over, "", hours, at_most=True),
            most(f"{name}: replica-hours, of Ray's best", ours.replica_hours / ray.replica_hours, 1.0),
            most(f"{name}: replica-hours, our best of Ray's", best.replica_hours / ray.replica_hours, 1.0),
            Figure(f"{name}: in time, our best of Ray's", 100 * best.served / ray.served, "%", 99.5),
        ]
        return Judgment([*comparison.figures(), *figures])


def _constant(outcomes: Sequence[Outcome]) -> Judgment:
    worst = max(one.reversals for one in outcomes)
    return Judgment([most("constant: most reversals in 30 minutes", worst, 2)])


def _reaction(outcomes: Sequence[Outcome]) -> Judgment:
    p95 = float(np.quantile([one.reaction_s for one in outcomes], 0.95, method="higher"))
    title = "reaction from the first request that waits to a higher target"
    return Judgment([most(f"{title}: p95 of {len(outcomes)} runs", p95, 3.0, " s")])


def _thousand(_: Sequence[Outcome]) -> Judgment:
    milliseconds = 1e3 * decision_seconds(given.FLEET)
    return Judgment([most("thousand: milliseconds of a decision", milliseconds, 5.0, " ms")])


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


def most_stopped(outcomes: Sequence[Outcome]) -> Figure:
    """Over all runs of ours: what one decision stops beyond one replica."""
    ours = [one for one in outcomes if one.policy == OURS]
    share = 100 * max((one.most_stopped for one in ours), default=0.0)
    name = f"any of {len(ours)} runs: most of a fleet that one decision stops, if more than one replica"
    return most(name, share, 10.0, "%")


def scenarios(trace: Path | None, times: int, seeds: int = 1) -> dict[str, Scenario]:
    """All parts, by name; the trace, each of its requests so many times, for the synthetic day.

    ``seeds`` is of the part in which runs differ most between seeds and none has a fixed number.
    """
    day = partial(_Load, "a day in two hours", workloads.DAY, 2)
    if trace is not None:
        day = partial(_Load, f"{trace.stem} x {times}", partial(workloads.trace, trace, times), 10)
    loads = {
        "recorded": day(1, 97.0, True),
        "steady": _Load("a constant rate", partial(workloads.constant, STEADY, 1_800.0), 5, beside=True),
        "kv-bound": _Load("long answers: KV-bound", workloads.LONG_DECODE, 2, seeds, 99.0, True),
        "prefill-bound": _Load("long prompts: prefill-bound", workloads.LONG_PROMPTS, 6, beside=True),
        "seat-bound": _Load("short chats: slot-bound", workloads.SHORT_CHAT, 3, 1, 99.0),
        "step": _Load("three times the rate at once", workloads.STEP_UP),
        "saw-tooth": _Load("six ramps", workloads.SAW_TOOTH, beside=True),
        "burst": _Load("idle, then load at once", workloads.BURST),
    }
    constant = tuple(
        Match(partial(workloads.constant, given.RATE_OF_ONE * size, 1_800.0), OURS, seed, size)
        for size in FLAP_REPLICAS
        for seed in range(1, SEEDS + 1)
    )
    overloads = tuple(
        Match(partial(workloads.overload, given.RATE_OF_ONE * size), OURS, seed, size + 1, 3 * size + 10, QUICK)
        for size, seeds in OVERLOADED
        for seed in range(1, seeds + 1)
    )
    return {name: load.scenario() for name, load in loads.items()} | {
        "constant": Scenario(constant, _constant),
        "reaction": Scenario(overloads, _reaction),
        "thousand": Scenario((), _thousand),
    }
