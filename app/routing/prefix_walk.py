"""Where the runs of a request's blocks end on each replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.routing.block_masks import SHIFT

MAX_LIKELY, MAX_ENDS = 4096, 6
"""First blocks of which is remembered where runs ended, and how many of these ends."""


def prefix_ends(
    keys: Sequence[int], shards: Sequence[Mapping[int, int]], exact: int, likely: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """Return (replicas, how many of the first keys they have); each replica that has any is in one of the sets.

    A key is there for the bits of ``exact`` in its mask. Who has a key is taken to have those before it, so
    that few of them have to be looked up: by halving, and first of all where runs are ``likely`` to end, the
    greatest number of blocks last, or at the very end.
    """
    key = keys[0]
    held = shards[key >> SHIFT].get(key, 0) & exact
    if not held:
        return []
    ends = []
    # Ranges (low, holders of low, high, holders of high) in which holders are lost, the lower first, because a
    # replica that lacks a key cannot count further on. No replica has what would follow the last key.
    low, high, still = 0, len(keys), 0
    stretches = []
    probes = [high - 1]
    for end in likely:
        probes += end - 1, end
    while True:
        while held != still:
            if high - low == 1:
                ends.append((held ^ still, high))
                break
            middle = 0
            while probes and not low < middle < high:
                middle = probes.pop()
            if not low < middle < high:
                middle = (low + high) // 2
            key = keys[middle]
            there = shards[key >> SHIFT].get(key, 0) & held
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


class PrefixWalk:
    """Looks first where runs ended for the last prompt that began so: as often as not, they do again."""

    def __init__(self) -> None:
        self._likely: dict[int, list[int]] = {}

    def ends(
        self, keys: Sequence[int], shards: Sequence[Mapping[int, int]], exact: int
    ) -> list[tuple[int, int]]:
        """Like :func:`prefix_ends`."""
        first, likely = keys[0], self._likely
        known = likely.get(first, ())
        ends = prefix_ends(keys, shards, exact, known)
        found = [blocks for _, blocks in ends[-MAX_ENDS:] if blocks < len(keys)]
        if found and found != known:
            if len(likely) >= MAX_LIKELY:
                likely.clear()
            likely[first] = found
        return ends


def window_ends(masks: Sequence[int], window: int) -> list[tuple[int, int]]:
    """Return (replica, most blocks of which the last ``window``, or all if they are fewer, are there).

    ``masks`` are who has each block of a prefix; otherwise as :func:`prefix_ends`.
    """
    ends: dict[int, int] = {}
    starts: dict[int, int] = {}
    held = 0
    for place, there in enumerate([*masks, 0]):
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
