"""When running sequences are expected to end, against random draws of how long they are."""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable
from random import Random
from statistics import mean
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.slot_ends import ENOUGH, MANY, WINDOW, OutputLengths, Running, SlotEnds, slot_ends

logger = logging.getLogger(__name__)

LAWS: dict[str, Callable[[Random], int]] = {
    "equal": lambda random: 200,
    "alike": lambda random: max(1, int(random.gauss(200, 25))),
    "uniform": lambda random: random.randrange(1, 400),
    "exponential": lambda random: 1 + int(random.expovariate(1 / 200)),
    "heavy": lambda random: 1 + int(random.lognormvariate(4.5, 1.2)),
    "two": lambda random: random.choice((20, 400)),
}


FAR = 10**6
"""A limit that nothing reaches."""


def known(*lengths: int, limit: int = FAR) -> OutputLengths:
    """Outputs that would have these lengths without the limit.

    What runs made its tokens before they were observed, so it says nothing of lengths.
    """
    outputs = OutputLengths()
    outputs.passed(FAR)
    for length in lengths:
        outputs.add(min(length, limit), length >= limit)
    outputs.since = outputs.clock = 0.0
    return outputs


def aged(*ages: int, limit: int = FAR) -> list[Running]:
    return [Running(age, limit - age) for age in ages]


def drawn(law: str, limit: int = FAR) -> OutputLengths:
    random = Random(1)
    return known(*(LAWS[law](random) for _ in range(MANY)), limit=limit)


