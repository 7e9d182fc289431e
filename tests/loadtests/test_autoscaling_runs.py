"""What the autoscaling experiment counts: reaction, stops of one decision, shares in time."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.autoscaling.kv_demand import ScalingState, decide
from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.snapshot import ReplicaStats, Snapshot
from loadtests.experiments.autoscaling.clairvoyant import CLAIRVOYANT, Clairvoyant
from loadtests.experiments.autoscaling.comparison import Comparison
from loadtests.experiments.autoscaling.constants import RATE_OF_ONE
from loadtests.experiments.autoscaling.policies import OUR_SWEEP, OURS, POLICIES, RAY_SWEEP, KvDemand, View
from loadtests.experiments.autoscaling.runs import Outcome, simulate
from loadtests.experiments.autoscaling.scenarios import QUICK, Match, most_stopped, scenarios
from loadtests.experiments.autoscaling.workloads import Workload, constant, overload


class Script:
    """Targets by the second from which they hold."""

    name = OURS

    def __init__(self, *steps: tuple[float, int]) -> None:
        self._steps = steps

    def __call__(self, view: View) -> int:
        return [target for since, target in self._steps if since <= view.now][-1]


def jam(at: float, seconds: float = 30.0) -> Workload:
    """From ``at`` on two prompts of a second come at once, each second."""
    arrival = np.repeat(np.arange(at, seconds), 2)
    return Workload("jam", arrival, np.full(len(arrival), 20_000.0), np.ones(len(arrival)), seconds, 0.0, at)


@pytest.mark.parametrize(("answer", "reaction"), [(12.0, 2.0), (10.0, 0.0), (17.5, 7.5)])
def test_reaction_counts_from_the_first_that_waits(answer: float, reaction: float) -> None:
    outcome = simulate(jam(10.0), Script((0.0, 1), (answer, 2)), every_s=0.5)
    assert outcome.reaction_s == reaction


def test_ups_before_the_overload_and_none_at_all_are_no_reaction() -> None:
    assert simulate(jam(10.0), Script((0.0, 1), (9.5, 2)), every_s=0.5).reaction_s == math.inf
    assert simulate(constant(3.0, 60.0, 1), Script((0.0, 1), (9.5, 2)), every_s=0.5).reaction_s == math.inf


def test_overload_is_beyond_the_fleet_from_a_moment_on_and_ours_answers_in_three_seconds() -> None:
    one, two = (overload(2 * RATE_OF_ONE, seed) for seed in (1, 2))
    assert one.overload_at != two.overload_at
    before = one.arrival < one.overload_at
    tokens_before = one.prompt[before].sum() / one.overload_at
    tokens_after = one.prompt[~before].sum() / (one.seconds - one.overload_at)
    assert tokens_before < 0.7 * 3 * 20_000 < tokens_after
    match = Match(partial(overload, 2 * RATE_OF_ONE), OURS, 1, first=3, most=16, options=QUICK)
    assert match.run().reaction_s <= 3.0


def test_reports_are_as_old_as_it_says() -> None:
    seen = []

    class Watch(Script):
        def __call__(self, view: View) -> int:
            seen.append((view.now, sum(one.arrived_tokens for one in view.reports.values())))
            return 1

    workload = Workload("one", np.array([3.0]), np.array([100.0]), np.array([1.0]), 8.0)
    simulate(workload, Watch(), every_s=0.5, delay_s=1.0)
    assert [now for now, tokens in seen if tokens] == [now / 2 for now in range(9, len(seen))]


@pytest.mark.parametrize(("stops", "share"), [(1, 0.0), (2, 0.1), (5, 0.25)])
def test_the_share_that_one_decision_stops(stops: int, share: float) -> None:
    outcome = simulate(constant(1.0, 20.0, 1), Script((0.0, 20), (10.0, 20 - stops)), first=20, startup_s=0.0)
    assert outcome.most_stopped == share
    figure = most_stopped([outcome])
    assert figure.value == pytest.approx(100 * share)
    assert figure.holds == (share <= 0.1)
    assert most_stopped([replace(outcome, policy="another")]).value == 0.0


def test_the_share_in_time() -> None:
    workload = Workload(
        "two", np.array([1.0, 2.0, 70.0]), np.array([10.0, 90_000.0, 10.0]), np.full(3, 2.0), 90.0
    )
    outcome = simulate(workload, Script((0.0, 1)))
    assert outcome.served == pytest.approx(2 / 3)


load = st.floats(0.0, 1.0)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 150),
    st.lists(st.tuples(load, load, load, load), min_size=1, max_size=4),
    st.floats(0.0, 3.0),
    st.integers(0, 3),
)
def test_no_decision_stops_more_than_a_tenth_or_one(
    first: int, phases: list[tuple[float, float, float, float]], reserve: float, minimum: int
) -> None:
    """Phases of ten minutes with a constant load each: the fleet shrinks to what they need."""
    config, state = ScalingConfig(reserve=reserve, startup_s=1.0), ScalingState()
    target, arrived, now = max(first, minimum), 0.0, 0.0
    for held, lacking, backlog, rate in phases:
        for _ in range(60):
            now += 10.0
            arrived += rate * 10.0 * 20_000.0
            one = ReplicaStats(
                1_000.0,
                1_000.0 * held,
                500.0 * lacking,
                0.0,
                8.0,
                2_000.0 * backlog,
                arrived,
                20_000.0,
                0.02,
                0.0,
            )
            snapshot = Snapshot(now, target, target, minimum, 400, dict.fromkeys(range(target), one))
            wanted = decide(snapshot, config, state).target
            assert target - wanted <= max(1, target // 10)
            target = wanted


def test_a_fleet_of_hundreds_without_work_does_shrink_a_tenth_at_a_time() -> None:
    policy = KvDemand(startup_s=1.0)
    idle = ReplicaStats(1_000.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 20_000.0, 0.0, 0.0)
    target, steps = 200, []
    for second in range(1_200):
        wanted = policy(View(float(second), target, target, 400, dict.fromkeys(range(target), idle), 0, 0))
        if wanted < target:
            steps.append((target - wanted) / target)
        target = wanted
    assert target <= 2
    assert max(steps[:5]) == 0.1


def test_every_part_names_policies_that_there_are_and_can_go_to_another_process() -> None:
    parts = scenarios(Path("somewhere.csv"), 3)
    for part in parts.values():
        assert all(match.policy in {*POLICIES, *CLAIRVOYANT} for match in part.matches)
        pickle.dumps(part.matches[:1])
    assert all(match.load.args == (Path("somewhere.csv"), 3) for match in parts["recorded"].matches)


def test_a_part_is_judged_by_its_outcomes() -> None:
    part = scenarios(None, 1)["reaction"]
    outcome = simulate(jam(10.0), Script((0.0, 1), (12.0, 2)), every_s=0.5)
    fine = part.judge([outcome] * len(part.matches))
    late: list[Outcome] = [replace(outcome, reaction_s=3.5)] * 2
    slow = part.judge([outcome] * (len(part.matches) - 2) + late)
    assert [one.holds for one in fine.figures] == [True]
    assert not slow.figures[0].holds


def comparison(
    load: str,
    ours: tuple[float, float],
    plans: Mapping[str, tuple[float, float]] = MappingProxyType(dict.fromkeys(CLAIRVOYANT, (1.0, 1.0))),
    **ray: tuple[float, float],
) -> Comparison:
    """Ray's first settings have the given figures (share in time, replica-hours), all others serve nothing."""
    figures = dict.fromkeys(OUR_SWEEP, (0.0, 1.0)) | {OURS: ours} | dict.fromkeys(RAY_SWEEP, (0.0, 1.0))
    figures |= dict(zip(RAY_SWEEP, ray.values(), strict=False)) | dict(plans)
    return Comparison(load, {name: Outcome(name, *both, 1, 0.0, 0.0, 0.1) for name, both in figures.items()})


