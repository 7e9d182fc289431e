"""How a replica is chosen, once it is known which ones may be: by prefix and load, by load alone, in turn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from app.routing import cost
from app.routing.calibration import OutputLength, PrefixShare, ReuseShare, StepModel
from app.routing.load import LoadReport

_SPEED_SHARE = 1 / 32
_MASK = (1 << 64) - 1


class Policy(StrEnum):
    """``prefix`` costs least in seconds; the others are there to be compared with it."""

    PREFIX = "prefix"
    LEAST_TOKENS = "least_tokens"
    ROUND_ROBIN = "round_robin"


@dataclass(slots=True, eq=False)
class Standing:
    """A replica as a choice sees it; owned by the ledger.

    ``tokens`` and ``count`` are of the bookings that live there. ``terms`` is ``None`` when out of date.
    """

    replica: str
    load: LoadReport | None = None
    booked: cost.Booked = field(default_factory=cost.Booked)
    tokens: int = 0
    count: int = 0
    speed: float = 1.0
    terms: cost.Terms | None = None
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        self.seed = name_key(self.replica)


class Wanted(NamedTuple):
    """What a choice knows of a request. ``output`` bounds the tokens of all its ``sequences`` together."""

    request_id: str
    tokens: int
    output: int
    sequences: int = 1
    keys: Sequence[int] = ()


class Chooser:
    """Learns from reports and chooses; the ledger's lock guards it."""

    def __init__(self, policy: Policy, block_size: int) -> None:
        self.policy = policy
        self.block_size = block_size
        self.steps = StepModel()
        self.outputs = OutputLength()
        self.reuse = ReuseShare()
        self.hot = PrefixShare()
        self._turn = 0

    def learn(self, standing: Standing, load: LoadReport) -> bool:
        """Take in a report; true if every replica's terms are out of date."""
        standing.load = load
        standing.terms = None
        changed = self.steps.learn(load.running, load.kv_tokens, load.step_seconds)
        if load.running and load.step_seconds:
            expected = self.steps.seconds(load.running, load.kv_tokens)
            ratio = min(max(load.step_seconds / max(expected, 1e-9), 0.1), 10.0)
            standing.speed += (ratio - standing.speed) * _SPEED_SHARE
        if load.block_size and load.block_size != self.block_size:
            self.block_size = load.block_size
            changed = True
        return changed

    def expected_output(self, wanted: Wanted) -> float:
        """Tokens of each of its sequences."""
        return min(wanted.output / max(wanted.sequences, 1), self.outputs.tokens)

    def cached(self, wanted: Wanted, blocks: int) -> int:
        """Tokens that need no computing where so many blocks are held: an engine computes at least one."""
        return max(min(blocks * self.block_size, (wanted.tokens - 1) // self.block_size * self.block_size), 0)

    def choose(self, standings: Sequence[Standing], held: Sequence[int], wanted: Wanted) -> int:
        """Return the place of the best of ``standings``, which hold ``held`` blocks of the prefix."""
        if self.policy is Policy.ROUND_ROBIN:
            self._turn += 1
            order = sorted(range(len(standings)), key=lambda place: standings[place].replica)
            return order[self._turn % len(order)]
        if self.policy is Policy.LEAST_TOKENS:
            return least_booked(standings, name_key(wanted.request_id))
        return self._cheapest(standings, held, wanted)

    def _cheapest(self, standings: Sequence[Standing], held: Sequence[int], wanted: Wanted) -> int:
        output = self.expected_output(wanted)
        candidates = self._terms(standings)
        deepest = max(held)
        size = self.block_size
        most = self.cached(wanted, deepest)
        cached = [blocks * size if blocks * size < most else most for blocks in held]
        due = 0.0
        if deepest:
            share = self.hot.use(wanted.keys[deepest - 1])
            due = min(max(share * len(held) - cached.count(most), 0.0), 1.0)
        remaining = self.outputs.tokens / 2
        demand = cost.Demand(wanted.tokens, output, remaining, wanted.sequences, most, due)
        costs = cost.seconds(candidates, cached, demand, self.steps, self.reuse.share)
        least = min(costs)
        # A block, or two per cent of what it costs from nothing: two of the sum would, under load, give
        # prefixes away.
        margin = 1.01 * max(self.block_size, wanted.tokens // 50) * candidates[costs.index(least)].per_token
        limit = least + margin
        ties = [place for place, seconds in enumerate(costs) if seconds <= limit]
        self._learn_reuse(wanted, output, deepest)
        if len(ties) == 1:
            return ties[0]
        cold = wanted.keys[deepest] if deepest < len(wanted.keys) else name_key(wanted.request_id)
        return ties[least_booked([standings[place] for place in ties], cold)]

    def _learn_reuse(self, wanted: Wanted, output: float, deepest: int) -> None:
        made = int(wanted.sequences * output) // self.block_size
        self.reuse.learn(deepest, len(wanted.keys) + made)

    def _terms(self, standings: Sequence[Standing]) -> list[cost.Terms]:
        """Of each; one that has not reported yet, or no rate, is taken for the average of the others here."""
        neutral: LoadReport | None = None
        tail = self.outputs.tokens / 2
        made = []
        for standing in standings:
            at = standing.terms
            if at is None:
                load = standing.load
                if load is None or not load.prefill_rate:
                    neutral = neutral or _average([other.load for other in standings if other.load is not None])
                    load = replace(load, prefill_rate=neutral.prefill_rate) if load is not None else neutral
                at = cost.terms(load, standing.booked, self.steps, standing.speed, self.block_size, tail)
                if neutral is None:
                    standing.terms = at
            made.append(at)
        return made


def least_booked(standings: Sequence[Standing], key: int) -> int:
    """The place of the fewest booked tokens, then bookings; ties by rendezvous hash of ``key``."""
    least = min([standing.tokens for standing in standings])
    places = [place for place, standing in enumerate(standings) if standing.tokens == least]
    if len(places) > 1:
        fewest = min([standings[place].count for place in places])
        places = [place for place in places if standings[place].count == fewest]
    if len(places) > 1:
        weights = [(rendezvous(key, standings[place].seed), place) for place in places]
        return max(weights)[1]
    return places[0]


def rendezvous(key: int, seed: int) -> int:
    """Highest random weight (Thaler and Ravishankar, 1996): whoever ranks the same seeds by it agrees."""
    mixed = ((key ^ seed) * 0x9E3779B97F4A7C15) & _MASK
    return ((mixed ^ (mixed >> 32)) * 0xBF58476D1CE4E5B9) & _MASK


def name_key(name: str) -> int:
    """64 bits of a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _average(loads: Sequence[LoadReport]) -> LoadReport:
    """What to expect of a replica that has not said; of an unknown fleet, an empty one without limits."""
    rates = sorted(load.prefill_rate for load in loads if load.prefill_rate)
    rate = rates[len(rates) // 2] if rates else cost.PREFILL_RATE
    if not loads:
        return LoadReport(0, 0, 0, 0, 0, 0, 0, 0, rate, 0.0, 0)
    count = len(loads)
    return LoadReport(
        waiting_tokens=sum(load.waiting_tokens for load in loads) // count,
        running=sum(load.running for load in loads) // count,
        kv_tokens=sum(load.kv_tokens for load in loads) // count,
        referenced=sum(load.referenced for load in loads) // count,
        free=sum(load.free for load in loads) // count,
        evictable=sum(load.evictable for load in loads) // count,
        num_blocks=sum(load.num_blocks for load in loads) // count,
        block_size=0,
        prefill_rate=rate,
        step_seconds=0.0,
        acknowledged=0,
        waiting=sum(load.waiting for load in loads) // count,
        max_running=sum(load.max_running for load in loads) // count,
    )
