"""Guesses from a sequence's own text, token by token."""

from __future__ import annotations

import random

import pytest

from engine.scheduling import prompt_lookup
from engine.scheduling.prompt_lookup import MAX_SLOTS, PromptLookup


def after(tokens: list[int]) -> PromptLookup:
    lookup = PromptLookup()
    lookup.read(tokens)
    return lookup


def test_what_followed_the_last_three_tokens_comes_again() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    assert after(tokens).guess(tokens, 2) == [4, 5]
    assert after(tokens).guess(tokens, 3) == [4, 5, 6]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], [1, 2, 3, 4, 2, 3], [1, 2, 3, 9, 4, 2, 3]])
def test_there_is_no_guess_without_three_equal_tokens(tokens: list[int]) -> None:
    assert after(tokens).guess(tokens, 3) == []


def test_the_last_occurrence_counts() -> None:
    tokens = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3]
    assert after(tokens).guess(tokens, 1) == [5]


def test_a_guess_stays_with_its_occurrence_while_it_is_right() -> None:
    tokens = [1, 2, 3, 4, 8, 2, 3, 4, 9, 1, 2, 3]
    lookup = after(tokens)
    tokens.append(4)  # 2, 3, 4 came last before 9
    lookup.read(tokens)
    assert lookup.guess(tokens, 1) == [8]
    tokens.append(9)  # wrong: 3, 4, 9 is looked for
    lookup.read(tokens)
    assert lookup.guess(tokens, 3) == [1, 2, 3]


def test_a_sequence_that_repeats_itself_is_guessed_to_go_on() -> None:
    tokens = [7, 1, 2, 1, 2, 1, 2]
    assert after(tokens).guess(tokens, 7) == [1, 2, 1, 2, 1, 2, 1]
    tokens = [5, 5, 5, 5]
    assert after(tokens).guess(tokens, 3) == [5, 5, 5]


def test_accuracy_counts_guesses_whether_or_not_they_were_used() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    lookup = after(tokens)
    assert lookup.accuracy == 0.5
    tokens.append(4)
    lookup.read(tokens)
    assert lookup.accuracy == 0.5 + 0.5 / 8
    tokens.append(0)
    lookup.read(tokens)
    assert lookup.accuracy == (0.5 + 0.5 / 8) * 7 / 8
    tokens.append(0)  # nothing was guessed
    lookup.read(tokens)
    assert lookup.accuracy == (0.5 + 0.5 / 8) * 7 / 8


def test_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "_FACTORS", (0, 0, 0))
    tokens = [1, 2, 3, 4, 5, 6]
    assert after(tokens).guess(tokens, 1) == []
    tokens = [1, 2, 3, 3, 3, 3]
    assert after(tokens).guess(tokens, 2) == [3, 3]


@pytest.mark.parametrize("seed", range(2))
def test_reading_many_tokens_at_once_is_reading_them_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But that nobody could use a guess in between."""
    monkeypatch.setattr(prompt_lookup, "_MIN_SLOTS", MAX_SLOTS)
    rng = random.Random(seed)
    tokens: list[int] = []
    single = PromptLookup()
    for _ in range(10):
        old = rng.randrange(len(tokens) + 1)
        tokens += [rng.randrange(50_000) for _ in range(rng.randint(1, 9))]
        for token in tokens[old : old + rng.randint(1, 60)]:
            tokens.append(token)
            single.read(tokens)
        bulk = after(tokens)
        assert single._slots == bulk._slots
        assert bool(single.guess(tokens, 1)) == bool(bulk.guess(tokens, 1))


def test_growing_keeps_what_was_read() -> None:
    tokens = list(range(10, 50))
    lookup = after(tokens)
    before = len(lookup._slots)
    for token in [*range(100, 400), 20, 21, 22]:
        tokens.append(token)
        lookup.read(tokens)
    assert len(lookup._slots) >= 4 * len(tokens) > before
    assert lookup.guess(tokens, 3) == [23, 24, 25]


def test_memory_is_bounded() -> None:
    lookup = PromptLookup()
    tokens = list(range(3 * MAX_SLOTS))
    for end in (100, 1_000, len(tokens)):
        lookup.read(tokens[:end])
    assert len(lookup._slots) == MAX_SLOTS
    tokens += tokens[-50:-40]  # later occurrences are there
    lookup.read(tokens)
    assert lookup.guess(tokens, 2) == tokens[3 * MAX_SLOTS - 40 : 3 * MAX_SLOTS - 38]
