"""How many replicas fewer are intended before the whole window allows it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scaling_support import stats

from app.autoscaling.kv_demand import ScalingState, decide
from app.autoscaling.occupancy import decide_by_occupancy
from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.snapshot import ReplicaStats, ScalingDecision, Snapshot


class Fleet:
    """A fleet that has what the decisions ask for; one decision each second."""

    def __init__(self, target: int, rule: Any = decide, **options: Any) -> None:
        self.config = ScalingConfig(**{"down_window_s": 300.0, "reserve": 1.0, **options})
        self.state = ScalingState()
        self.target = target
        self.now = 0.0
        self._rule = rule

    def step(self, one: ReplicaStats, **more: Any) -> ScalingDecision:
        running = more.pop("running", self.target)
        reporting = more.pop("reporting", running)
        values = {"minimum": 1, "maximum": 100, **more}
        reports = dict.fromkeys(range(reporting), one)
        view = Snapshot(self.now, self.target, running, replicas=reports, **values)
        decision: ScalingDecision = self._rule(view, self.config, self.state)
        self.target = decision.target
        self.now += 1.0
        return decision

    def intended(self, seconds: int, one: ReplicaStats, **more: Any) -> list[int]:
        return [self.step(one, **dict(more)).intended for _ in range(seconds)]


@pytest.mark.parametrize(("window", "after"), [(300.0, 60), (100.0, 25)])
def test_fewer_are_intended_once_they_would_have_been_enough_for_a_minute_or_a_quarter(
    window: float, after: int
) -> None:
    fleet = Fleet(6, down_window_s=window)
    assert fleet.intended(after + 1, stats(10.0)) == [0] * after + [1]
    assert fleet.target == 6


def test_a_rest_after_load_is_seen_long_before_the_window_has_forgotten_the_load() -> None:
    fleet = Fleet(6)
    fleet.intended(400, stats(600.0))
    calm = fleet.intended(80, stats(10.0))
    assert calm[:60] == [0] * 60
    assert calm[60:] == [1] * 20
    assert fleet.target == 5


def test_no_more_are_intended_than_one_decision_stops() -> None:
    fleet = Fleet(45)
    assert fleet.intended(70, stats(10.0))[-1] == 4
    assert Fleet(45, down_share=0.5).intended(70, stats(10.0))[-1] == 22


def test_the_decision_that_stops_replicas_intends_these() -> None:
    fleet = Fleet(45)
    before = fleet.target
    while fleet.target == before:
        decision = fleet.step(stats(10.0))
    assert decision.intended == before - decision.target == 4


def test_no_fewer_than_the_minimum_are_intended() -> None:
    assert fleet_ends(Fleet(40, down_share=1.0), minimum=38) == 2
    assert fleet_ends(Fleet(1), minimum=1) == 0
    assert fleet_ends(Fleet(1), minimum=0) == 0  # not before a long rest
    assert fleet_ends(Fleet(1, zero_after_s=30.0), minimum=0) == 1


def fleet_ends(fleet: Fleet, **more: Any) -> int:
    return fleet.intended(70, stats(0.0), **more)[-1]


def test_a_moment_of_load_amid_a_rest_counts_for_a_minute() -> None:
    fleet = Fleet(6)
    fleet.intended(70, stats(10.0))
    assert fleet.intended(1, stats(600.0)) == [0]
    assert fleet.intended(70, stats(10.0)) == [0] * 60 + [1] * 10


def test_demand_that_is_back_ends_it_at_once() -> None:
    fleet = Fleet(6)
    assert fleet.intended(70, stats(200.0))[-1] == 1
    # Enough for six by the lower mark, not for more by the upper one.
    assert fleet.intended(1, stats(600.0)) == [0]


@pytest.mark.parametrize("more", [{"backlog_tokens": 30_000.0}, {"step_seconds": 0.06}])
def test_a_need_that_no_block_shows_ends_it_too(more: dict[str, float]) -> None:
    fleet = Fleet(6, reserve=0.0)
    assert fleet.intended(70, stats(10.0))[-1] == 1
    assert fleet.intended(1, stats(10.0, **more)) == [0]


@pytest.mark.parametrize(
    ("options", "more"),
    [({}, {"reporting": 5}), ({}, {"running": 5, "reporting": 5}), ({"shadow": True}, {})],
)
def test_what_ends_or_prevents_it(options: dict[str, Any], more: dict[str, Any]) -> None:
    fleet = Fleet(6, **options)
    fleet.state.last_up = 0.0
    assert fleet.intended(100, stats(10.0), **more) == [0] * 100


@pytest.mark.parametrize("held", ["preemptions", "scaled down lately"])
def test_it_is_intended_while_it_is_held(held: str) -> None:
    fleet = Fleet(30, down_interval_s=1_000.0 if held == "scaled down lately" else 10.0)
    for second in range(320):
        if held == "preemptions":
            fleet.state.last_preemption = float(second)
        decision = fleet.step(stats(10.0))
    assert decision.held_by == held
    assert decision.intended == max(fleet.target // 10, 1)


def test_after_a_restart_of_the_controller_it_is_not_known() -> None:
    fleet = Fleet(6)
    assert fleet.intended(70, stats(10.0))[-1] == 1
    assert fleet.intended(1, stats(10.0), reporting=3) == [0]
    assert fleet.intended(61, stats(10.0)) == [0] * 60 + [1]


reports = st.builds(ReplicaStats, *[st.floats(0.0, 3e3, allow_nan=False)] * len(ReplicaStats._fields))


@given(
    st.sampled_from([decide, decide_by_occupancy]),
    st.integers(1, 30),
    st.lists(st.tuples(reports, st.integers(1, 15)), min_size=1, max_size=8),
)
def test_what_is_intended_stays_within_bounds_and_is_nothing_when_the_target_rises(
    rule: Any, target: int, loads: list[tuple[ReplicaStats, int]]
) -> None:
    fleet = Fleet(target, rule, down_window_s=20.0, startup_s=1.0)
    for one, seconds in loads:
        for _ in range(seconds):
            before = fleet.target
            decision = fleet.step(one, minimum=2)
            assert 0 <= decision.intended <= max(before - 2, 0)
            if decision.target > before:
                assert decision.intended == 0
            elif decision.target < before <= 100:
                assert decision.intended == before - decision.target


def test_in_shadow_mode_it_goes_on_asking_for_fewer() -> None:
    config, state = ScalingConfig(shadow=True, down_window_s=300.0), ScalingState()
    reports = dict.fromkeys(range(30), stats(10.0))
    asked = [
        decide(Snapshot(float(second), 30, 30, 1, 100, reports), config, state).target for second in range(340)
    ]
    assert asked == [30] * 300 + [27] * 40
