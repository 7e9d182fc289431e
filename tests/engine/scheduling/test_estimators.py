"""The running median against the textbook one, the weights of a unit's cost, the fixed part of a call."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.estimators import STALE, CallCost, RunningMedian, UnitCost


@settings(derandomize=True, max_examples=100, deadline=None, database=None)
@given(
    size=st.integers(1, 6), values=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0, math.inf]), max_size=20)
)
def test_the_median_is_that_of_the_last_values(size: int, values: list[float]) -> None:
    median = RunningMedian(size)
    assert median.value is None
    for index, value in enumerate(values):
        median.add(value)
        assert median.value == statistics.median(values[max(0, index + 1 - size) : index + 1])


def test_a_measurement_counts_by_its_size() -> None:
    cost = UnitCost(0.0)
    assert (cost.seconds, cost.rate) == (None, 0.0)
    cost.measure(100, 1.0, 0)  # the first is the typical one
    cost.measure(50, 1.0, 0)  # half of that: a third of what is known then
    assert cost.seconds == pytest.approx((100 * 0.01 + 50 * 0.02) / 150)
    assert cost.rate == pytest.approx(75.0)


def test_a_calibration_counts_like_one_measurement_and_half_of_it_once_stale() -> None:
    cost = UnitCost(100.0)
    cost.measure(100, 2.0, STALE - 1)
    assert cost.seconds == pytest.approx(0.015)
    cost = UnitCost(100.0)
    cost.measure(100, 2.0, STALE)
    assert cost.seconds == pytest.approx((0.5 * 0.01 + 0.02) / 1.5)


def test_it_is_stale_again_after_as_many_decisions_without_a_measurement() -> None:
    cost = UnitCost(100.0)
    assert [cost.is_stale(decisions) for decisions in (0, STALE - 1, STALE)] == [False, False, True]
    cost.measure(10, 0.1, STALE)
    assert [cost.is_stale(decisions) for decisions in (STALE, 2 * STALE - 1, 2 * STALE)] == [False, False, True]
    cost.measure(0, 0.1, 2 * STALE)
    cost.measure(10, 0.0, 2 * STALE)
    assert cost.is_stale(2 * STALE)


def test_the_likely_cost_is_the_median_once_there_are_enough_measurements() -> None:
    cost = UnitCost(100.0)
    assert cost.likely == pytest.approx(0.01)
    for seconds in (0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.2):
        cost.measure(1, seconds, 0)
        assert cost.likely == cost.seconds
    cost.measure(1, 0.02, 0)
    assert cost.likely == pytest.approx(0.02)
    assert cost.seconds is not None
    assert cost.seconds > 0.022  # one slow step in eight raises the average
    for _ in range(32):
        cost.measure(1, 0.03, 0)
    assert cost.likely == pytest.approx(0.03)  # what is long past is forgotten


def test_larger_units_change_the_count_and_not_the_cost() -> None:
    cost = UnitCost(100.0)
    for _ in range(8):
        cost.measure(50, 1.0, 0)
    before = cost.seconds, cost.likely
    cost.enlarge(2.0)
    assert (cost.seconds, cost.likely) == tuple(2 * (seconds or 0.0) for seconds in before)
    assert cost.typical == pytest.approx(25.0)
    for _ in range(100):
        cost.measure(25, 1.0, 0)
    assert cost.seconds == pytest.approx(0.04, rel=0.01)
    assert cost.likely == pytest.approx(0.04)


def test_before_a_measurement_a_call_costs_what_was_calibrated() -> None:
    cost = CallCost(100.0, 0.05)
    assert cost.mean(10) == cost.likely(10) == pytest.approx(0.15)
    assert [cost.rate, cost.call_seconds] == pytest.approx([100.0, 0.05])
    for empty in (0, -1.5):
        assert cost.mean(empty) == cost.likely(empty) == 0.0
    unknown = CallCost(0.0, 0.05)
    assert (unknown.mean(1), unknown.likely(1), unknown.rate, unknown.call_seconds) == (None, None, 0.0, 0.0)
    unknown.measure(0, 1.0, 0)
    unknown.measure(4, 0.0, 0)
    assert unknown.mean(1) is None
    unknown.measure(4, 1.0, 0)
    assert unknown.mean(4) == pytest.approx(1.0)
    assert unknown.mean(8) == pytest.approx(2.0)


@pytest.mark.parametrize("call", [0.0, 0.05, 0.2])
@pytest.mark.parametrize(("rate", "call_told"), [(0.0, 0.0), (100.0, 0.1), (1000.0, 0.0), (10.0, 1.0)])
def test_the_fixed_part_is_learned_from_calls_of_a_few_sizes(
    call: float, rate: float, call_told: float
) -> None:
    cost = CallCost(rate, call_told)
    noise = random.Random(3)
    for number, size in enumerate(itertools.islice(itertools.cycle([2, 4, 3, 2, 3, 4, 9, 3]), 200)):
        slow = 6.0 if number % 20 == 7 else 1.0
        cost.measure(size, (call + 0.01 * size) * noise.uniform(0.9, 1.1) * slow, 0)
    for size in (1, 3, 8):
        likely, mean = cost.likely(size), cost.mean(size)
        assert likely is not None
        assert mean is not None
        assert likely == pytest.approx(call + 0.01 * size, rel=0.2, abs=0.005)
        assert mean > likely


def test_while_all_calls_are_alike_the_calibrated_fixed_part_stays() -> None:
    for told in (0.0, 0.02):
        cost = CallCost(100.0, told)
        for _ in range(100):
            cost.measure(3, 0.1, 0)
        assert cost.likely(3) == pytest.approx(0.1)
        assert cost.mean(3) == pytest.approx(0.1, rel=0.001)
        assert cost.call_seconds == pytest.approx(0.1 * told / (0.03 + told), rel=0.01)


def test_parts_are_never_negative() -> None:
    steep, falling = CallCost(0.0), CallCost(0.0)
    for size in [1, 2, 4] * 30:
        steep.measure(size, size**2 * 0.01, 0)
        falling.measure(size, 0.1 / size, 0)
    assert steep.call_seconds == 0.0
    assert falling.rate > 0.0
    for cost in (steep, falling):
        costs = [cost.mean(size) or 0.0 for size in (0.1, 1, 2, 4, 100)]
        assert costs == sorted(costs)
        assert costs[0] > 0.0
