"""Contiguous allocation: the buddy allocator of the published baselines, and first fit, which wastes less."""

from __future__ import annotations

import bisect


class BuddyAllocator:
    """Hands out runs of slots whose lengths are powers of two, each aligned to its own length.

    The method is Knowlton's, "A fast storage allocator" (1965): a free run is split in halves until it is just
    large enough, and halves that are both free become one again. ``slots`` need not be a power of two: the pool
    then begins as the runs of its binary digits, the largest first.
    """

    def __init__(self, slots: int) -> None:
        self._orders = slots.bit_length()
        self._free: list[set[int]] = [set() for _ in range(self._orders)]
        self._taken: dict[int, int] = {}  # start -> order
        self._whole: dict[int, int] = {}  # start -> order of the runs that have no buddy
        start = 0
        for order in reversed(range(self._orders)):
            if slots >> order & 1:
                self._free[order].add(start)
                self._whole[start] = order
                start += 1 << order

    @staticmethod
    def rounded(slots: int) -> int:
        """The run that ``slots`` slots take: the next power of two."""
        return 1 << (slots - 1).bit_length()

    def allocate(self, slots: int) -> int | None:
        """Take a run of at least ``slots``; return its first slot, ``None`` if no free run is long enough."""
        wanted = (slots - 1).bit_length()
        order = next((order for order in range(wanted, self._orders) if self._free[order]), None)
        if order is None:
            return None
        start = min(self._free[order])
        self._free[order].remove(start)
        while order > wanted:
            order -= 1
            self._free[order].add(start + (1 << order))
        self._taken[start] = order
        return start

    def release(self, start: int) -> None:
        order = self._taken.pop(start)
        whole = next(of for first, of in self._whole.items() if first <= start < first + (1 << of))
        while order < whole:
            buddy = start ^ (1 << order)  # the binary digits fall, so each run is aligned to its own length
            if buddy not in self._free[order]:
                break
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)


class FirstFitAllocator:
    """Hands out the first free run that is long enough, to the slot; free neighbors become one run."""

    def __init__(self, slots: int) -> None:
        self._free = [(0, slots)]  # start and length, by start
        self._taken: dict[int, int] = {}

    def allocate(self, slots: int) -> int | None:
        """Take a run of at least ``slots``; return its first slot, ``None`` if no free run is long enough."""
        for place, (start, length) in enumerate(self._free):
            if length >= slots:
                self._free[place : place + 1] = [(start + slots, length - slots)] if length > slots else []
                self._taken[start] = slots
                return start
        return None

    def release(self, start: int) -> None:
        run = (start, self._taken.pop(start))
        place = bisect.bisect(self._free, run)
        merged = [*self._free[max(place - 1, 0) : place], run, *self._free[place : place + 1]]
        joined = merged[:1]
        for first, length in merged[1:]:
            last, before = joined[-1]
            if last + before == first:
                joined[-1] = (last, before + length)
            else:
                joined.append((first, length))
        self._free[max(place - 1, 0) : place + 1] = joined


Allocator = BuddyAllocator | FirstFitAllocator
