"""The running median against the textbook one, and the weights of a unit's cost."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.estimators import STALE, RunningMedian, UnitCost


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
