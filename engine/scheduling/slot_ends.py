"""When running sequences end, by how many tokens they have made and may make, and how long outputs have been.

An output ends by itself or at its limit. One that ended at its limit says only that it would have been longer,
and one that runs, that it will be. So the share of outputs that go on beyond a length is estimated as by Kaplan
and Meier (JASA 1958), and longer outputs show before they end. A running sequence ends by itself, as these
shares say, or at its own limit. So a change of limits shows at once.

Only what was made since the oldest of the known outputs ended counts (delayed entry): before that, others ended
that are not known any more, and sequences that live long would be over-represented.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from copy import copy
from itertools import accumulate, pairwise
from operator import itemgetter, mul
from typing import NamedTuple

import numpy as np

WINDOW = 1024
"""Outputs whose lengths are remembered at most, the last ones."""

MANY = 128
"""Where more run, one output for each is remembered: with fewer, estimates vary more; with more, a change of
lengths shows later."""

FEWEST, PER_RUNNING = 32, 4
"""Where fewer run, ``PER_RUNNING`` for each up to ``MANY``, and at least ``FEWEST``: a change shows in a few
turns."""

ENOUGH = 16
"""Fewer lengths say too little."""

_CELLS = 24  # of the time in which outputs of average length end twice over
_MOST_CELLS = 4 * _CELLS
_GROUPS = 8
_TAIL = 16  # of the outputs that ended by themselves, the longest ones, which say how much longer others may be
_HALVINGS, _FIRST_CELLS = 8, 4
_WIDER, _NEGLIGIBLE = 1.5, 0.01


class Output(NamedTuple):
    """One that ended by itself or at its limit."""

    tokens: int
    at_limit: bool
    ended: float
    """By the clock of its :class:`OutputLengths`."""


class OutputLengths:
    """The lengths in tokens of the last outputs that ended by themselves or at their limit.

    ``clock`` counts the tokens of a sequence that has run all the time.
    """

    def __init__(self) -> None:
        self.recent: deque[Output] = deque()
        self.clock = 0.0
        self.since = -math.inf
        """When the last of the forgotten outputs ended, by the clock."""

    def passed(self, tokens: float) -> None:
        """Each running sequence has made so many more tokens, on average."""
        self.clock += tokens

    def add(self, tokens: int, at_limit: bool = False) -> None:
        """Take in an output and forget the oldest if there are too many."""
        self.recent.append(Output(tokens, at_limit, self.clock))
        self._forget(WINDOW)

    def adapt(self, running: int) -> None:
        """Remember no more outputs than are wanted for so many sequences that run now."""
        self._forget(max(min(PER_RUNNING * running, MANY), running, FEWEST))

    def _forget(self, most: int) -> None:
        """Forget the oldest outputs if there are more."""
        while len(self.recent) > most:
            self.since = self.recent.popleft().ended


class SlotEnds(NamedTuple):
    """Tokens that each running sequence makes until one of them has ended, half as many as run, and as many.

    Each that ends is replaced at once by a new one, whose end counts, too. All are 0 if they are unknown.
    """

    first: float = 0.0
    half: float = 0.0
    all: float = 0.0


class Running(NamedTuple):
    """A sequence that runs."""

    made: int
    """Tokens."""
    left: int
    """Tokens that it may still make."""


class _Law:
    """The share of outputs that go on beyond a length, if they have no limit."""

    def __init__(self, lengths: OutputLengths, running: Sequence[Running]) -> None:
        known, since = lengths.recent, lengths.since
        past = lengths.clock - since
        made = np.array([one.made for one in running], dtype=np.float64)
        whole, at_limit, ended = (np.array(each, dtype=np.float64) for each in zip(*known, strict=True))
        # Tokens, whether it is longer or would be without its limit, and tokens that it had made when it was
        # first observed: fewer than its tokens if it ended.
        tokens = np.concatenate((whole, made))
        goes_on = np.concatenate((at_limit, np.ones(len(made)))) > 0.0
        entries = np.concatenate(
            (np.maximum(whole - np.maximum(ended - since, 1.0), 0.0), np.where(made > past, made - past, 0.0))
        )
        order = np.lexsort((goes_on, tokens))
        tokens, goes_on, entries = tokens[order], goes_on[order], entries[order]
        # Below 1 only for those that have made nothing yet.
        at_risk = np.maximum(np.searchsorted(np.sort(entries), tokens) - np.arange(len(tokens)), 1)
        shares = np.cumprod(np.where(goes_on, 1.0, (at_risk - 1) / at_risk))
        self._lengths: list[float] = tokens.tolist()
        # before the first of the lengths, between it and the second, ...
        self._shares: list[float] = [1.0, *shares.tolist()]
        self._last = self._lengths[-1]
        # If all known outputs ended at their limits, nothing ends by itself.
        tail = tokens[~goes_on][-_TAIL:]
        begin = tail[0] if len(tail) == _TAIL else 0.0
        beyond = float(np.maximum(tokens - np.maximum(entries, begin), 0.0).sum())
        self._excess = max(beyond / len(tail) if len(tail) else math.inf, 1.0)
        # Sequences that are longer than all known outputs say together how far beyond these the next end is.
        self._ahead = float(np.maximum(made - whole.max(), 0.0).sum())

    def until_next(self) -> _Law:
        """The law for the next end alone."""
        law = copy(self)
        law._excess = max(self._excess, self._ahead)
        return law

    def beyond(self, tokens: float) -> float:
        """The share; 0 if it is unknown because all known outputs ended before by themselves."""
        place = bisect_right(self._lengths, tokens)
        share = self._shares[place]
        if share and place == len(self._lengths):
            share *= math.exp((self._last - tokens) / self._excess)
        return share

    def beyond_all(self, tokens: float) -> float:
        """The share of those that are longer than all known ones that make ``tokens`` more."""
        return math.exp(-tokens / self._excess)


class _Group:
    """Sequences that count as equally old, each with its own limit."""

    def __init__(self, law: _Law, age: int, left: list[int]) -> None:
        self.size = len(left)
        self.left = sorted(left)
        """Tokens that each may still make."""
        self._law = law
        self._age = age
        self._share = law.beyond(age)

    def remaining(self, tokens: float) -> float:
        """The share that makes more than ``tokens`` from now on, if there are no limits."""
        if not self._share:
            return self._law.beyond_all(tokens)
        return self._law.beyond(self._age + tokens) / self._share

    def within_limits(self, tokens: float) -> float:
        """The same with limits."""
        if tokens < self.left[0]:
            return self.remaining(tokens)
        return self.remaining(tokens) * (1.0 - bisect_right(self.left, tokens) / self.size)


def slot_ends(running: Iterable[Running], lengths: OutputLengths, next_limits: Iterable[int] = ()) -> SlotEnds:
    """What to expect of running sequences if outputs without limits are as long as the known ones.

    ``next_limits`` are the most tokens that each of the next sequences may make, by default as many as those
    that run. Takes 0.2 ms, and 0.5 us for each sequence.
    """
    each = sorted(running, key=itemgetter(1), reverse=True)
    each.sort(key=itemgetter(0), reverse=True)  # numbers twice take less time than tuples once
    if len(lengths.recent) < ENOUGH or not each:
        return SlotEnds()
    law = _Law(lengths, each)
    limits = sorted(next_limits) or sorted([one.made + one.left for one in each])
    first = _first_end(_grouped(each, law.until_next()))
    half, last = _later_ends(_grouped(each, law), _Group(law, 0, limits))
    return SlotEnds(first, max(half, first), max(last, first))


def _grouped(running: Sequence[Running], law: _Law) -> list[_Group]:
    """Groups from the oldest on, which usually end first: each as large as all before, up to an eighth."""
    groups: list[_Group] = []
    place, most = 0, max(len(running) // _GROUPS, 1)
    while place < len(running):
        size = min(max(place, 1), most, len(running) - place)
        members = running[place : place + size]
        groups.append(_Group(law, members[size // 2].made, [one.left for one in members]))
        place += size
    return groups


def _first_end(groups: Sequence[_Group]) -> float:
    """The mean time to the first end: the integral of the probability that all go on."""
    limit = min([group.left[0] for group in groups])

    def none_ended(tokens: float) -> float:
        if tokens >= limit:
            return 0.0
        product = 1.0
        for group in groups:
            product *= group.remaining(tokens) ** group.size
        return product

    low, high = 0.0, 1.0
    while none_ended(high) > 1 / math.e:
        low, high = high, 2.0 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if none_ended(middle) > 1 / math.e:
            low = middle
        else:
            high = middle
    mean, begun, cell, share = 0.0, 0.0, high / _FIRST_CELLS, 1.0
    while share > _NEGLIGIBLE:
        share = none_ended(begun + cell / 2.0)
        mean += share * cell
        begun += cell
        if begun >= high:
            cell *= _WIDER
    return min(mean, float(limit))


def _later_ends(groups: Sequence[_Group], following: _Group) -> tuple[float, float]:
    """When half as many as run, and as many, are expected to have ended.

    Each that ends is replaced by one of those that are ``following``.
    """
    running = sum(group.size for group in groups)
    cell = 2.0 * _mean_length(following) / _CELLS
    # Of those that start within a cell, so many have ended at the end of it, of the next one, ...
    ended = [1.0 - following.within_limits((place + 0.5) * cell) for place in range(_MOST_CELLS)]
    shares = [late - early for early, late in pairwise(ended)]
    again = 1.0 / max(1.0 - ended[0], 1.0 / _CELLS)
    ends: list[float] = []  # in each cell
    left, total = float(running), 0.0
    for place in range(1, _MOST_CELLS + 1):
        still = sum(group.size * group.within_limits(place * cell) for group in groups)
        ends.append((left - still + sum(map(mul, reversed(ends), shares))) * again)
        left, total = still, total + ends[-1]
        if total >= running:
            break
    totals = list(accumulate(ends, initial=0.0))
    return _reached(totals, running / 2, cell), _reached(totals, running, cell)


def _mean_length(group: _Group) -> float:
    """Roughly, of outputs that begin now."""
    mean, begun, cell, share = 0.0, 0.0, 1.0, 1.0
    while share > _NEGLIGIBLE:
        share = group.within_limits(begun + cell / 2.0)
        mean += share * cell
        begun += cell
        cell = begun / 4.0 if begun > 4.0 else 1.0
    return mean


def _reached(totals: Sequence[float], wanted: float, cell: float) -> float:
    """Where the rising ``totals`` at the ends of the cells reach a number; at the last one if they do not."""
    place = bisect_left(totals, wanted)
    if place == len(totals):
        return (place - 1) * cell
    before, after = totals[place - 1], totals[place]
    return (place - 1 + (wanted - before) / (after - before)) * cell
