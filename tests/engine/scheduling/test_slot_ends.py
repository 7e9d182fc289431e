"""When running sequences are expected to end, against random draws of how long they are."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.slot_ends import ENOUGH, WINDOW, OutputLengths, SlotEnds, slot_ends

LAWS: dict[str, Callable[[Random], int]] = {
    "equal": lambda random: 200,
    "alike": lambda random: max(1, int(random.gauss(200, 25))),
    "uniform": lambda random: random.randrange(1, 400),
    "exponential": lambda random: 1 + int(random.expovariate(1 / 200)),
    "heavy": lambda random: 1 + int(random.lognormvariate(4.5, 1.2)),
    "two": lambda random: random.choice((20, 400)),
}


def known(*lengths: int) -> OutputLengths:
    outputs = OutputLengths()
    for length in lengths:
        outputs.add(length)
    return outputs


def drawn(law: str) -> OutputLengths:
    random = Random(1)
    return known(*(LAWS[law](random) for _ in range(WINDOW)))


def real(ages: list[int], lengths: OutputLengths) -> SlotEnds:
    """The means over draws of the lengths, each that ends being replaced."""
    random, first, half, last = Random(2), [], [], []
    for _ in range(600):
        heap = [random.choice([one for one in lengths.sorted if one > age]) - age for age in ages]
        heapq.heapify(heap)
        ends = []
        for _ in ages:
            ends.append(heap[0])
            heapq.heapreplace(heap, heap[0] + random.choice(lengths.sorted))
        first.append(ends[0])
        half.append(ends[len(ages) // 2 - 1])
        last.append(ends[-1])
    return SlotEnds(mean(first), mean(half), mean(last))


AGES = {
    "began-together": [120] * 16,
    "half-old-half-new": [150] * 8 + [10] * 8,
    "spread": list(range(0, 192, 12)),
    "few": [10, 90],
}


@pytest.mark.parametrize("ages", AGES)
@pytest.mark.parametrize("law", LAWS)
def test_ends_are_expected_where_they_are_on_average(law: str, ages: str) -> None:
    lengths = drawn(law)
    expected, actual = slot_ends(AGES[ages], lengths), real(AGES[ages], lengths)
    assert expected.first == pytest.approx(actual.first, rel=0.4 if law == "two" else 0.15)
    # When so many are expected to have ended is not the mean time at which so many have: where few end for a
    # while, it is the beginning or the end of that while.
    slack = lengths.mean / 5
    if len(AGES[ages]) > 2 and law != "two":
        assert expected.half == pytest.approx(actual.half, abs=slack)
    if len(AGES[ages]) > 2:
        assert expected.all == pytest.approx(actual.all, abs=slack)


def test_equal_ones_that_began_together_end_together() -> None:
    ends = slot_ends([150] * 8, known(*[200] * ENOUGH))
    assert ends.first == pytest.approx(50, abs=1)
    assert ends.all == pytest.approx(50, abs=200 / 12 + 1)


def test_of_two_halves_the_older_one_ends_first() -> None:
    ends = slot_ends([10, 150] * 4, known(*[200] * ENOUGH))
    assert ends.first == pytest.approx(50, abs=1)
    assert ends.half == pytest.approx(50, abs=200 / 12 + 1)
    assert ends.all == pytest.approx(190, abs=200 / 12 + 1)


@pytest.mark.parametrize("age", [0, 100, 400])
def test_where_ages_say_nothing_ends_are_even(age: int) -> None:
    lengths = drawn("exponential")
    ends = slot_ends([age] * 20, lengths)
    assert ends.first == pytest.approx(lengths.mean / 20, rel=0.3)
    assert ends.half == pytest.approx(lengths.mean / 2, rel=0.3)
    assert ends.all == pytest.approx(lengths.mean, rel=0.3)


def test_who_is_longer_than_all_known_may_go_on_for_as_long_beyond_them() -> None:
    alike = known(*[100] * ENOUGH)
    assert slot_ends([101], alike).first == pytest.approx(1, rel=0.1)
    assert slot_ends([600], alike).first == pytest.approx(500, rel=0.1)


def test_a_few_lengths_and_no_sequences_say_nothing() -> None:
    lengths = known(*[200] * (ENOUGH - 1))
    assert slot_ends([100], lengths) == SlotEnds(0.0, 0.0, 0.0)
    lengths.add(200)
    assert slot_ends([100], lengths).first == pytest.approx(100, abs=1)
    assert slot_ends([], lengths) == SlotEnds(0.0, 0.0, 0.0)


@given(
    ages=st.lists(st.integers(0, 100_000), min_size=1, max_size=40),
    lengths=st.lists(st.integers(1, 100_000), min_size=ENOUGH, max_size=60),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=200)
def test_ends_come_in_order_for_any_ages_and_lengths(
    ages: list[int], lengths: list[int], random: Random
) -> None:
    outputs = known(*lengths)
    ends = slot_ends(ages, outputs)
    assert 0.0 < ends.first <= ends.half <= ends.all < 10**7
    random.shuffle(ages)
    assert slot_ends(ages, outputs) == ends


@given(lengths=st.lists(st.integers(1, 50), max_size=3 * WINDOW))
@settings(max_examples=50)
def test_the_last_lengths_are_known(lengths: list[int]) -> None:
    outputs = known(*lengths)
    last = lengths[-WINDOW:]
    assert outputs.sorted == sorted(last)
    assert outputs.mean == pytest.approx(mean(last) if last else 0.0)
