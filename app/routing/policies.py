"""How a replica is chosen among the candidates: by prefix and load, by load alone, or in turn.

Each policy is a pure function: it reads views, request and estimates, and changes none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from app.routing.cost import TERMS, RoutingRequest, costs
from app.routing.fleet_estimates import FleetEstimates
from app.routing.likely_victims import EXTRA_S, places_that_stay
from app.routing.load import PREFILL_RATE
from app.routing.replica_state import Compared, ReplicaState, ReplicaView, name_key

USUAL_BLOCK = 16
"""A difference of this many tokens never decides."""

_MASK = (1 << 64) - 1


class Policy(StrEnum):
    """``prefix`` costs least in seconds; the others are there to be compared with it."""

    PREFIX = "prefix"
    LEAST_TOKENS = "least_tokens"
    ROUND_ROBIN = "round_robin"


ROUTING_REASONS = ("only", "prefix", *TERMS, "balance", "victims", "policy", "fault")
"""Why a replica was chosen: no other could run the request; it has more of the prefix; one of the cost's terms
says so; it cost as much as others and has less booked; it stays while cheaper ones may stop; another policy
than ``prefix``, or a defect, chose."""


class RoutingDecision(NamedTuple):
    """The ``place`` of the chosen replica among the views, and the blocks of the prefix that it holds.

    ``shared_blocks``: the most that any replica holds. ``reason`` is one of ``ROUTING_REASONS``. ``compared``
    has the chosen replica, and the one that costs least of the others.
    """

    place: int
    cached_blocks: int = 0
    shared_blocks: int = 0
    reason: str = "policy"
    compared: tuple[Compared, ...] = ()


PolicyFunction: TypeAlias = Callable[
    [Sequence[ReplicaView], Sequence[int], RoutingRequest, FleetEstimates, float], RoutingDecision
]
"""Of views (at least one), the blocks of the prefix that each holds, request, estimates and time."""


def cheapest(
    views: Sequence[ReplicaView],
    cached_blocks: Sequence[int],
    request: RoutingRequest,
    estimates: FleetEstimates,
    now: float,
) -> RoutingDecision:
    """The least estimated cost; of those that cost nearly the same, the least booked."""
    shared_blocks = max(cached_blocks)
    usable_blocks, copy_deficit = cached_blocks, 0.0
    if shared_blocks:
        most = estimates.usable_blocks(request.tokens, shared_blocks)
        if most < shared_blocks:
            usable_blocks = [blocks if blocks < most else most for blocks in cached_blocks]
        copies = estimates.prefixes.share(request.keys[shared_blocks - 1]) * len(views)
        if (lacking := copies - usable_blocks.count(most)) > 0.0:
            copy_deficit = min(lacking, 1.0)
    seconds = costs(views, usable_blocks, request, estimates, now, copy_deficit)
    least = min(seconds)
    best = seconds.index(least)
    uncached = request.tokens - usable_blocks[best] * estimates.block_size
    margin = _tie_tokens(request.tokens, uncached, estimates.block_size) * views[best].token_cost
    limit = least + margin
    ties = [place for place, cost in enumerate(seconds) if cost <= limit]
    if request.likely_victims:
        names = [view.replica for view in views]
        ties = places_that_stay(names, seconds, request.likely_victims, EXTRA_S, margin) or ties
    place = ties[0] if len(ties) == 1 else least_booked(views, ties, request, cached_blocks)
    if len(views) > 1:
        seconds[place] = math.inf
        shown = [place, seconds.index(min(seconds))]
    else:
        shown = [place]
    held = [usable_blocks[at] for at in shown]
    parts: list[tuple[float, ...]] = []
    costs([views[at] for at in shown], held, request, estimates, now, copy_deficit, parts)
    if len(views) == 1:
        reason = "only"
    elif len(ties) > 1:
        reason = "balance"
    elif place != best:
        reason = "victims"
    else:
        reason = _decisive(parts[0], parts[1], held[0] > held[1])
    size = estimates.block_size
    compared = tuple(
        Compared(views[at].replica, blocks * size, terms)
        for at, blocks, terms in zip(shown, held, parts, strict=True)
    )
    return RoutingDecision(place, cached_blocks[place], shared_blocks, reason, compared)


def _decisive(here: Sequence[float], there: Sequence[float], more_cached: bool) -> str:
    """The term by which the first of two replicas costs most less than the second."""
    saved = [of_other - own for own, of_other in zip(here, there, strict=True)]
    term = TERMS[saved.index(max(saved))]
    return "prefix" if term == "compute" and more_cached else term


def least_tokens(views: Sequence[ReplicaView], request: RoutingRequest) -> RoutingDecision:
    """The fewest booked tokens."""
    places: Sequence[int] = range(len(views))
    if request.likely_victims:
        names, tokens = [view.replica for view in views], [view.booked_tokens for view in views]
        places = places_that_stay(names, tokens, request.likely_victims, EXTRA_S * PREFILL_RATE) or places
    return RoutingDecision(least_booked(views, places, request))


def round_robin(views: Sequence[ReplicaView], request: RoutingRequest) -> RoutingDecision:
    """One after another, by name."""
    order = sorted(range(len(views)), key=lambda place: views[place].replica)
    return RoutingDecision(order[request.ordinal % len(order)])


POLICY_FUNCTIONS: dict[Policy, PolicyFunction] = {
    Policy.PREFIX: cheapest,
    Policy.LEAST_TOKENS: lambda views, _held, request, *_: least_tokens(views, request),
    Policy.ROUND_ROBIN: lambda views, _held, request, *_: round_robin(views, request),
}


def least_booked(
    replicas: Sequence[ReplicaView | ReplicaState],
    places: Sequence[int],
    request: RoutingRequest,
    cached_blocks: Sequence[int] = (0,),
) -> int:
    """The place, of these, of the fewest booked tokens, then bookings, then by rendezvous.

    The hash is of the first key after the most of ``cached_blocks``. A prompt without such a key goes to a
    replica that holds all of it, by the hash of the request's name, because another copy would be useless.
    """
    ties: list[int] = []
    fewest = 0, 0
    for place in places:
        booked = replicas[place].booked_tokens, replicas[place].bookings
        if not ties or booked < fewest:
            ties, fewest = [place], booked
        elif booked == fewest:
            ties.append(place)
    if len(ties) == 1:
        return ties[0]
    keys, shared_blocks = request.keys, max(cached_blocks)
    if shared_blocks < len(keys):
        key = keys[shared_blocks]
    else:
        key = name_key(request.request_id)
        if keys:
            ties = [place for place in ties if cached_blocks[place] == shared_blocks] or ties
    return max(ties, key=lambda place: rendezvous(key, replicas[place].seed))


def rendezvous(key: int, seed: int) -> int:
    """Highest random weight (Thaler and Ravishankar, 1996): all who rank the same seeds by it agree."""
    mixed = ((key ^ seed) * 0x9E3779B97F4A7C15) & _MASK
    return ((mixed ^ (mixed >> 32)) * 0xBF58476D1CE4E5B9) & _MASK


def _tie_tokens(prompt: int, uncached: int, block_size: int) -> float:
    """The number of tokens whose cost separates equal costs from different ones.

    One block (if blocks are large, at most a short prompt), or 2% of the tokens to compute. 2% of the whole
    cost would ignore prefixes under load; 2% of the prompt would ignore the shortest queue if all replicas hold
    most of the prompt.
    """
    block, share = block_size, uncached // 50
    if block > USUAL_BLOCK and block > prompt:
        block = max(prompt, USUAL_BLOCK)
    return 1.01 * (block if block > share else share)
