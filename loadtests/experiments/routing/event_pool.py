"""A block pool that says which keys became findable or ceased to be since it was last asked."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.block_pool import BlockPool


class EventPool(BlockPool):
    """The engine's pool, with the router's key of each findable block beside it.

    Two blocks may hold the same key for a moment, while an index moves from one copy to another.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._key_of = [0] * num_blocks
        self._announced = bytearray(num_blocks)
        self._copies: dict[int, int] = {}
        self._changes: dict[int, bool] = {}

    def name(self, blocks: Sequence[int], keys: Sequence[int]) -> None:
        """Tell the keys of blocks that are about to be made findable; those that are already keep theirs."""
        for block, key in zip(blocks, keys, strict=True):
            if not self._announced[block]:
                self._key_of[block] = key

    def key(self, block: int) -> None:
        """Mark a referenced block as findable."""
        super().key(block)
        self._announced[block] = 1
        key = self._key_of[block]
        copies = self._copies.get(key, 0)
        self._copies[key] = copies + 1
        if not copies:
            self._change(key, True)

    def unkey(self, block: int) -> None:
        """Mark a block as no longer findable; also called for each evicted one."""
        super().unkey(block)
        if not self._announced[block]:
            return
        self._announced[block] = 0
        key = self._key_of[block]
        copies = self._copies[key] - 1
        if copies:
            self._copies[key] = copies
        else:
            del self._copies[key]
            self._change(key, False)

    def _change(self, key: int, stored: bool) -> None:
        # A change and its opposite cancel out.
        if key in self._changes:
            del self._changes[key]
        else:
            self._changes[key] = stored

    def resident(self) -> list[int]:
        """Every findable key."""
        return list(self._copies)

    def drain(self) -> tuple[list[int], list[int]]:
        """Keys stored and keys removed since the last call."""
        stored = [key for key, added in self._changes.items() if added]
        removed = [key for key, added in self._changes.items() if not added]
        self._changes = {}
        return stored, removed
