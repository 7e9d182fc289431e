"""Guesses the next tokens of a sequence from what followed its last ones before.

The method is prompt lookup decoding (Apoorv Saxena, "Prompt Lookup Decoding",
https://github.com/apoorvumang/prompt-lookup-decoding, 2023): no second model, only the sequence's own tokens.
"""

from __future__ import annotations

from array import array

import numpy as np

MATCHED = 3
"""Tokens that must have occurred before, one after the other, for what followed them to be a guess."""

MAX_SLOTS = 1 << 16
"""Of a table, 256 KiB; in a longer sequence later occurrences take the place of earlier ones."""

_MIN_SLOTS = 1 << 8
_BULK = 64  # new tokens from which on they are hashed together
_FIRST_ACCURACY = 0.5
_LEARNS = 1 / 8  # weight of the last guess in the accuracy
_FACTORS = (0x1F123BB5, 0x2545F491, 0x3C6EF35F)  # odd, one for each matched token


class PromptLookup:
    """Follows one sequence, whose tokens only grow at the end. Reading a token is O(1).

    There is one guess of the next token at any time, or none. It stays with the occurrence that it follows as
    long as that is right, and then looks for the last occurrence of the latest ``MATCHED`` tokens.

    Attributes:
        accuracy: share of the guesses that were right, recent ones first; whether or not they were used.
    """

    __slots__ = ("_next", "_seen", "_slots", "accuracy")

    def __init__(self) -> None:
        self.accuracy = _FIRST_ACCURACY
        self._slots = array("i", bytes(4 * _MIN_SLOTS))  # by hash, the place after an occurrence; 0 for none
        self._seen = 0  # tokens that have been read
        self._next = 0  # place of the token that is guessed to come next; 0 for none

    def read(self, tokens: list[int]) -> None:
        """Take in what has been added to ``tokens``, the whole sequence."""
        length = len(tokens)
        if 4 * length > len(self._slots) < MAX_SLOTS:
            self._enlarge(tokens)
        if length - self._seen > _BULK:
            self._remember(tokens, self._seen, length - 1)
            self._seen, self._next = length - 1, 0
        slots, mask = self._slots, len(self._slots) - 1
        first, second, third = _FACTORS
        guess = self._next
        for place in range(self._seen, length):
            token = tokens[place]
            if guess:
                right = tokens[guess] == token
                self.accuracy += (right - self.accuracy) * _LEARNS
                guess = guess + 1 if right else 0
            if place < MATCHED - 1:
                continue
            slot = (tokens[place - 2] * first ^ tokens[place - 1] * second ^ token * third) & mask
            if not guess:
                found = slots[slot]
                if found and tokens[found - MATCHED : found] == tokens[place + 1 - MATCHED : place + 1]:
                    guess = found
            slots[slot] = place + 1
        self._seen, self._next = length, guess

    def guess(self, tokens: list[int], count: int) -> list[int]:
        """The next ``count`` tokens after ``tokens``, which have been read; empty if there is no guess."""
        if not self._next:
            return []
        found = tokens[self._next : self._next + count]
        while len(found) < count:  # the sequence repeats itself, and goes on to
            found += found[: count - len(found)]
        return found

    def _enlarge(self, tokens: list[int]) -> None:
        """Make room for twice the tokens, so that each is entered a bounded number of times."""
        size = len(self._slots)
        while size < min(8 * len(tokens), MAX_SLOTS):
            size *= 2
        self._slots = array("i", bytes(4 * size))
        self._remember(tokens, 0, self._seen)

    def _remember(self, tokens: list[int], start: int, end: int) -> None:
        """Enter the occurrences that end in ``tokens[start:end]``."""
        start = max(start, MATCHED - 1)
        if end <= start:
            return
        read = np.array(tokens[start + 1 - MATCHED : end], dtype=np.int64)
        first, second, third = _FACTORS
        hashes = (read[:-2] * first ^ read[1:-1] * second ^ read[2:] * third) & (len(self._slots) - 1)
        # Of equal hashes the last one counts: numpy assigns in order.
        np.frombuffer(self._slots, dtype=np.int32)[hashes] = np.arange(start + 1, end + 1, dtype=np.int32)
