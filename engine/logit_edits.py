"""What a sequence's options change in its logits, kept in step with its tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.sampling_params import SamplingParams

_FIRST_ROOM = 64  # tokens


class LogitEdits:
    """The edits of one sequence: a function of its options and tokens, so they may be rebuilt at any time.

    Each token is counted once: a step costs what it added, not the sequence's length.

    Attributes:
        params: the sequence's options.
        allowed: bits of the allowed tokens in int32 words, as :class:`kernels.interface.LogitEdit` has them;
            ``None`` allows all.
        bias_ids, bias: tokens and what to add to their logits.
    """

    def __init__(self, params: SamplingParams, output_start: int, vocab_size: int) -> None:
        self._output_start = output_start
        penalized = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.params = params
        # Which tokens count: all, those of the output, or none.
        self._first = 0 if params.repetition_penalty != 1.0 else output_start if penalized else None
        self._counted = self._first or 0  # tokens of the sequence before this place are counted
        self._slots: dict[int, int] = {}  # of each token in the two arrays
        self._ids: NDArray[np.int64] = np.empty(_FIRST_ROOM if self._first is not None else 0, dtype=np.int64)
        self._counts: NDArray[np.int32] = np.zeros(len(self._ids), dtype=np.int32)
        self._banned = tuple(word[0] for word in params.bad_words if len(word) == 1)
        self._endings: dict[int, list[tuple[int, ...]]] = {}  # longer bad words by their last token but one
        for word in params.bad_words:
            if len(word) > 1:
                self._endings.setdefault(word[-2], []).append(word)
        self.bias_ids: NDArray[np.int64] = np.array([token for token, _ in params.bias], dtype=np.int64)
        self.bias: NDArray[np.float32] = np.array([value for _, value in params.bias], dtype=np.float32)
        self.allowed: NDArray[np.int32] | None = None
        if params.allowed_token_ids is not None:
            self.allowed = allowed_mask(params.allowed_token_ids, vocab_size)

    def fork(self) -> LogitEdits:
        """The edits for a sequence forked from this one."""
        child = copy.copy(self)
        child._slots = dict(self._slots)
        child._ids, child._counts = self._ids.copy(), self._counts.copy()
        return child

    def banned(self, token_ids: list[int]) -> tuple[int, ...]:
        """Tokens that would complete a bad word after ``token_ids``, the whole sequence."""
        if not self._endings or len(token_ids) <= self._output_start:
            return self._banned
        length = len(token_ids) - self._output_start
        completed = [
            word[-1]
            for word in self._endings.get(token_ids[-1], ())
            if len(word) - 1 <= length and tuple(token_ids[1 - len(word) :]) == word[:-1]
        ]
        return (*self._banned, *completed) if completed else self._banned

    def counts(self, token_ids: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Tokens to penalize after ``token_ids``, the whole sequence, and how often the output has each.

        The arrays hold until the next call.
        """
        if self._first is not None and len(token_ids) > self._counted:
            self._count(token_ids)
        used = len(self._slots)
        return self._ids[:used], self._counts[:used]

    def _count(self, token_ids: list[int]) -> None:
        start, slots = self._output_start, self._slots
        for place in range(self._counted, len(token_ids)):
            token = token_ids[place]
            slot = slots.get(token)
            if slot is None:
                slot = slots[token] = len(slots)
                if slot == len(self._ids):
                    self._grow()
                self._ids[slot] = token
            if place >= start:
                self._counts[slot] += 1
        self._counted = len(token_ids)

    def _grow(self) -> None:
        room = 2 * len(self._ids)
        ids, counts = np.empty(room, dtype=np.int64), np.zeros(room, dtype=np.int32)
        ids[: len(self._ids)], counts[: len(self._ids)] = self._ids, self._counts
        self._ids, self._counts = ids, counts


def allowed_mask(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """The bits of ``token_ids`` in int32 words: bit t % 32 of word t // 32 is set for token t."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
