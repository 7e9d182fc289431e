"""Physical KV blocks: their reference counts, and the order in which they are reused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress

from engine.errors import ConfigError, QuireError

NO_BLOCK = -1
"""An entry of a block table whose block is gone, because no layer can see its tokens any more."""


class InvariantError(QuireError):
    """The engine's own bookkeeping is wrong; its KV memory cannot be trusted any more."""


class BlockPool:
    """Reference counts and the free queue of ``num_blocks`` blocks with ids ``0..num_blocks - 1``.

    A block is in exactly one of three states:

    - *referenced*: held by one or more block tables;
    - *cached*: held by none, but *keyed*: the prefix index can find its contents;
    - *free*: held by none and not keyed.

    Free blocks are handed out first, then cached blocks, least recently used first; handing out a cached block
    evicts it (``on_evict`` is told). Every call either succeeds whole or changes nothing, and costs O(1) for
    each block that it touches.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ConfigError(
                f"num_blocks is {num_blocks} but must be at least 1; raise num_blocks or kv_memory"
            )
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size} but must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[int], None] | None = None
        """Called with a cached block as it is evicted, after it has left the queue; may call :meth:`unkey`."""
        # One entry more than blocks: reading at NO_BLOCK finds it, never held and never keyed.
        self._references = [0] * (num_blocks + 1)
        self._keyed = bytearray(num_blocks + 1)
        self._generations = [0] * (num_blocks + 1)
        # Two circular doubly linked lists in the same arrays; the entries past the blocks are their sentinels.
        self._free_end = num_blocks
        self._cached_end = num_blocks + 1
        self._next = [*range(1, num_blocks + 1), 0, num_blocks + 1]
        self._previous = [num_blocks, *range(num_blocks), num_blocks + 1]
        self._num_free = num_blocks
        self._num_cached = 0
        self._high_water_mark = 0
        self._num_shared = 0

    @property
    def num_free(self) -> int:
        """Blocks that no table holds and whose contents cannot be found."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks that no table holds but whose contents can be found."""
        return self._num_cached

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`allocate` can hand out: free and cached."""
        return self._num_free + self._num_cached

    @property
    def high_water_mark(self) -> int:
        """One more than the highest block ever allocated: no block from here on has been written."""
        return self._high_water_mark

    @property
    def num_referenced(self) -> int:
        """Blocks in at least one block table."""
        return self.num_blocks - self._num_free - self._num_cached

    @property
    def num_shared(self) -> int:
        """Blocks that block tables hold more than once together."""
        return self._num_shared

    def references(self, block: int) -> int:
        """How many block tables hold ``block``; 0 for ``NO_BLOCK``."""
        return self._references[block]

    def count_referenced(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` some table holds."""
        return sum(map(bool, map(self._references.__getitem__, blocks)))

    def generation(self, block: int) -> int:
        """How often ``block`` has been handed out: while it stays the same, what was written stays, too."""
        return self._generations[block]

    def is_keyed(self, block: int) -> bool:
        """Whether the contents of ``block`` can be found."""
        return bool(self._keyed[block])

    def keyed_blocks(self) -> set[int]:
        """All blocks whose contents can be found; O(blocks)."""
        return set(compress(range(self.num_blocks), self._keyed))

    def sample(self, each: int) -> list[tuple[int, bool]]:
        """References and key of every ``each``-th block; any thread may call it."""
        # Each slice is taken at once.
        counts = self._references[: self.num_blocks : each]
        return [(count, bool(key)) for count, key in zip(counts, self._keyed[::each], strict=False)]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """Take ``count`` blocks with one reference each, in ascending order; ``None`` when there are too few.

        Adjacent blocks read faster, so free blocks that follow ``after`` (the last block of the table that
        will grow) or each other are preferred to the head of the queue.
        """
        if count > self._num_free + self._num_cached:
            return None
        blocks: list[int] = []
        references, keyed, num_blocks = self._references, self._keyed, self.num_blocks
        last = num_blocks if after is None else after
        for _ in range(count):
            block = last + 1
            if block >= num_blocks or references[block] or keyed[block]:
                block = self._next[self._free_end]
                if block == self._free_end:
                    block = self._next[self._cached_end]
            self._unlink(block)
            references[block] = 1
            self._generations[block] += 1
            if keyed[block]:
                keyed[block] = 0
                if self.on_evict is not None:
                    self.on_evict(block)
            blocks.append(block)
            last = block
        blocks.sort()
        if blocks:
            self._high_water_mark = max(self._high_water_mark, blocks[-1] + 1)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of ``blocks``, which must be referenced or cached, or ``NO_BLOCK``.

        Raises:
            InvariantError: a block is free: what it held may be gone.
        """
        blocks = tuple(blocks)
        references, keyed = self._references, self._keyed
        for block in blocks:
            if not references[block] and not keyed[block] and block != NO_BLOCK:
                raise InvariantError(f"block {block} was shared after it was freed")
        for block in blocks:
            held = references[block]
            if not held:
                if block == NO_BLOCK:
                    continue
                self._unlink(block)
            elif held == 1:
                self._num_shared += 1
            references[block] = held + 1

    def release(self, table: Sequence[int]) -> None:
        """Drop one reference to each block of ``table``, the last block first.

        So the end of a sequence is evicted before its beginning, which more requests can use. ``NO_BLOCK``
        entries are skipped.

        Raises:
            InvariantError: a block is released more often than it is held.
        """
        distinct = set(table)
        if NO_BLOCK in distinct:
            distinct.remove(NO_BLOCK)
            table = [block for block in table if block != NO_BLOCK]
        references = self._references
        wrong: int | None = None
        if len(distinct) == len(table):
            for block in table:
                if references[block] < 1:
                    wrong = block
                    break
        else:
            counts = Counter(table)
            wrong = next((block for block in counts if references[block] < counts[block]), None)
        if wrong is not None:
            raise InvariantError(f"block {wrong} was released more often than it was held")
        for block in reversed(table):
            references[block] -= 1
            if not references[block]:
                self._link(block)
            elif references[block] == 1:
                self._num_shared -= 1

    def key(self, block: int) -> None:
        """Mark a referenced block as findable.

        Raises:
            InvariantError: no table holds the block.
        """
        if not self._references[block]:
            raise InvariantError(f"block {block} was keyed but nobody holds it")
        self._keyed[block] = 1

    def unkey(self, block: int) -> None:
        """Mark a block as no longer findable; a cached block becomes free."""
        if not self._keyed[block]:
            return
        if self._references[block]:
            self._keyed[block] = 0
            return
        self._unlink(block)
        self._keyed[block] = 0
        self._link(block)

    def _link(self, block: int) -> None:
        """Queue an unreferenced block: a keyed one as most recently used, any other to be reused next."""
        if self._keyed[block]:
            after = self._previous[self._cached_end]
            self._num_cached += 1
        else:
            after = self._free_end
            self._num_free += 1
        before = self._next[after]
        self._next[after] = self._previous[before] = block
        self._previous[block] = after
        self._next[block] = before

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        if self._keyed[block]:
            self._num_cached -= 1
        else:
            self._num_free -= 1

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Verify every invariant against all block tables that exist; O(blocks), for tests and debugging.

        Raises:
            InvariantError: says which invariant is broken, and for which block.
        """
        held = Counter(chain.from_iterable(tables))
        del held[NO_BLOCK]
        for block in held:
            if block < 0 or block >= self.num_blocks:
                raise InvariantError(f"a block table names block {block}, which does not exist")
        if self._references[NO_BLOCK] or self._keyed[NO_BLOCK]:
            raise InvariantError("the place of absent blocks is held or keyed")
        for block, count in enumerate(self._references[: self.num_blocks]):
            if count != held.get(block, 0):
                raise InvariantError(
                    f"block {block} has {count} references but is in {held[block]} block tables"
                )
        shared = sum(count > 1 for count in held.values())
        if shared != self._num_shared:
            raise InvariantError(f"{self._num_shared} shared blocks are counted but there are {shared}")
        free = self._walk(self._free_end, "free")
        cached = self._walk(self._cached_end, "cached")
        for block in range(self.num_blocks):
            places = (self._references[block] > 0) + (block in free) + (block in cached)
            if places != 1:
                raise InvariantError(f"block {block} is in {places} states; it must be in one")
            if block in free and self._keyed[block]:
                raise InvariantError(f"block {block} is keyed but queued as free")
            if block in cached and not self._keyed[block]:
                raise InvariantError(f"block {block} is not keyed but queued as cached")
        if len(free) != self._num_free or len(cached) != self._num_cached:
            raise InvariantError(
                f"{self._num_free} free and {self._num_cached} cached blocks are counted but "
                f"{len(free)} and {len(cached)} are queued"
            )

    def _walk(self, end: int, name: str) -> set[int]:
        seen: set[int] = set()
        last, block = end, self._next[end]
        while block != end:
            if block < 0 or block >= self.num_blocks:
                raise InvariantError(f"the {name} queue leads to {block}, which is no block")
            if block in seen:
                raise InvariantError(f"the {name} queue runs in a circle at block {block}")
            if self._previous[block] != last:
                raise InvariantError(f"the {name} queue is torn before block {block}")
            seen.add(block)
            last, block = block, self._next[block]
        if self._previous[end] != last:
            raise InvariantError(f"the {name} queue is torn at its end")
        return seen