def test_ray_s_best_needs_the_fewest_hours_of_those_that_serve_as_ours() -> None:
    second = RAY_SWEEP[1]
    some = comparison("x", (0.99, 5.0), a=(1.0, 7.0), b=(0.986, 4.0), c=(0.9, 2.0))
    assert some.ray_best.policy == second  # within the tolerance


def test_ray_s_best_serves_most_where_none_serves_as_ours() -> None:
    some = comparison("x", (0.99, 5.0), a=(0.9, 7.0), b=(0.95, 4.0), c=(0.95, 3.0))
    assert some.ray_best.policy == RAY_SWEEP[2]


def test_our_best_is_the_cheapest_that_serves_as_ray_s_best() -> None:
    some = comparison("x", (0.93, 2.8), a=(1.0, 4.3))
    some.results.update(
        {name: replace(some.ours, policy=name, served=0.998, replica_hours=3.9) for name in OUR_SWEEP[-2:]}
    )
    some.results[OUR_SWEEP[-1]].replica_hours = 4.8
    assert some.ours_best.policy == OUR_SWEEP[-2]
    assert comparison("x", (0.93, 2.8), a=(0.934, 4.3)).ours_best.policy == OURS


def test_the_clairvoyant_s_cheapest_plan_counts_and_its_best_one_for_the_same_hours() -> None:
    plans = dict.fromkeys(CLAIRVOYANT, (1.0, 9.0))
    first, second, third = list(CLAIRVOYANT)[:3]
    plans |= {first: (0.998, 4.0), second: (0.9, 3.0), third: (0.2, 1.0)}
    some = comparison("x", (0.81, 3.5), plans, a=(0.05, 0.5))
    assert some.clairvoyant.policy == first
    assert some.of_clairvoyant(OURS) == pytest.approx(0.81 / 0.9)
    assert some.of_clairvoyant(RAY_SWEEP[0]) == pytest.approx(0.05 / 0.2)  # all its plans take more


