"""Shared prefixes: where the prompts that begin with them recently went, and why."""

from __future__ import annotations

import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

WINDOW_S = 60.0

MAX_PLACEMENTS = 2048
"""Placements that are remembered: above 34 a second, those of less than a minute. Each takes 1 KB at most."""

MAX_KEYS = 64
"""Blocks at the beginning of a prompt that are compared."""

FIRST_TOKENS = 24
"""Tokens of a prompt that are kept to show how it begins."""

MIN_REQUESTS, MIN_SHARE = 3, 0.02
"""A prefix needs this many requests and this share of all; other requests count for a shorter one, or none."""

MAX_PREFIXES = 16
"""Prefixes that an answer has at most."""


class Placement(NamedTuple):
    """A request that has got its first token: its first blocks' keys, and where it went.

    ``tenant`` and ``salt`` divide the cache; see ``engine.request.CacheNamespace``.
    """

    at: float
    keys: array[int]
    replica: str
    reason: str
    tokens: int
    """Length of the prompt."""
    cached: int
    """Tokens of it that were cached there."""
    tenant: str
    salt: str
    begins: array[int]
    """Its first tokens."""


class PrefixGroup(NamedTuple):
    """Requests whose first ``blocks`` are the same; ``key`` is that of the last of these. 0 blocks: all others.

    ``to`` counts requests by replica and reason; ``words`` are the first ones, unless a salt hides them.
    """

    key: int
    blocks: int
    tenant: str
    requests: int
    per_s: float
    tokens: int
    cached: int
    to: dict[tuple[str, str], int]
    words: str


class PrefixFlow:
    """Belongs to one ingress's event loop. Adding a placement costs almost nothing; grouping costs more."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._placements: deque[Placement] = deque(maxlen=MAX_PLACEMENTS)

    def add(
        self,
        keys: Sequence[int],
        replica: str,
        reason: str,
        prompt: Sequence[int],
        cached: int,
        tenant: str = "",
        salt: str = "",
    ) -> None:
        """Remember a request that has got its first token."""
        self._placements.append(
            Placement(
                self._clock(),
                array("Q", keys[:MAX_KEYS]),
                replica,
                reason,
                len(prompt),
                cached,
                tenant,
                salt,
                array("q", prompt[:FIRST_TOKENS]),
            )
        )

    def groups(self, text_of: Callable[[Sequence[int]], str]) -> list[PrefixGroup]:
        """The groups, largest first; the last one has what belongs to no other."""
        now = self._clock()
        placements = [placement for placement in self._placements if placement.at > now - WINDOW_S]
        seconds = now - placements[0].at if len(placements) == MAX_PLACEMENTS else WINDOW_S
        least = max(MIN_REQUESTS, int(MIN_SHARE * len(placements)))
        found: list[tuple[int, list[Placement]]] = []
        if len(placements) >= least:
            _divide(placements, 0, least, found)
        else:
            found.append((0, placements))
        listed = sorted((each for each in found if each[0]), key=lambda each: -len(each[1]))
        rest = [one for blocks, each in found if not blocks for one in each]
        rest += [one for _, each in listed[MAX_PREFIXES:] for one in each]
        parts = [*listed[:MAX_PREFIXES], (0, rest)]
        return [_group(blocks, each, max(seconds, 1e-3), text_of) for blocks, each in parts]


def _divide(
    placements: list[Placement], blocks: int, least: int, found: list[tuple[int, list[Placement]]]
) -> None:
    """Put into ``found`` what has at least the first ``blocks`` keys in common, each with how many it has.

    A key is one of all blocks up to it, so that equal keys at one place mean equal prompts up to there.
    """
    while placements:
        counts = Counter(one.keys[blocks] for one in placements if len(one.keys) > blocks)
        if len(counts) == 1 and counts.total() == len(placements):
            blocks += 1
            continue
        rest: list[Placement] = []
        children: dict[int, list[Placement]] = {key: [] for key, count in counts.items() if count >= least}
        for one in placements:
            goes_on = len(one.keys) > blocks
            (children.get(one.keys[blocks], rest) if goes_on else rest).append(one)
        if rest:
            found.append((blocks, rest))
        for child in children.values():
            _divide(child, blocks + 1, least, found)
        return


def _group(
    blocks: int, placements: Sequence[Placement], seconds: float, text_of: Callable[[Sequence[int]], str]
) -> PrefixGroup:
    first = placements[0] if blocks else None
    return PrefixGroup(
        0 if first is None else first.keys[blocks - 1],
        blocks,
        "" if first is None else first.tenant,
        len(placements),
        len(placements) / seconds,
        sum(one.tokens for one in placements),
        sum(one.cached for one in placements),
        dict(Counter((one.replica, one.reason) for one in placements)),
        "" if first is None or first.salt else " ".join(text_of(first.begins).split()),
    )


def merged(flows: Sequence[Sequence[PrefixGroup]]) -> list[PrefixGroup]:
    """Add up the groups of several ingresses: the largest first, and last what belongs to none."""
    found: dict[tuple[int, int], PrefixGroup] = {}
    for group in (group for flow in flows for group in flow):
        before = found.get((group.blocks, group.key))
        found[group.blocks, group.key] = group if before is None else _sum(before, group)
    listed = sorted((group for group in found.values() if group.blocks), key=lambda group: -group.requests)
    rest = [group for group in found.values() if not group.blocks] + listed[MAX_PREFIXES:]
    return [*listed[:MAX_PREFIXES], others(rest)]


def others(groups: Sequence[PrefixGroup]) -> PrefixGroup:
    """Add up groups into one without a name."""
    total = PrefixGroup(0, 0, "", 0, 0.0, 0, 0, {}, "")
    for group in groups:
        total = _sum(total, group)
    return total


def _sum(one: PrefixGroup, other: PrefixGroup) -> PrefixGroup:
    return one._replace(
        requests=one.requests + other.requests,
        per_s=one.per_s + other.per_s,
        tokens=one.tokens + other.tokens,
        cached=one.cached + other.cached,
        to=dict(Counter(one.to) + Counter(other.to)),
    )
