"""Follows one sequence through its grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.structured.budget import TOKEN_S
from engine.structured.grammar import Grammar, plain
from engine.structured.lexers import RESTART_S, Lexer

RESTART_TOKENS = 4
"""Tokens as long as which a restart may take before it counts as an excess."""

SOON = 256
"""Tokens: a sequence that restarts again before it has made so many shares no states from then on."""

NO_TOKEN = "the model has no token for what must come next; change the form so that it needs no such characters"
"""What goes wrong where tokens spell a beginning of the form that none of them continues."""

_PIECE = 16
"""Tokens that are followed again between two looks at the clock."""

if TYPE_CHECKING:
    from llguidance import LLMatcher

_BIT = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)


class Matcher:
    """Follows the output of one sequence, from its first token on.

    It only knows tokens, so a sequence that was preempted, forked, or moved here needs no more than its output.
    Its lexer may be full of the states of others, of other clients, too, or be dropped, because all lexers
    together take too much memory. It then restarts with another lexer.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self.followed_s = 0.0
        """CPU time of following with this lexer."""
        self._lexer = grammar.form.lexer
        self._lexer.users.add(self)
        self._matcher = self._lexer.matcher()
        self._tokens: list[int] = []  # of the output
        self._restarted = -SOON  # tokens that the output had then
        self._alone = False  # its last restart was with a lexer of its own
        self._filled: NDArray[np.int32] = np.empty(grammar.mask_words, dtype=np.int32)
        words, bits = divmod(grammar.vocab_size, 32)
        self._last = (words, (1 << bits) - 1) if bits else None  # a word in part, and its bits
        self.mask: NDArray[np.int32] = self._filled[: words + bool(bits)]
        """The tokens of the model that may come next, as of the last :meth:`advance`: bit ``t % 32`` of word
        ``t // 32``."""

        self._address = self._filled.ctypes.data

    @property
    def advanced(self) -> int:
        """Tokens of the output that it has followed."""
        return len(self._tokens)

    def leave(self) -> None:
        """Give up what depends on the lexer, which has been dropped."""
        self._matcher, self.followed_s = None, 0.0

    def advance(self, tokens: Sequence[int], unwanted: Iterable[int]) -> str | None:
        """Follow ``tokens``, the next ones of the output, and fill :attr:`mask`; return what went wrong.

        If something did, the mask allows every token. Otherwise it excludes ``unwanted`` tokens
        unless nothing else may come next, and allows end-of-sequence tokens exactly when the output may end.
        """
        began, paid = thread_time(), len(tokens)
        if tokens:
            self._tokens.extend(tokens)
            if self._matcher is not None:
                self._matcher.consume_tokens(self._tokens[-len(tokens) :])
        error = None
        if self._matcher is None:
            error = self._lexer.why_dropped
            if self._restart(began, alone=False):
                error = None
                paid += RESTART_TOKENS
        elif not self._fill(self._matcher):
            # Whatever the library says: a full lexer may also say that an allowed token does not fit.
            error = plain(self._matcher.get_error())
            soon, again = len(self._tokens) - self._restarted < SOON, self._alone
            self._restarted, self._alone = len(self._tokens), soon
            if self._restart(began, alone=soon):
                error = None
                paid += 0 if soon and again else RESTART_TOKENS
        took_s = thread_time() - began
        self.followed_s += took_s
        self._lexer.followed_s += took_s
        self._grammar.form.memory.worked_s += took_s
        if not self._grammar.budget.spend(took_s, paid) and error is None:
            error = f"following it takes more than {TOKEN_S * 1000:g} ms per token; simplify it"
        if error is None and self._last is not None:
            word, bits = self._last
            self.mask[word] &= bits
        if error is None and not self.mask.any():  # what may come next are tokens that only the tokenizer has
            error = NO_TOKEN
        if error is not None:
            self.mask.fill(-1)
            return NO_TOKEN if error.startswith("NoExtension") else error
        self._leave_out(unwanted)
        return None

    def _fill(self, matcher: LLMatcher) -> bool:
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(self._address, self._filled.nbytes)
        return not matcher.is_error()

    def _restart(self, began: float, *, alone: bool) -> bool:
        """Follow the output with another lexer, whose states others share unless it is ``alone``."""
        form = self._grammar.form
        shared = form.lexer
        if not alone and shared is not self._lexer and self._follow(shared, began):
            return True  # another sequence has restarted with it
        lexer = form.another()
        if lexer is None:
            return False
        if not alone:
            form.lexer = lexer
        return self._follow(lexer, began)

    def _follow(self, lexer: Lexer, began: float) -> bool:
        """Follow the whole output with ``lexer``, unless that takes too long or too many states."""
        matcher = lexer.matcher()
        if matcher is None:
            return False
        for first in range(0, len(self._tokens), _PIECE):
            if thread_time() - began > RESTART_S:
                return False
            if not matcher.consume_tokens(self._tokens[first : first + _PIECE]):
                return False
        if not self._fill(matcher):
            return False
        self._lexer.users.discard(self)
        lexer.users.add(self)
        self._lexer, self._matcher, self.followed_s = lexer, matcher, 0.0
        return True

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
