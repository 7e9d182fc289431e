"""Values land in the bucket whose bound they do not exceed, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.histogram import Histogram, HistogramTotals


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.add(value)
    assert histogram.totals == HistogramTotals((2, 2, 1), 7.5)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5))))
def test_counts_are_those_of_each_value_alone(values: list[tuple[float, int]]) -> None:
    bounds = (0.5, 1.0, 5.0)
    histogram = Histogram(bounds)
    for value, times in values:
        histogram.add(value, times)
    counts, total = histogram.totals
    each = [value for value, times in values for _ in range(times)]
    limits = [*bounds, float("inf")]
    assert [sum(counts[: at + 1]) for at in range(4)] == [sum(v <= limit for v in each) for limit in limits]
    assert total == pytest.approx(sum(each))
