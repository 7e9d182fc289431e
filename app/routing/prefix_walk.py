"""Where the runs of a request's blocks end on each replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from app.routing.block_masks import SHIFT


class Coming(Protocol):
    """The replicas that a block is coming to."""

    bits: int


def prefix_ends(
    keys: Sequence[int], shards: Sequence[Mapping[int, int]], exact: int, coming: Mapping[int, Coming]
) -> list[tuple[int, int]]:
    """Return (replicas, how many of the first keys they have); each replica that has any is in one of the sets.

    A key is there for the bits of ``exact`` in its mask and for those that it is coming to. Who has a key is
    taken to have those before it, so that few of them have to be looked up.
    """

    def holders(key: int) -> int:
        group = coming.get(key)
        mask = shards[key >> SHIFT].get(key, 0) & exact
        return mask if group is None else mask | group.bits

    high = len(keys) - 1
    held = holders(keys[0])
    still = held and held & holders(keys[high])
    ends = [(still, high + 1)] if still else []
    # Stretches (low, holders of low, high, holders of high) in which holders are lost; the lower first,
    # since who lacks a key cannot count further on.
    low = 0
    stretches = []
    while True:
        while held != still:
            if high - low == 1:
                ends.append((held ^ still, high))
                break
            middle = (low + high) // 2
            there = held & holders(keys[middle])
            if there == held:
                low = middle
                continue
            still &= there
            if there != still:
                stretches.append((middle, there, high, still))
            high, still = middle, there
        if not stretches:
            return ends
        low, held, high, still = stretches.pop()


def window_ends(
    keys: Sequence[int], masks: Sequence[int], exact: int, coming: Mapping[int, Coming], window: int
) -> list[tuple[int, int]]:
    """Return (replica, most blocks of which the last ``window``, or all if they are fewer, are there).

    ``masks`` are those of the keys; otherwise as :func:`prefix_ends`.
    """
    if coming:
        groups = map(coming.get, keys)
        masks = [
            mask & exact if group is None else mask & exact | group.bits
            for mask, group in zip(masks, groups, strict=True)
        ]
        exact = -1
    ends: dict[int, int] = {}
    starts: dict[int, int] = {}
    held = before = 0
    for place, mask in enumerate([*masks, 0]):
        if mask == before:
            continue
        before = mask
        there = mask & exact
        changed = there ^ held
        while changed:
            bit = changed & -changed
            changed ^= bit
            if there & bit:
                starts[bit] = place
            elif starts[bit] == 0 or place - starts[bit] >= window:
                ends[bit] = place
        held = there
    return list(ends.items())
