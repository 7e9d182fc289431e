"""Rates of windows, and how much they usually rise."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.autoscaling.recent import Recent

WIDTH_S = 30.0


def test_the_rate_is_that_of_the_window_alone() -> None:
    recent = Recent()
    for second in range(100):
        recent.add(float(second), 5.0 if second < 70 else 8.0, WIDTH_S)
    assert recent.rate(99.0, WIDTH_S) == pytest.approx((8.0 * 30.0) / 30.0)
    assert recent.rate(69.0, WIDTH_S) == pytest.approx(5.0)
    assert recent.rate(99.0, 5.0) == pytest.approx(8.0)
    assert Recent().rate(0.0, WIDTH_S) == 0.0


def test_a_level_counts_for_as_long_as_it_was_there() -> None:
    recent = Recent()
    for time, level in ((0.0, 9.0), (1.0, 2.0), (4.0, 6.0)):
        recent.add_level(time, level, WIDTH_S)
    assert recent.rate(4.0, WIDTH_S) == pytest.approx((2.0 * 1.0 + 6.0 * 3.0) / 4.0)


def rise(rates: list[float], interval: float = 1.0) -> float:
    recent = Recent()
    for place, rate in enumerate(rates):
        recent.add(place * interval, rate * interval, WIDTH_S)
    return recent.rise


@pytest.mark.parametrize("interval", [0.5, 1.0, 10.0])
def test_a_steady_rate_does_not_rise_and_a_steady_slope_always_does(interval: float) -> None:
    count = round(900.0 / interval)
    assert rise([7.0] * count, interval) == 0.0
    assert rise([2.0 * place * interval for place in range(count)], interval) == pytest.approx(60.0, rel=0.05)
    assert rise([2.0 * (count - place) * interval for place in range(count)], interval) == 0.0, "falls are none"


def test_the_rise_of_a_rate_that_varies_is_the_deviation_of_its_windows() -> None:
    draw = random.Random(1)
    found = [rise([draw.gauss(100.0, 30.0) for _ in range(600)]) for _ in range(40)]
    assert math.fsum(found) / len(found) == pytest.approx(30.0 / math.sqrt(WIDTH_S), rel=0.15)


def test_a_jump_is_forgotten_by_and_by() -> None:
    jump = [1.0] * 100 + [50.0] * 60
    soon, late, later = (rise(jump + [50.0] * more) for more in (0, 300, 900))
    assert soon > late > later > 0.0
    assert later < 0.3 * soon


@pytest.mark.parametrize(("steady", "left"), [(600, math.exp(-180.0 / 300.0)), (30, 90.0 / 270.0)])
def test_a_rise_counts_for_five_minutes_or_as_much_as_all_that_is_known(steady: int, left: float) -> None:
    """``left``: share of its square after three minutes more; the first minute only fills two windows."""
    jump = [5.0] * steady + [50.0] * 120
    assert rise([*jump, *[50.0] * 180]) ** 2 == pytest.approx(left * rise(jump) ** 2, rel=0.02)


@given(st.lists(st.floats(0.0, 1e6), max_size=200), st.floats(0.1, 20.0))
def test_no_rise_exceeds_the_largest_rate(rates: list[float], interval: float) -> None:
    assert 0.0 <= rise(rates, interval) <= max(rates, default=0.0) * (1.0 + 1e-9) + 1e-9