def real(running: list[Running], lengths: OutputLengths) -> SlotEnds:
    """The means over draws of the lengths, each that ends being replaced by one with the same limit."""
    random, first, half, last = Random(2), [], [], []
    free = [length for length, _, _ in lengths.recent]
    for _ in range(600):
        heap = [
            (min(random.choice([one for one in free if one > made]) - made, left), made + left)
            for made, left in running
        ]
        heapq.heapify(heap)
        ends = []
        for _ in running:
            end, limit = heap[0]
            ends.append(end)
            heapq.heapreplace(heap, (end + min(random.choice(free), limit), limit))
        first.append(ends[0])
        half.append(ends[len(running) // 2 - 1])
        last.append(ends[-1])
    return SlotEnds(mean(first), mean(half), mean(last))


def average(lengths: OutputLengths) -> float:
    return mean(length for length, _, _ in lengths.recent)


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
    running = aged(*AGES[ages])
    expected, actual = slot_ends(running, lengths), real(running, lengths)
    assert expected.first == pytest.approx(actual.first, rel=0.4 if law == "two" else 0.15)
    # When so many are expected to have ended is not the mean time at which so many have: where few end for a
    # while, it is the beginning or the end of that while.
    slack = average(lengths) / 5
    if len(AGES[ages]) > 2 and law != "two":
        assert expected.half == pytest.approx(actual.half, abs=slack)
    if len(AGES[ages]) > 2:
        assert expected.all == pytest.approx(actual.all, abs=slack)


def test_equal_ones_that_began_together_end_together() -> None:
    ends = slot_ends(aged(*[150] * 8), known(*[200] * ENOUGH))
    assert ends.first == pytest.approx(50, abs=1)
    assert ends.all == pytest.approx(50, abs=200 / 12 + 1)


def test_of_two_halves_the_older_one_ends_first() -> None:
    ends = slot_ends(aged(*[10, 150] * 4), known(*[200] * ENOUGH))
    assert ends.first == pytest.approx(50, abs=1)
    assert ends.half == pytest.approx(50, abs=200 / 12 + 1)
    assert ends.all == pytest.approx(190, abs=200 / 12 + 1)


@pytest.mark.parametrize("age", [0, 100])
def test_where_ages_say_nothing_ends_are_even(age: int) -> None:
    lengths = drawn("exponential")
    ends = slot_ends(aged(*[age] * 20), lengths)
    assert ends.first == pytest.approx(average(lengths) / 20, rel=0.3)
    assert ends.half == pytest.approx(average(lengths) / 2, rel=0.3)
    assert ends.all == pytest.approx(average(lengths), rel=0.3)


def test_who_is_longer_than_all_known_may_go_on_for_as_long_beyond_them() -> None:
    alike = known(*[100] * ENOUGH)
    assert slot_ends(aged(101), alike).first == pytest.approx(1, rel=0.1)
    assert slot_ends(aged(600), alike).first == pytest.approx(500, rel=0.1)


def test_a_few_lengths_and_no_sequences_say_nothing() -> None:
    lengths = known(*[200] * (ENOUGH - 1))
    assert slot_ends(aged(100), lengths) == SlotEnds(0.0, 0.0, 0.0)
    lengths.add(200)
    assert slot_ends(aged(100), lengths).first == pytest.approx(100, abs=1)
    assert slot_ends([], lengths) == SlotEnds(0.0, 0.0, 0.0)


LIMITS = {
    "all-alike": [Running(age, 300 - age) for age in range(0, 192, 12)],
    "some-near": [Running(120, 10 + 5 * place) for place in range(16)],
    "halves": [*aged(*[100] * 8), *aged(*[100] * 8, limit=150)],
    "began-together": aged(*[90] * 16, limit=120),
}


@pytest.mark.parametrize("case", LIMITS)
@pytest.mark.parametrize("law", LAWS)
def test_running_sequences_end_at_their_limits_at_the_latest(law: str, case: str) -> None:
    lengths = drawn(law)
    expected, actual = slot_ends(LIMITS[case], lengths), real(LIMITS[case], lengths)
    assert expected.first == pytest.approx(actual.first, rel=0.4 if law == "two" else 0.15, abs=0.5)
    assert expected.all == pytest.approx(actual.all, abs=average(lengths) / 5)


@pytest.mark.parametrize("known_limit", [50, 100, 400])
def test_outputs_that_ended_at_their_limit_say_only_that_they_would_be_longer(known_limit: int) -> None:
    assert slot_ends(aged(*[30] * 8, limit=1_000), known(*[FAR] * MANY, limit=known_limit)) == pytest.approx(
        (970, 970, 970), rel=0.1
    )


@pytest.mark.parametrize("law", ["uniform", "exponential", "heavy"])
def test_limits_of_known_outputs_do_not_hide_how_long_others_are(law: str) -> None:
    """Half of the known outputs had a limit that most reached."""
    random, mixed = Random(1), OutputLengths()
    for place in range(MANY):
        length, limit = LAWS[law](random), (FAR, 50)[place % 2]
        mixed.add(min(length, limit), length >= limit)
    running = aged(*range(0, 96, 6))
    expected, actual = slot_ends(running, mixed), real(running, drawn(law))
    assert expected.first == pytest.approx(actual.first, rel=0.25)
    assert expected.half == pytest.approx(actual.half, rel=0.25)
    assert expected.all == pytest.approx(actual.all, rel=0.25)


def test_those_that_take_the_place_of_others_have_limits_of_their_own() -> None:
    running, lengths = aged(*[90, 60] * 8, limit=100), known(*[FAR] * MANY, limit=100)
    assert slot_ends(running, lengths).all == pytest.approx(40, abs=100 / 12 + 1)
    assert slot_ends(running, lengths, [12] * 16).all == pytest.approx(22, abs=2)


def test_those_that_are_longer_than_all_known_say_together_when_the_next_one_ends() -> None:
    """One in 16 that ended as late as its own age says would end after 6 tokens, but none of them has."""
    ends = slot_ends(aged(*[200] * 16), known(*[100] * ENOUGH))
    assert ends.first == pytest.approx(100, rel=0.1)


@given(
    running=st.lists(
        st.builds(Running, st.integers(0, 100_000), st.integers(1, 10**6)), min_size=1, max_size=40
    ),
    lengths=st.lists(st.tuples(st.integers(1, 100_000), st.booleans()), min_size=ENOUGH, max_size=60),
    limits=st.lists(st.integers(1, 10**6), max_size=40),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=200)
def test_ends_come_in_order_for_any_sequences_and_lengths(
    running: list[Running], lengths: list[tuple[int, bool]], limits: list[int], random: Random
) -> None:
    outputs = OutputLengths()
    for length, at_limit in lengths:
        outputs.add(length, at_limit)
    ends = slot_ends(running, outputs, limits)
    assert 0.0 < ends.first <= ends.half <= ends.all < 10**7
    assert ends.first <= min(one.left for one in running)
    random.shuffle(running)
    assert slot_ends(running, outputs, limits) == ends


def test_the_last_lengths_are_known() -> None:
    lengths = [(place % 50 + 1, place % 3 == 0) for place in range(WINDOW + 100)]
    outputs = OutputLengths()
    for length, at_limit in lengths:
        outputs.add(length, at_limit)
    assert [output[:2] for output in outputs.recent] == lengths[-WINDOW:]


@pytest.mark.parametrize(
    ("running", "known_then"),
    [(1, 32), (8, 32), (20, 80), (32, 128), (128, 128), (300, 300), (1024, 1024), (4096, 1024)],
)
def test_the_more_run_the_more_lengths_are_known(running: int, known_then: int) -> None:
    outputs = OutputLengths()
    for length in range(WINDOW):
        outputs.passed(1.0)
        outputs.add(length + 1)
    outputs.adapt(running)
    assert [output.tokens for output in outputs.recent] == [*range(WINDOW + 1 - known_then, WINDOW + 1)]


class Slots:
    """Slots that are always taken: all outputs so far, and what runs."""

    def __init__(self, count: int, draw: Callable[[], int]) -> None:
        self.lengths = OutputLengths()
        self.running = [[0, draw()] for _ in range(count)]
        self.draw = draw
        self.ended = 0

    def step(self) -> None:
        for one in self.running:
            one[0] += 1
            if one[0] == one[1]:
                self.lengths.add(one[0])
                self.ended += 1
                one[:] = [0, self.draw()]
        self.lengths.passed(1.0)

    def expected(self) -> SlotEnds:
        self.lengths.adapt(len(self.running))
        return slot_ends([Running(made, FAR - made) for made, _ in self.running], self.lengths)


class Turns(NamedTuple):
    """What was expected at some moments, and when as many ended."""

    expected: list[SlotEnds]
    half: list[int]
    all: list[int]


def turns(law: str, count: int) -> Turns:
    """Outputs stay as they are."""
    random = Random(1)
    slots = Slots(count, lambda: LAWS[law](random))
    for _ in range(1_000):
        slots.step()
    expected, asked_at = [], []
    ends: list[int] = []  # how many outputs have ended after each step
    for step in range(1_500):
        if step < 1_000 and step % 10 == 0:
            expected.append(slots.expected())
            asked_at.append(step)
        before = slots.ended
        slots.step()
        ends += [step + 1] * (slots.ended - before)
    later = [(step, [end for end in ends if end > step][:count]) for step in asked_at]
    return Turns(
        expected,
        [turn[count // 2 - 1] - step for step, turn in later],
        [turn[-1] - step for step, turn in later],
    )


@pytest.mark.parametrize("count", [8, 64, 384])
@pytest.mark.parametrize("law", ["alike", "uniform", "exponential", "two"])
def test_what_runs_does_not_seem_longer_than_it_is(law: str, count: int) -> None:
    """With more slots, fewer of the known outputs began after the oldest had ended."""
    seen = turns(law, count)
    assert mean(one.half for one in seen.expected) == pytest.approx(mean(seen.half), rel=0.2)
    assert mean(one.all for one in seen.expected) == pytest.approx(mean(seen.all), rel=0.2)


@pytest.mark.parametrize(("law", "most"), [("alike", 1.07), ("exponential", 1.2), ("heavy", 1.2)])
def test_where_many_run_each_estimate_is_near(law: str, most: float) -> None:
    """Estimates from the last 128 outputs alone would vary more."""
    seen = turns(law, 384)
    expected = [one.all for one in seen.expected]
    ratios = sorted(one / real for one, real in zip(expected, seen.all, strict=True))
    logger.info("384 slots, %s: %.2f to %.2f of the actual time", law, ratios[0], ratios[-1])
    assert 1 / most < ratios[0] <= ratios[-1] < most


@pytest.mark.parametrize("law", ["alike", "exponential", "heavy"])
def test_where_many_run_a_change_of_lengths_shows_soon(law: str) -> None:
    """From 64 tokens to 512, on average. With the last 1,024 outputs it would take nearly twice as many."""
    random, average = Random(1), 64.0
    slots = Slots(256, lambda: math.ceil(LAWS[law](random) * average / 200))
    for _ in range(500):
        slots.step()
    average = 512.0
    expected: list[tuple[int, int, float]] = []  # after how many steps and ends
    ends: list[int] = []
    for step in range(4_000):
        if step < 2_500 and step % 8 == 0:
            expected.append((step, len(ends), slots.expected().all))
        before = slots.ended
        slots.step()
        ends += [step + 1] * (slots.ended - before)
    far = [
        ended
        for step, ended, tokens in expected
        if not 0.75 < tokens / (ends[ended + len(slots.running) - 1] - step) < 4 / 3
    ]
    logger.info("256 slots, %s: near from %d outputs on", law, far[-1])
    assert far[-1] < 700


def test_sequences_that_run_show_that_outputs_have_become_longer() -> None:
    """None of the longer ones has ended; a few long ones were known before."""
    random, most = Random(1), 50
    slots = Slots(64, lambda: most if random.random() < 0.97 else 600)
    for _ in range(1_000):
        slots.step()
    assert slots.expected().all < 100
    most = 500
    for _ in range(150):
        slots.step()
    ends = slots.expected()
    assert ends.half > 250  # they have 350 left, as far as they are not the few
    assert ends.all > 300
