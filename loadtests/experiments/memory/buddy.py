"""A buddy allocator over a pool of any size: what contiguous allocation is compared with."""

from __future__ import annotations


class BuddyAllocator:
    """Hands out runs of slots whose lengths are powers of two, each aligned to its own length.

    The method is Knowlton's, "A fast storage allocator" (1965): a free run is split in halves until it is just
    large enough, and halves that are both free become one again. ``slots`` need not be a power of two: the pool
    then begins as the runs of its binary digits, the largest first.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots} but must be at least 1")
        self.slots = slots
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

    @property
    def taken(self) -> int:
        """Slots handed out, rounding included."""
        return sum(1 << order for order in self._taken.values())

    @staticmethod
    def rounded(slots: int) -> int:
        """The run that ``slots`` slots take: the next power of two."""
        return 1 << (slots - 1).bit_length()

    def allocate(self, slots: int) -> int | None:
        """Take a run of at least ``slots``; return its first slot, ``None`` if no free run is large enough."""
        if slots < 1:
            raise ValueError(f"slots is {slots} but must be at least 1")
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
        """Give a run back."""
        order = self._taken.pop(start)
        while self._root(start) > order:
            buddy = self._buddy(start, order)
            if buddy not in self._free[order]:
                break
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)

    def _root(self, slot: int) -> int:
        """Order of the first run that ``slot`` was split from."""
        return next(order for start, order in self._whole.items() if start <= slot < start + (1 << order))

    def _buddy(self, start: int, order: int) -> int:
        # the runs of the binary digits are in falling order, so each is aligned to its own length
        return start ^ (1 << order)
