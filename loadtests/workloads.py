"""Prompts for load tests: chats that share system prompts as real traffic does, the same for the same seed."""

from __future__ import annotations

import bisect
import itertools
import random

# fmt: off
_SUBJECTS = (
    "the harbor", "the old library", "the market hall", "a mountain village", "the night train",
    "the botanical garden", "the observatory", "the river delta", "a glass workshop", "the coastal road",
    "the music school", "the salt mine",
)
_VERBS = (
    "opens", "closes", "repairs", "measures", "paints", "describes", "guards", "counts", "records", "visits",
    "maps", "restores",
)
_OBJECTS = (
    "wooden boats", "rare books", "ripe pears", "stone bridges", "sleeping cars", "tall ferns", "faint stars",
    "muddy channels", "blue bottles", "narrow bends", "brass horns", "white crystals",
)
_TIMES = (
    "at dawn", "before noon", "every Tuesday", "in late autumn", "after the rain", "twice a year",
    "by lamplight",
)
_QUESTIONS = (
    "What is the capital of {}?", "Write two sentences about {}.", "Name three foods from {}.",
    "What should I pack for a week in {}?", "How is the weather in {} in spring?",
    "Tell me one surprising fact about {}.",
)
_PLACES = (
    "France", "Japan", "Brazil", "Kenya", "Norway", "India", "Canada", "Egypt", "Peru", "Vietnam", "Greece",
    "Iceland", "Morocco", "Chile", "Poland", "Nepal",
)
_WORDS = ("river", "stone", "lamp", "garden", "copper", "violin", "harbor", "winter", "pocket", "ladder")
# fmt: on


class Zipf:
    """Ranks ``0..size - 1``; rank ``k`` comes with a probability proportional to ``(k + 1) ** -exponent``."""

    def __init__(self, size: int, exponent: float = 1.0) -> None:
        if size < 1:
            raise ValueError(f"size is {size} but must be at least 1")
        self._cumulative = list(itertools.accumulate((rank + 1) ** -exponent for rank in range(size)))

    def draw(self, rng: random.Random) -> int:
        return bisect.bisect_right(self._cumulative, rng.random() * self._cumulative[-1])


def sentences(rng: random.Random, words: int) -> str:
    """English-looking text of at least ``words`` words."""
    parts: list[str] = []
    count = 0
    while count < words:
        sentence = " ".join(
            [rng.choice(_SUBJECTS), rng.choice(_VERBS), rng.choice(_OBJECTS), rng.choice(_TIMES)]
        )
        count += sentence.count(" ") + 1
        parts.append(sentence[0].upper() + sentence[1:] + ".")
    return " ".join(parts)


def system_prompt(rank: int, words: int, seed: int = 0) -> str:
    """The system prompt that all chats of this rank share; no two ranks begin alike."""
    rng = random.Random(f"system {seed} {rank}")
    return f"You are assistant number {rank} of a small town. These are your notes. {sentences(rng, words)}"


def question(rng: random.Random) -> str:
    return rng.choice(_QUESTIONS).format(rng.choice(_PLACES))


def prompts(count: int, seed: int = 0) -> list[str]:
    """Different prompts of a dozen words for completions."""
    rng = random.Random(seed)
    return [f"Story {index}: the " + " ".join(rng.choices(_WORDS, k=10)) for index in range(count)]


class ChatTraffic:
    """Conversations of one simulated user.

    Each begins with one of ``num_systems`` system prompts of about ``system_words`` words, drawn by Zipf, and
    goes on for one to ``max_turns`` turns.
    """

    def __init__(
        self, seed: int, user: int, *, num_systems: int = 16, system_words: int = 150, max_turns: int = 3
    ) -> None:
        self._seed = seed
        self._rng = random.Random(f"user {seed} {user}")
        self._zipf = Zipf(num_systems)
        self._system_words = system_words
        self._max_turns = max_turns
        self._left = 0
        self._messages: list[dict[str, str]] = []

    def next_messages(self) -> list[dict[str, str]]:
        """The messages of the next request: the next turn, or a new conversation."""
        if self._left == 0:
            self._left = self._rng.randint(1, self._max_turns)
            rank = self._zipf.draw(self._rng)
            system = system_prompt(rank, self._system_words, self._seed)
            self._messages = [{"role": "system", "content": system}]
        self._left -= 1
        self._messages.append({"role": "user", "content": question(self._rng)})
        return self._messages

    def answered(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})

    def failed(self) -> None:
        self._left = 0