def test_the_clairvoyant_is_ready_when_load_comes_and_sees_no_further_than_a_start() -> None:
    seen = {}

    class Watch(Clairvoyant):
        def __call__(self, view: View) -> int:
            seen[view.now] = target = super().__call__(view)
            return target

    # Nothing, then 25,000 tokens/s for a minute from 100 s on, then nothing.
    arrival = np.arange(100.0, 160.0, 0.1)
    workload = Workload("jump", arrival, np.full(len(arrival), 2_500.0), np.ones(len(arrival)), 240.0)
    outcome = simulate(workload, Watch(workload, 0.75, 1, 40, 60.0), 1)
    assert outcome.served == 1.0
    assert {seen[second] for second in range(35)} == {1}
    assert seen[45.0] == seen[150.0] == 3  # 25,000 over 3/4 of 70% of 20,000
    assert {seen[second] for second in range(170, 240)} == {1}


def test_a_load_is_compared_over_all_settings_and_shows_ray_s_default_and_best() -> None:
    part = scenarios(None, 1)["kv-bound"]
    outcome = simulate(constant(3.0, 60.0, 1), Script((0.0, 1), (9.0, 2)))
    judgment = part.judge([outcome] * len(part.matches))
    assert {*OUR_SWEEP, *RAY_SWEEP, *CLAIRVOYANT} == {match.policy for match in part.matches}
    bars = {one.name.split(": ")[-1]: one.bar for one in judgment.figures if one.bar is not None}
    assert bars == {
        "in time": 99.0,
        "in time, of the clairvoyant's": 97.0,
        "replica-hours, of the clairvoyant's": 1.25,
        "replica-hours, of Ray's best": 1.0,
        "replica-hours, our best of Ray's": 1.0,
        "in time, our best of Ray's": 99.5,
    }
    shown = [one.name.split(": ")[2] for one in judgment.figures if one.name.endswith("with these hours")]
    assert [name.split(",")[0] for name in shown] == [
        "ours",
        "Ray's default",
        "Ray's best here",
        "our best here",
        OURS,
    ]
