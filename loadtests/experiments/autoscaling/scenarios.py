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
from loadtests.experiments.autoscaling.constants import FLEET, MAX_REPLICAS, RATE_OF_ONE, STARTUP_S
from loadtests.experiments.autoscaling.matches import COMPARED, OURS, Match
from loadtests.experiments.autoscaling.pictures import Picture
from loadtests.experiments.autoscaling.runs import Outcome
from loadtests.findings import Table
from loadtests.report import Figure

SEEDS = 10
FLAP_REPLICAS = range(1, 11)
OVERLOADED = ((3, 20), (200, 5))
"""Replicas before the overload, seeds."""


@dataclass(slots=True)
class Judgement:
    """What follows from the outcomes of a scenario."""

    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Matches, and what follows from their outcomes, which come in the same order."""

    matches: tuple[Match, ...]
    judge: Callable[[Sequence[Outcome]], Judgement]


_HEADER = ("policy", "in time %", "replica-h", "TTFT p99 s", "ups", "downs", "reversals", "preempted")


def _table(title: str, outcomes: Sequence[Outcome], note: str = "") -> Table:
    rows = tuple(
        (
            one.policy,
            f"{100 * one.served:.2f}",
            f"{one.replica_hours:.2f}",
            f"{one.ttft_p99:.2f}",
            f"{one.ups}",
            f"{one.downs}",
            f"{one.reversals}",
            f"{one.preemptions}",
        )
        for one in outcomes
    )
    return Table(title, _HEADER, rows, note)


def _compare(load: str, title: str) -> Scenario:
    """A load without a bar of its own."""
    matches = tuple(Match(load, policy) for policy in COMPARED)

    def judge(outcomes: Sequence[Outcome]) -> Judgement:
        by_name = dict(zip(COMPARED, outcomes, strict=True))
        slug = load.replace(", ", "-").replace(" ", "-")
        picture = Picture(f"autoscaling-{slug}", title, (by_name[OURS], by_name["ray slow"]))
        return Judgement([_table(title, outcomes)], [], [picture])

    return Scenario(matches, judge)


def _recorded(trace: Path | None, times: int) -> Scenario:
    """The trace, or a synthetic day where there is none, also against a static fleet for its peak."""
    first = 10 if trace is not None else 2
    name = f"{trace.stem} x {times}" if trace is not None else "day"
    policies = (*COMPARED, "static")
    matches = tuple(Match("day", policy, first=first, trace=trace, times=times) for policy in policies)

    def judge(outcomes: Sequence[Outcome]) -> Judgement:
        by_name = dict(zip(policies, outcomes, strict=True))
        ours, ray = by_name[OURS], by_name["ray slow"]
        peak = int(max(ours.series["target"]))
        # A static fleet of another size costs in proportion.
        static = by_name["static"].replica_hours * peak / MAX_REPLICAS
        title = f"{name}, {STARTUP_S:g} s to start a replica"
        return Judgement(
            [_table(title, outcomes)],
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
            ],
            [Picture("autoscaling-recorded", title, (ours, ray))],
        )

    return Scenario(matches, judge)


def _kv_bound() -> Scenario:
    seeds = (1, 2, 3)
    matches = tuple(Match("long decode", policy, seed) for policy in (OURS, "ray quick") for seed in seeds)

    def judge(outcomes: Sequence[Outcome]) -> Judgement:
        ours, ray = (outcomes[i : i + len(seeds)] for i in range(0, len(outcomes), len(seeds)))
        hours = sum(one.replica_hours for one in ours) / sum(one.replica_hours for one in ray)
        title = "Long answers: KV-bound"
        least = 100 * min(one.served for one in ours)
        return Judgement(
            [_table(title, outcomes, f"seeds {', '.join(map(str, seeds))} of each")],
            [
                Figure("long decode: in time, least of three seeds", least, " %", 99.0),
                Figure("long decode: replica-hours, of Ray's", hours, "", 0.85, True),
            ],
            [Picture("autoscaling-long-decode", title, (ours[0], ray[0]))],
        )

    return Scenario(matches, judge)


def _prefill_bound() -> Scenario:
    matches = tuple(Match("long prompts", policy, first=6) for policy in COMPARED)

    def judge(outcomes: Sequence[Outcome]) -> Judgement:
        by_name = dict(zip(COMPARED, outcomes, strict=True))
        ours, occupancy, ray = by_name[OURS], by_name["occupancy"], by_name["ray slow"]
        title = "Long prompts: prefill-bound"
        more = 100 * (ours.served - occupancy.served)
        return Judgement(
            [_table(title, outcomes)],
            [Figure("long prompts: in time, more than by occupancy", more, " points", 20.0)],
            [Picture("autoscaling-long-prompts", title, (ours, ray, occupancy))],
        )

    return Scenario(matches, judge)


def _seat_bound() -> Scenario:
    matches = tuple(Match("short chat", policy, first=3) for policy in COMPARED)

    def judge(outcomes: Sequence[Outcome]) -> Judgement:
        by_name = dict(zip(COMPARED, outcomes, strict=True))
        ours, ray = by_name[OURS], by_name["ray slow"]
        title = "Short prompts and answers: seat-bound"
        hours = ours.replica_hours / ray.replica_hours
        return Judgement(
            [_table(title, outcomes)],
            [
                Figure("short chat: in time", 100 * ours.served, " %", 99.0),
                Figure("short chat: replica-hours, of Ray's", hours, "", 0.80, True),
            ],
            [Picture("autoscaling-short-chat", title, (ours, ray))],
        )

    return Scenario(matches, judge)


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
            [_table("A thousand replicas for an hour", outcomes)],
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
        "kv-bound": _kv_bound(),
        "prefill-bound": _prefill_bound(),
        "seat-bound": _seat_bound(),
        "constant": _constant(),
        "reaction": _reaction(),
        "step": _compare("step x3", "Three times the rate in the middle third"),
        "saw-tooth": _compare("saw-tooth", "Six ramps that end at once"),
        "burst": _compare("idle, burst", "Idle, ten minutes of load, idle"),
        "thousand": _thousand(),
    }
