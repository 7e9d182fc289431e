"""The parts of the autoscaling experiment: which policies meet which loads, and what must come of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from app.autoscaling.kv_demand import ScalingState, decide
from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.snapshot import ReplicaStats, Snapshot
from loadtests.experiments.autoscaling.comparison import Comparison, compared
from loadtests.experiments.autoscaling.constants import FLEET, MAX_REPLICAS, RATE_OF_ONE, TRACE_TIMES
from loadtests.experiments.autoscaling.matches import COMPARED, OURS, RAY_DEFAULT, Match
from loadtests.experiments.autoscaling.pictures import Picture
from loadtests.experiments.autoscaling.policies import ray_name
from loadtests.experiments.autoscaling.runs import Outcome
from loadtests.findings import Findings, Table
from loadtests.report import Figure

RAY_LOW, RAY_LOW_QUICK = ray_name(32, 30, 600), ray_name(32, 5, 120)
"""Settings that were fixed before the sweep: the bars hold against them."""
SEEDS = 10
FLAP_REPLICAS = range(1, 11)
OVERLOADED = ((3, 20), (200, 5))
"""Replicas before the overload, seeds."""


@dataclass(slots=True)
class Judgement(Findings):
    """What follows from the outcomes of a scenario."""

    pictures: list[Picture] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)

    def add(self, other: Judgement) -> None:
        """Append another scenario's."""
        self.tables += other.tables
        self.figures += other.figures
        self.pictures += other.pictures
        self.comparisons += other.comparisons


@dataclass(frozen=True, slots=True)
class Scenario:
    """Matches, and what follows from their outcomes, which come in the same order."""

    matches: tuple[Match, ...]
    judge: Callable[[Sequence[Outcome]], Judgement]


@dataclass(frozen=True, slots=True)
class _Load:
    """A load that ours, Ray's policy at each setting and occupancy meet, and the bars of ours."""

    load: str
    title: str
    first: int = 2
    seeds: int = 1
    in_time: float | None = None  # %, at least
    ray: str = RAY_DEFAULT  # a setting that ours needs fewer replica-hours than
    ray_hours: float | None = None  # of that setting's, at most
    pictured: tuple[str, ...] = ()


def _compare(load: _Load, trace: Path | None = None, times: int = TRACE_TIMES, *more: str) -> Scenario:
    """All policies, and ``more`` of them, under one load."""
    matches = tuple(
        Match(load.load, policy, seed, load.first, trace, times)
        for policy in (*COMPARED, *more)
        for seed in range(1, load.seeds + 1)
    )

    def judge(outcomes: Sequence[Outcome]) -> Judgement:
        runs = [(match.policy, outcome) for match, outcome in zip(matches, outcomes, strict=True)]
        comparison = compared(load.title, runs)
        ours, best, name = comparison.ours, comparison.ray_best, load.title
        hours = ours.hours / comparison.results[load.ray].hours
        figures = [
            Figure(f"{name}: in time", 100 * ours.served, " %", load.in_time),
            Figure(f"{name}: replica-hours, of {load.ray}'s", hours, "", load.ray_hours, at_most=True),
            Figure(f"{name}: replica-hours, of Ray's best", ours.hours / best.hours),
            Figure(f"{name}: Ray's best in time", 100 * best.served, " %"),
        ]
        pictures = []
        if load.pictured:
            first = dict(reversed(runs))  # of several seeds
            slug = load.load.replace(", ", "-").replace(" ", "-")
            shown = tuple(first[policy] for policy in (OURS, *load.pictured))
            pictures.append(Picture(f"autoscaling-{slug}", name, shown))
        return Judgement([comparison.table(name)], figures, pictures=pictures, comparisons=[comparison])

    return Scenario(matches, judge)


def _recorded(trace: Path | None, times: int) -> Scenario:
    """The trace, or a synthetic day where there is none, also against a static fleet for its peak."""
    name = f"{trace.stem} x {times}" if trace is not None else "a day in two hours"
    first = 10 if trace is not None else 2
    load = _Load("recorded", name, first, 1, 97.0, RAY_LOW, 0.80, (RAY_LOW,))
    scenario = _compare(load, trace, times, "static")

    def judge(outcomes: Sequence[Outcome]) -> Judgement:
        judgement = scenario.judge(outcomes)
        ours, static = outcomes[0], outcomes[-1]
        peak = int(max(ours.series["target"]))
        # A static fleet of another size costs in proportion.
        hours = ours.replica_hours / (static.replica_hours * peak / MAX_REPLICAS)
        judgement.figures += [
            Figure(
                f"{name}: in time, of a static {MAX_REPLICAS}'s", 100 * ours.served / static.served, " %", 95.0
            ),
            Figure(f"{name}: replica-hours, of a static peak of {peak}", hours, "", 0.75, True),
        ]
        return judgement

    return Scenario(scenario.matches, judge)


