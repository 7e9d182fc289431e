"""Clocks that are set, pauses between decisions, and replicas that had to wait for room."""

from __future__ import annotations

import pytest
from scaling_support import FakeSink, context, stats

from app.autoscaling.kv_demand import decide
from app.autoscaling.policy import KvDemandPolicy, OccupancyPolicy
from app.autoscaling.publishing import Publisher
from app.autoscaling.scaling_config import ScalingConfig
from app.autoscaling.scaling_state import ScalingState
from app.autoscaling.snapshot import Snapshot

BEGAN = 1_000_000.0
Policy = type[KvDemandPolicy] | type[OccupancyPolicy]
POLICIES: list[Policy] = [KvDemandPolicy, OccupancyPolicy]


class Time:
    """A policy that is called each half second; its target is done at once."""

    def __init__(self, policy: Policy, target: int) -> None:
        self.policy = policy(reserve=0, down_window_s=60.0, startup_s=5.0)
        self.policy.publisher = Publisher(FakeSink())
        self.now = BEGAN
        self.target = target

    def run(self, seconds: float, referenced: float) -> int:
        """Go on, with so many blocks referenced over all replicas."""
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            reports = {f"r{index}": stats(referenced / self.target) for index in range(self.target)}
            self.target, _ = self.policy(context(self.now, self.target, reports))
        return self.target


@pytest.mark.parametrize("policy", POLICIES)
def test_a_clock_that_was_set_back_stops_no_scaling(policy: Policy) -> None:
    time = Time(policy, 3)
    assert time.run(70.0, 1_800.0) == 3
    time.now -= 3_600.0
    assert time.run(10.0, 6_000.0) > 3
    up = time.target
    assert time.run(300.0, 600.0) < up


@pytest.mark.parametrize("policy", POLICIES)
def test_a_clock_that_was_set_back_after_a_scale_down_stops_no_further_one(policy: Policy) -> None:
    time = Time(policy, 4)
    assert time.run(70.0, 2_400.0) == 4
    while time.target == 4:
        time.run(0.5, 100.0)
    lowered = time.target
    assert lowered > 1
    time.now -= 3_600.0
    assert time.run(300.0, 100.0) < lowered


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("jump", [-3_600.0, 3_600.0])
def test_what_was_seen_before_a_jump_fills_no_window(policy: Policy, jump: float) -> None:
    time = Time(policy, 3)
    assert time.run(70.0, 1_800.0) == 3
    time.now += jump
    assert time.run(50.0, 600.0) == 3
    assert time.run(20.0, 600.0) < 3


def test_a_replica_that_waited_for_room_is_no_measure_of_starts() -> None:
    config, state = ScalingConfig(startup_s=60.0), ScalingState()
    state.started_up(BEGAN, 2)
    reports = {"a": stats(500.0), "b": stats(500.0)}
    decide(Snapshot(BEGAN + 3_000.0, 2, 2, 1, 4, reports), config, state)
    assert state.startup_s(config) == 600.0  # as long as it is waited for


def test_slow_starts_are_learned_step_by_step() -> None:
    config, state = ScalingConfig(startup_s=60.0), ScalingState()
    reports = {"a": stats(500.0), "b": stats(500.0)}
    for start in range(2):
        began = BEGAN + 10_000.0 * start
        state.started_up(began, 2)
        decide(Snapshot(began + 900.0, 2, 2, 1, 4, reports), config, state)
    assert state.startup_s(config) == 900.0
