"""How a replica is chosen, once it is known which ones may be: by prefix and load, by load alone, in turn."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple, cast

from app.routing import cost
from app.routing.booking import Standing, name_key
from app.routing.calibration import OutputLength, PrefixShare, ReuseShare, StepModel
from app.routing.fading import NEAR_S, lasting
from app.routing.load import PREFILL_RATE, LoadReport, average

_FEW = 16
"""Tokens that always count as no difference: a usual block."""
_SPEED_SHARE = 1 / 32
_MASK = (1 << 64) - 1


class Policy(StrEnum):
    """``prefix`` costs least in seconds; the others are there to be compared with it."""

    PREFIX = "prefix"
    LEAST_TOKENS = "least_tokens"
    ROUND_ROBIN = "round_robin"


_PREFIX = Policy.PREFIX  # Python 3.11 finds a member of an enumeration by a call


class Wanted(NamedTuple):
    """What a choice knows of a request. ``output`` bounds the tokens of all its ``sequences`` together.

    ``again``: it has been placed before, so that there is nothing new to learn from its keys. ``fading`` names
    replicas that it goes to only where all others cost much more.
    """

    request_id: str
    tokens: int
    output: int
    sequences: int = 1
    keys: Sequence[int] = ()
    again: bool = False
    fading: Collection[str] = ()


class Chooser:
    """Learns from reports and chooses; the ledger's lock guards it."""

    def __init__(self, policy: Policy, block_size: int) -> None:
        self.policy = policy
        self.block_size = block_size
        self.steps = StepModel()
        self.outputs = OutputLength()
        self.reuse = ReuseShare()
        self.hot = PrefixShare()
        self._lesson: tuple[Wanted, int, float] | None = None
        self._turn = 0

    def learn(self, standing: Standing, load: LoadReport, now: float) -> bool:
        """Take in a report; true if every replica's terms are out of date."""
        standing.load, standing.reported = load, now
        changed = self.steps.learn(load.running, load.kv_tokens, load.step_seconds)
        if load.running and load.step_seconds:
            expected = self.steps.seconds(load.running, load.kv_tokens)
            ratio = min(max(load.step_seconds / max(expected, 1e-9), 0.1), 10.0)
            standing.speed += (ratio - standing.speed) * _SPEED_SHARE
        if load.block_size and load.block_size != self.block_size:
            self.block_size = load.block_size
            changed = True
        self.refresh(standing)
        return changed

    def refresh(self, standing: Standing) -> None:
        """Compute a replica's terms; none as long as its load or its rate is unknown."""
        load = standing.load
        if load is None or not load.prefill_rate:
            standing.terms = None
        else:
            standing.terms = self._terms_of(load, standing, standing.reported)

    def settle(self) -> None:
        """Learn from the last choice: before the next one, and better when no request waits for it."""
        lesson, self._lesson = self._lesson, None
        if lesson is not None:
            wanted, deepest, output = lesson
            if deepest:
                self.hot.learn(wanted.keys[deepest - 1])
            if not wanted.again:
                self.reuse.learn(wanted.keys, deepest, int(wanted.sequences * output) // self.block_size)

    def expected_output(self, wanted: Wanted) -> float:
        """Tokens of each of its sequences."""
        most = wanted.output if wanted.sequences <= 1 else wanted.output / wanted.sequences
        learned = self.outputs.tokens
        return most if most < learned else learned

    def cached(self, wanted: Wanted, blocks: int) -> int:
        """Tokens that need no computing where so many blocks are held: an engine computes at least one."""
        size, last = self.block_size, wanted.tokens - 1
        if last < size:
            return 0
        return blocks * size if blocks * size <= last else last - last % size

    def choose(self, standings: Sequence[Standing], held: Sequence[int], wanted: Wanted, now: float) -> int:
        """Return the place of the best of ``standings``, which hold ``held`` blocks of the prefix."""
        if self.policy is _PREFIX:
            return self._cheapest(standings, held, wanted, now)
        if self.policy is Policy.ROUND_ROBIN:
            self._turn += 1
            order = sorted(range(len(standings)), key=lambda place: standings[place].replica)
            return order[self._turn % len(order)]
        places: Sequence[int] = range(len(standings))
        if wanted.fading:
            names, tokens = [at.replica for at in standings], [at.tokens for at in standings]
            places = lasting(names, tokens, wanted.fading, NEAR_S * PREFILL_RATE) or places
        return least_booked(standings, places, wanted, 0)

    def _cheapest(self, standings: Sequence[Standing], held: Sequence[int], wanted: Wanted, now: float) -> int:
        if self._lesson is not None:
            self.settle()
        output = self.expected_output(wanted)
        candidates = cast(list[cost.Terms], [standing.terms for standing in standings])
        if not all(candidates):
            candidates = self._terms(standings, now)
        tokens, size, deepest = wanted.tokens, self.block_size, max(held)
        most, due = 0, 0.0
        if deepest:
            most = self.cached(wanted, deepest)
            usable = most // size
            if usable < deepest:
                held = [blocks if blocks < usable else usable for blocks in held]
            due = self.hot.share(wanted.keys[deepest - 1]) * len(held) - held.count(usable)
            due = 0.0 if due < 0.0 else 1.0 if due > 1.0 else due
        demand = cost.Demand(tokens, output, self.outputs.tokens / 2, wanted.sequences, most, due)
        costs = cost.seconds(candidates, held, demand, self.steps, self.reuse.share, now, size)
        least = min(costs)
        # A block (no large one for a short prompt), or two per cent of what is to be computed: two of the sum
        # would, under load, give prefixes away, and two of the prompt, where all have most of it, the shortest
        # queue.
        best = costs.index(least)
        share = (tokens - held[best] * size) // 50
        few = size if size <= _FEW or size < tokens else max(tokens, _FEW)
        margin = 1.01 * (few if few > share else share) * candidates[best].per_token
        limit = least + margin
        ties = [place for place, seconds in enumerate(costs) if seconds <= limit]
        if wanted.fading:
            ties = lasting([at.replica for at in standings], costs, wanted.fading, NEAR_S, margin) or ties
        self._lesson = wanted, deepest, output
        return ties[0] if len(ties) == 1 else least_booked(standings, ties, wanted, deepest)

    def _terms(self, standings: Sequence[Standing], now: float) -> list[cost.Terms]:
        """Of each; one that has not reported yet, or no rate, is taken for the average of the others here.

        An average is as of ``now``: nothing of it has been done since.
        """
        made = [standing.terms for standing in standings]
        neutral: LoadReport | None = None
        for place, standing in enumerate(standings):
            if made[place] is not None:
                continue
            self.refresh(standing)
            made[place] = standing.terms
            if standing.terms is None:
                neutral = neutral or average([other.load for other in standings if other.load is not None])
                load, reported = standing.load, standing.reported
                load = replace(load, prefill_rate=neutral.prefill_rate) if load is not None else neutral
                made[place] = self._terms_of(load, standing, now if standing.load is None else reported)
        return cast(list[cost.Terms], made)

    def _terms_of(self, load: LoadReport, standing: Standing, reported: float) -> cost.Terms:
        tail = self.outputs.tokens / 2
        return cost.terms(load, standing.booked, self.steps, standing.speed, self.block_size, tail, reported)


def least_booked(standings: Sequence[Standing], places: Sequence[int], wanted: Wanted, deepest: int) -> int:
    """The place, of these, of the fewest booked tokens, then bookings, then by rendezvous.

    Its hash is of the first key after ``deepest``, or of the request's name where there is none.
    """
    best = places[0]
    first = standings[best]
    key, weight = -1, -1
    for place in places[1:]:
        standing = standings[place]
        if standing.tokens != first.tokens:
            if standing.tokens > first.tokens:
                continue
        elif standing.count != first.count:
            if standing.count > first.count:
                continue
        else:
            if key < 0:
                keys = wanted.keys
                key = keys[deepest] if deepest < len(keys) else name_key(wanted.request_id)
            if weight < 0:
                weight = rendezvous(key, first.seed)
            other = rendezvous(key, standing.seed)
            if other < weight:
                continue
            best, first, weight = place, standing, other
            continue
        best, first, weight = place, standing, -1
    return best


def rendezvous(key: int, seed: int) -> int:
    """Highest random weight (Thaler and Ravishankar, 1996): whoever ranks the same seeds by it agrees."""
    mixed = ((key ^ seed) * 0x9E3779B97F4A7C15) & _MASK
    return ((mixed ^ (mixed >> 32)) * 0xBF58476D1CE4E5B9) & _MASK
