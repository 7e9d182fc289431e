"""How many replicas are kept for a burst that may return."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.autoscaling.bursts import Bursts


class Traffic:
    """Bursts of 100 s that need ten replicas, with lulls between."""

    def __init__(self) -> None:
        self.bursts = Bursts()
        self.now = 0.0

    def burst(self, late_s: int = 60, need: float = 10.0, seconds: int = 100) -> None:
        for second in range(seconds):
            self.see(need, late=second < late_s)

    def lull(self, seconds: int, need: float = 0.5) -> list[float]:
        return [self.see(need) for _ in range(seconds)]

    def see(self, need: float, *, late: bool = False) -> float:
        self.now += 1.0
        self.bursts.see(self.now, need, late=late)
        return self.bursts.kept(self.now)


def test_nothing_is_kept_before_a_burst_has_returned() -> None:
    traffic = Traffic()
    assert set(traffic.lull(100)) == {0.0}
    traffic.burst()
    assert set(traffic.lull(300)) == {0.0}


def test_what_returned_is_kept_for_a_quarter_longer_than_it_took() -> None:
    traffic = Traffic()
    traffic.burst()
    traffic.lull(200)
    traffic.burst()
    kept = traffic.lull(600)
    assert set(kept[:250]) == {10.0}
    assert set(kept[252:]) == {0.0}


@pytest.mark.parametrize(
    ("late_s", "lull", "kept"), [(60, 400, 10.0), (60, 600, 0.0), (10, 200, 0.0), (0, 60, 0.0)]
)
def test_it_is_kept_where_the_lull_costs_less_than_late_requests(late_s: int, lull: int, kept: float) -> None:
    """Eight seconds of idle replicas are worth a second of late requests."""
    traffic = Traffic()
    for _ in range(3):
        traffic.burst(late_s)
        traffic.lull(lull)
    traffic.burst(late_s)
    assert traffic.lull(20)[-1] == kept


def test_a_burst_that_found_the_fleet_ready_teaches_its_lull_and_is_kept_for_as_before() -> None:
    traffic = Traffic()
    traffic.burst()
    traffic.lull(200)
    traffic.burst()
    for _ in range(5):
        traffic.lull(200)
        traffic.burst(late_s=0, need=8.0)
    assert traffic.lull(20)[-1] == 8.0


def test_after_longer_lulls_it_is_given_up() -> None:
    traffic = Traffic()
    for lull in (200, 200, 900, 900, 900):
        traffic.burst()
        traffic.lull(lull)
    traffic.burst()
    assert set(traffic.lull(900)) == {0.0}


def test_a_few_prompts_that_wait_are_no_burst_beside_a_large_one() -> None:
    traffic = Traffic()
    traffic.burst()
    traffic.lull(100)
    traffic.burst(late_s=3, need=1.5, seconds=5)
    traffic.lull(100, need=0.0)
    traffic.burst()
    assert traffic.lull(200)[-1] == 10.0


def test_a_burst_with_pauses_is_one() -> None:
    traffic = Traffic()
    for _ in range(2):
        for _ in range(3):
            traffic.burst()
            traffic.lull(30, need=4.0)
        traffic.lull(300)
    traffic.burst()
    assert traffic.lull(300)[-1] == 10.0


@given(st.lists(st.tuples(st.floats(0.1, 900.0), st.floats(0.0, 1e3), st.booleans()), max_size=60))
def test_no_more_is_kept_than_was_ever_needed(steps: list[tuple[float, float, bool]]) -> None:
    bursts, now, most = Bursts(), 0.0, 0.0
    for seconds, need, late in steps:
        now += seconds
        bursts.see(now, need, late=late)
        most = max(most, need)
        assert 0.0 <= bursts.kept(now) <= most


def test_one_large_burst_is_forgotten_once_four_smaller_ones_were_late() -> None:
    traffic = Traffic()
    traffic.burst(need=40.0)
    for _ in range(4):  # the fourth counts: the lulls since are known from the fifth on
        traffic.lull(200)
        traffic.burst()
        assert set(traffic.lull(1)) == {0.0}
    traffic.lull(200)
    traffic.burst()
    assert traffic.lull(20)[-1] == 10.0


def test_smaller_bursts_without_late_prompts_leave_a_larger_one_alone() -> None:
    traffic = Traffic()
    traffic.burst(need=40.0)
    for _ in range(9):
        traffic.lull(5)
        traffic.burst(late_s=0, seconds=10)
    traffic.lull(5)
    traffic.burst(need=40.0)
    assert traffic.lull(20)[-1] == 40.0


@pytest.mark.parametrize(
    "between",
    [
        [(1, 10.0)] * 3 + [(10, 10.0)],  # three were late for a moment only
        [(10, 10.0)] * 3 + [(1, 10.0)],
        [(10, 10.0)] * 3 + [(60, 40.0), (10, 10.0)],  # the large one came back meanwhile
    ],
)
def test_less_than_four_late_ones_leave_a_larger_one_alone(between: list[tuple[int, float]]) -> None:
    traffic = Traffic()
    traffic.burst(need=40.0)
    for late_s, need in [*between, (60, 40.0)]:
        traffic.lull(5)
        traffic.burst(late_s, need, seconds=max(late_s, 2))
    assert traffic.lull(20)[-1] == 40.0
