"""Follows one sequence through its grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import thread_time

import numpy as np
from numpy.typing import NDArray

from engine.structured.budget import TOKEN_S
from engine.structured.grammar import Grammar, plain

_BIT = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)


class Matcher:
    """Follows the output of one sequence, from its first token on.

    It only knows tokens, so a sequence that was preempted, forked, or moved here needs no more than its output.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._advanced = 0  # tokens of the output
        self.mask: NDArray[np.int32] = np.empty(grammar.mask_words, dtype=np.int32)
        """The tokens that may come next, as of the last :meth:`advance`: bit ``t % 32`` of word ``t // 32``."""

        self._address = self.mask.ctypes.data

    @property
    def advanced(self) -> int:
        """Tokens of the output that it has followed."""
        return self._advanced

    def advance(self, tokens: Sequence[int], unwanted: Iterable[int]) -> str | None:
        """Follow ``tokens``, the next ones of the output, and fill :attr:`mask`; return what went wrong.

        If something did, the mask allows every token. Otherwise it excludes ``unwanted`` tokens
        unless nothing else may come next, and allows end-of-sequence tokens exactly when the output may end.
        """
        matcher, began = self._matcher, thread_time()
        if tokens:
            matcher.consume_tokens(tokens if isinstance(tokens, list) else list(tokens))
            self._advanced += len(tokens)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(self._address, self.mask.nbytes)
        if matcher.is_error():
            self.mask.fill(-1)
            return plain(matcher.get_error())
        if not self._grammar.budget.spend(thread_time() - began, len(tokens)):
            self.mask.fill(-1)
            return f"following it takes more than {TOKEN_S * 1000:g} ms per token; simplify it"
        self._leave_out(unwanted)
        return None

    def _leave_out(self, unwanted: Iterable[int]) -> None:
        mask = self.mask
        out = [token for token in unwanted if mask[token >> 5] & _BIT[token & 31]]
        if not out:
            return
        before = mask.copy()
        for token in out:
            mask[token >> 5] &= ~_BIT[token & 31]
        if not mask.any():
            mask[:] = before
