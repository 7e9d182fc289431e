"""Which replicas hold which block keys: one bit mask per key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

SHIFT = 56
"""A key's shard is ``key >> SHIFT``."""
_SHARDS = 1 << 64 - SHIFT
_MAX_INTERNED = 4096
_MAX_RETIRED = 64
"""More slots than these that wait to be swept hasten the sweep."""
_HASTE = 1024


@dataclass(slots=True)
class Change:
    """What a call changed: XOR and number of the keys changed, and how many were so already."""

    xor: int
    count: int
    repeated: int


class BlockMasks:
    """Key → mask with one bit for each slot; a key is kept only while any bit of it is set.

    A retired slot's bits stay in the masks and are ignored until a sweep has visited all keys; only then is
    the slot reused.

    The map is split into shards by the high bits of a key (the low ones choose the place within a shard),
    because a dictionary stops the process while it grows: with 2 million keys, for a tenth of a second. Masks
    are interned because most keys share a few of them, so a key costs only the two objects of its entry.
    """

    def __init__(self) -> None:
        self.shards: list[dict[int, int]] = [{} for _ in range(_SHARDS)]
        self._interned: dict[int, int] = {}
        self._free: list[int] = []
        self._slots = 0
        self._retired: list[int] = []
        self._sweeping: list[int] = []
        self._dead = 0
        self._shard = 0
        self._keys: list[int] = []

    def __len__(self) -> int:
        """Distinct keys, retired bits included."""
        return sum(map(len, self.shards))

    @property
    def slots(self) -> int:
        """Slots ever in use at once: the width of the masks in bits."""
        return self._slots

    @property
    def unswept(self) -> int:
        """Retired slots that cannot be given out yet."""
        return len(self._retired) + len(self._sweeping)

    def acquire(self) -> int:
        """Give out a slot whose bit is in no mask.

        If replicas come and go faster than sweeps can follow, this call sweeps a little, too. So at most
        ``_MAX_RETIRED + 2 * len(self) / _HASTE`` slots are out of use, which bounds the width of the masks.
        """
        if self.unswept > _MAX_RETIRED:
            self.sweep(_HASTE)
        if self._free:
            return self._free.pop()
        self._slots += 1
        return self._slots - 1

    def retire(self, slot: int) -> None:
        """Take a slot back; the caller ignores its bits from here on."""
        self._retired.append(slot)

    def sweep(self, limit: int) -> bool:
        """Clear retired bits from at most ``limit`` keys; true if there is more to do.

        Bits of a retired slot are never set, so keys added during a sweep need no visit.
        """
        while limit > 0:
            if not self._sweeping:
                if not self._retired:
                    return False
                self._sweeping, self._retired = self._retired, []
                self._dead = sum(1 << slot for slot in self._sweeping)
                self._shard = 0
                self._keys = list(self.shards[0])
            shard, dead = self.shards[self._shard], self._dead
            part = self._keys[-limit:]
            del self._keys[-limit:]
            # An empty shard costs one, so that a call's work stays bounded.
            limit -= max(1, len(part))
            for key in part:
                mask = shard.get(key, 0)
                if mask & dead:
                    mask &= ~dead
                    if mask:
                        shard[key] = self._intern(mask)
                    else:
                        del shard[key]
            if self._keys:
                continue
            self._shard += 1
            if self._shard < _SHARDS:
                self._keys = list(self.shards[self._shard])
            else:
                self._free.extend(self._sweeping)
                self._sweeping = []
        return bool(self._sweeping or self._retired)

    def masks(self, keys: Iterable[int]) -> list[int]:
        """Return the bits of each key."""
        shards = self.shards
        return [shards[key >> SHIFT].get(key, 0) for key in keys]

    def reader(self, slot: int) -> Callable[[int], bool]:
        """A function that says whether a key has the slot's bit."""
        bit, shards = 1 << slot, self.shards
        return lambda key: bool(shards[key >> SHIFT].get(key, 0) & bit)

    def store(self, slot: int, keys: Iterable[int]) -> Change:
        """Set a slot's bit."""
        bit = self._intern(1 << slot)
        shards = self.shards
        after: dict[int, int] = {}
        xor = count = repeated = 0
        for key in keys:
            shard = shards[key >> SHIFT]
            mask = shard.get(key)
            if mask is None:
                shard[key] = bit
            elif mask in after:
                shard[key] = after[mask]
            elif mask & bit:
                repeated += 1
                continue
            else:
                shard[key] = after[mask] = self._intern(mask | bit)
            xor ^= key
            count += 1
        return Change(xor, count, repeated)

    def remove(self, slot: int, keys: Iterable[int]) -> Change:
        """Clear a slot's bit."""
        bit = 1 << slot
        shards = self.shards
        xor = count = repeated = 0
        for key in keys:
            shard = shards[key >> SHIFT]
            mask = shard.get(key, 0)
            if mask == bit:
                del shard[key]
            elif mask & bit:
                shard[key] = self._intern(mask ^ bit)
            else:
                repeated += 1
                continue
            xor ^= key
            count += 1
        return Change(xor, count, repeated)

    def held(self, slot: int, keys: Sequence[int], likely: int = 0) -> int:
        """How many leading keys of a prefix have the bit, provided that none after a missing one has it.

        Not more than ``likely``, if that is not 0; quickest if it is that many.
        """
        bit, shards = 1 << slot, self.shards
        if not keys or not shards[keys[0] >> SHIFT].get(keys[0], 0) & bit:
            return 0
        low, high = 1, min(likely, len(keys)) or len(keys)
        if likely and shards[keys[high - 1] >> SHIFT].get(keys[high - 1], 0) & bit:
            return high
        while low < high:
            middle = (low + high) // 2
            key = keys[middle]
            if shards[key >> SHIFT].get(key, 0) & bit:
                low = middle + 1
            else:
                high = middle
        return low

    def _intern(self, mask: int) -> int:
        if len(self._interned) > _MAX_INTERNED:
            self._interned.clear()
        return self._interned.setdefault(mask, mask)