def _long_prompts() -> Scenario:
    scenario = _compare(
        _Load("long prompts", "long prompts: prefill-bound", 6, pictured=(RAY_LOW, "occupancy"))
    )

    def judge(outcomes: Sequence[Outcome]) -> Judgement:
        judgement = scenario.judge(outcomes)
        more = 100 * (outcomes[0].served - outcomes[COMPARED.index("occupancy")].served)
        judgement.figures.append(Figure("long prompts: in time, more than by occupancy", more, " points", 20.0))
        return judgement

    return Scenario(scenario.matches, judge)


def _constant() -> Scenario:
    matches = tuple(
        Match(f"constant {size}", OURS, seed, first=size)
        for size in FLAP_REPLICAS
        for seed in range(1, SEEDS + 1)
    )

    def judge(outcomes: Sequence[Outcome]) -> Judgement:
        rows = []
        for place, size in enumerate(FLAP_REPLICAS):
            some = outcomes[place * SEEDS : (place + 1) * SEEDS]
            rows.append(
                (
                    f"{RATE_OF_ONE * size:g} requests/s",
                    f"{sum(one.mean_replicas for one in some) / SEEDS:.1f}",
                    f"{max(one.reversals for one in some)}",
                    f"{sum(one.reversals for one in some) / SEEDS:.1f}",
                    f"{100 * min(one.served for one in some):.2f}",
                )
            )
        header = ("constant load", "mean replicas", "most reversals", "mean", "least in time %")
        worst = max(one.reversals for one in outcomes)
        return Judgement(
            [Table("30 minutes of constant load, ten seeds of each", header, tuple(rows))],
            [Figure("constant: most reversals in 30 minutes", worst, "", 2, at_most=True)],
        )

    return Scenario(matches, judge)


def _reaction() -> Scenario:
    matches = tuple(
        Match(f"prompts x10 {size}", OURS, seed, first=size + 1, most=3 * size + 10, quick=True)
        for size, seeds in OVERLOADED
        for seed in range(1, seeds + 1)
    )

    def judge(outcomes: Sequence[Outcome]) -> Judgement:
        seconds = [one.reaction_s for one in outcomes]
        rows = []
        place = 0
        for size, seeds in OVERLOADED:
            some = sorted(seconds[place : place + seeds])
            place += seeds
            rows.append((f"{size} replicas", f"{seeds}", f"{some[seeds // 2]:.2f}", f"{some[-1]:.2f}"))
        title = "Overload: seconds from the first request that waits to a higher target"
        p95 = float(np.quantile(seconds, 0.95, method="higher"))
        return Judgement(
            [Table(title, ("ten times the load of", "runs", "median", "most"), tuple(rows))],
            [
                Figure(f"reaction: p95 of {len(seconds)} runs", p95, " s", 3.0, at_most=True),
                Figure("reaction: longest", max(seconds), " s"),
            ],
        )

    return Scenario(matches, judge)


def _thousand() -> Scenario:
    matches = (Match("thousand", OURS, first=FLEET, most=FLEET + 200),)

    def judge(outcomes: Sequence[Outcome]) -> Judgement:
        milliseconds = 1e3 * decision_seconds(FLEET)
        return Judgement(
            [],
            [
                Figure("thousand: processor seconds of the simulation", outcomes[0].cpu_s, " s", 60.0, True),
                Figure("thousand: milliseconds of a decision", milliseconds, " ms", 5.0, True),
            ],
        )

    return Scenario(matches, judge)


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
    return Figure(
        f"any of {len(ours)} runs: most of a fleet that one decision stops, if more than one replica",
        share,
        " %",
        10.0,
        at_most=True,
    )


def scenarios(trace: Path | None, times: int) -> dict[str, Scenario]:
    """All parts, by name."""
    return {
        "recorded": _recorded(trace, times),
        "kv-bound": _compare(
            _Load("long decode", "long answers: KV-bound", 2, 3, 99.0, RAY_LOW_QUICK, 0.85, (RAY_LOW_QUICK,))
        ),
        "prefill-bound": _long_prompts(),
        "seat-bound": _compare(
            _Load("short chat", "short chats: slot-bound", 3, 1, 99.0, RAY_LOW, 0.80, (RAY_LOW,))
        ),
        "constant": _constant(),
        "reaction": _reaction(),
        "step": _compare(_Load("step x3", "three times the rate at once", pictured=(RAY_LOW,))),
        "saw-tooth": _compare(_Load("saw-tooth", "six ramps")),
        "burst": _compare(_Load("idle, burst", "idle, then load at once")),
        "thousand": _thousand(),
    }
