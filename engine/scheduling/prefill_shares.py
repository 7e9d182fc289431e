"""How many prefill tokens each sequence may take in one step, so that no prompt takes them all."""

from __future__ import annotations

import math

from engine.scheduling.fair_queue import OUTPUT_WEIGHT, Account
from engine.scheduling.sequence import Order, Sequence

SHORT_SHARE = 0.1
"""Share of the prefill tokens that short prompts may take from longer ones before them, in the long run."""

SHORT_TOKENS = 16
"""A prompt of at most this many tokens is always short, unless that is over half of a step's prefill tokens."""


class PrefillShares:
    """Applies the rules to each step: :meth:`reset` is called in each, :meth:`begin` in those with a prefill.

    Tokens go to sequences in order. If more tokens are wanted than there are:

    - Some are *reserved* for short prompts: those that need no more than this reserve. The reserve grows by
      ``SHORT_SHARE`` of all prefill tokens, up to a quarter of a step.
    - An account in ``quotas`` gets no more work than its quota. First those of its sequences get it that were
      held back.
    - If a sequence got less than it wanted, sequences with a worse priority get nothing.

    Tokens that are left under these rules go to sequences in order: see ``lengthen_held_back`` in
    ``engine/scheduling/prefill.py``.
    """

    def __init__(self) -> None:
        self.begun = False
        self.held_back: list[Sequence] = []  # running ones that got less than they wanted
        self.limited = False  # whether any got less than it wanted
        self.quotas: dict[Account, float] = {}  # work left for each client, in prompt tokens
        self._first_held: dict[Account, Order] = {}  # of those that gave way to waiting ones
        self._saved = math.inf  # tokens for short prompts
        self._budget = 0
        self._ordered = 0  # left, to go by the order
        self._kept = 0  # left, for short prompts
        self._worst = math.inf  # worse priorities get none

    def reset(self) -> None:
        """Another step is planned, and nothing is known of its prefills."""
        if self.limited:
            self._saved += SHORT_SHARE * self._budget
        self.begun = self.limited = False
        self.held_back = []
        self._first_held = {}

    def begin(self, budget: int, contended: bool, quotas: dict[Account, float]) -> None:
        """The step has ``budget`` tokens for prefills; ``contended``: two or more sequences want some."""
        self.begun = True
        self._budget = self._ordered = budget
        self.quotas = quotas
        self._kept = 0
        self._worst = math.inf
        if contended:
            self._saved = min(self._saved, max(budget // 4, min(SHORT_TOKENS, budget // 2)))
            self._kept = int(self._saved)
            self._ordered -= self._kept

    def lift(self, tokens: int) -> None:
        """Give the rest of the step's tokens to sequences in order from now on."""
        self._ordered, self._kept, self.quotas = tokens, 0, {}
        self._first_held = {}
        self._worst = math.inf

    def allowed(self, sequence: Sequence, wanted: int) -> int:
        """How many of the ``wanted`` tokens a sequence may take now."""
        length = self._by_order(sequence, wanted)
        if length == wanted:
            return length
        if wanted <= self._kept and sequence.order[0] <= self._worst:
            return wanted
        self.limited = True
        self._worst = min(self._worst, sequence.order[0])
        return length

    def take(self, sequence: Sequence, wanted: int, length: int) -> None:
        """Let a running sequence take the tokens that it is allowed."""
        if length <= self._by_order(sequence, wanted):
            self._ordered -= length
        else:
            self._kept -= length
            self._saved -= length
        if self.quotas:
            charge(self.quotas, sequence, length, length == wanted)
        if length < wanted:
            self.held_back.append(sequence)

    def hold_back(self, sequence: Sequence) -> None:
        """Make a running sequence give way to waiting ones that come before it."""
        self.limited = True
        self.held_back.append(sequence)
        self._first_held.setdefault(sequence.ticket.account, sequence.order)

    def _by_order(self, sequence: Sequence, wanted: int) -> int:
        if sequence.order[0] > self._worst:
            return 0
        if self._first_held:
            # What is its client's share goes to those that were held back before it: otherwise ever more would
            # begin, and hold blocks, before any of them ends.
            held = self._first_held.get(sequence.ticket.account)
            if held is not None and held < sequence.order:
                return 0
        length = wanted if wanted < self._ordered else self._ordered
        if self.quotas:
            length = max(min(length, int(self.quotas.get(sequence.ticket.account, length))), 0)
        return length


def charge(quotas: dict[Account, float], sequence: Sequence, tokens: int, complete: bool) -> None:
    """Take the work of computing ``tokens`` of a prompt from its client's quota, if it has one.

    ``complete``: these are its last ones, so that the sequence and those forked from it generate their first.
    The fair queue counts the same (``engine/scheduling/fair_queue.py``).
    """
    account = sequence.ticket.account
    if account not in quotas:
        return
    work = float(tokens)
    if complete and len(sequence.token_ids) < sequence.max_total_tokens:
        group = sequence.group
        work += OUTPUT_WEIGHT * (1 if group is None or group.forked else sequence.params.width)
    quotas[account] -= work
