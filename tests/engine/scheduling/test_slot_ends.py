"""When running sequences are expected to end, against random draws of how long they are."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.slot_ends import ENOUGH, WINDOW, OutputLengths, Running, SlotEnds, slot_ends

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
    return known(*(LAWS[law](random) for _ in range(WINDOW)), limit=limit)


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
    assert slot_ends(aged(*[30] * 8, limit=1_000), known(*[FAR] * WINDOW, limit=known_limit)) == pytest.approx(
        (970, 970, 970), rel=0.1
    )


@pytest.mark.parametrize("law", ["uniform", "exponential", "heavy"])
def test_limits_of_known_outputs_do_not_hide_how_long_others_are(law: str) -> None:
    """Half of the known outputs had a limit that most reached."""
    random, mixed = Random(1), OutputLengths()
    for place in range(WINDOW):
        length, limit = LAWS[law](random), (FAR, 50)[place % 2]
        mixed.add(min(length, limit), length >= limit)
    running = aged(*range(0, 96, 6))
    expected, actual = slot_ends(running, mixed), real(running, drawn(law))
    assert expected.first == pytest.approx(actual.first, rel=0.25)
    assert expected.half == pytest.approx(actual.half, rel=0.25)
    assert expected.all == pytest.approx(actual.all, rel=0.25)


def test_those_that_take_the_place_of_others_have_limits_of_their_own() -> None:
    running, lengths = aged(*[90, 60] * 8, limit=100), known(*[FAR] * WINDOW, limit=100)
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


@given(lengths=st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=3 * WINDOW))
@settings(max_examples=50)
def test_the_last_lengths_are_known(lengths: list[tuple[int, bool]]) -> None:
    outputs = OutputLengths()
    for length, at_limit in lengths:
        outputs.add(length, at_limit)
    assert [output[:2] for output in outputs.recent] == lengths[-WINDOW:]


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
        return slot_ends([Running(made, FAR - made) for made, _ in self.running], self.lengths)


@pytest.mark.parametrize("count", [8, 64, 384])
@pytest.mark.parametrize("law", ["alike", "uniform", "exponential", "two"])
def test_what_runs_does_not_seem_longer_than_it_is(law: str, count: int) -> None:
    """Outputs stay as they are; with more slots, fewer of the known ones began after the oldest had ended."""
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
    turns = [[end for end in ends if end > step][:count] for step in asked_at]
    assert mean(one.half for one in expected) == pytest.approx(
        mean(turn[count // 2 - 1] - step for turn, step in zip(turns, asked_at, strict=True)), rel=0.2
    )
    assert mean(one.all for one in expected) == pytest.approx(
        mean(turn[-1] - step for turn, step in zip(turns, asked_at, strict=True)), rel=0.2
    )


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
