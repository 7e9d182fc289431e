"""Host blocks with swapped-out KV: their reference counts, and which sequences share one copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.errors import ConfigError
from engine.kv.block_pool import InvariantError

Content = tuple[int, int, int]
"""Device block, its generation (how often the device pool has handed it out), and the valid tokens in it.

Within one generation a block only fills up, so equal triples always mean equal KV.
"""


class HostPool:
    """Reference counts and the free queue of ``num_blocks`` host blocks with ids ``0..num_blocks - 1``.

    A host block is either free or *referenced*: held by one or more host tables. A referenced one is known by
    its :data:`Content`, so that swapping the same contents out later takes a reference instead of a copy.
    Every call either succeeds whole or changes nothing, and costs O(1) for each block that it touches.

    Args:
        num_blocks: with 0, only empty tables fit.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ConfigError(
                f"the host pool has {num_blocks} blocks but must have at least 0; raise swap_space"
            )
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._contents: list[Content | None] = [None] * num_blocks
        self._places: dict[Content, int] = {}
        # A circular doubly linked list of the free blocks; the entry past the blocks is its sentinel.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that no table holds."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks in at least one host table."""
        return self.num_blocks - self._num_free

    def references(self, block: int) -> int:
        """How many host tables hold ``block``."""
        return self._references[block]

    def sample(self, each: int) -> list[int]:
        """References of every ``each``-th block; any thread may call it."""
        return self._references[::each]

    def num_to_copy(self, blocks: Sequence[Content]) -> int:
        """How many host blocks swapping ``blocks`` out would take and fill; other contents are already here."""
        return len({content for content in blocks if content not in self._places})

    def swap_out(self, blocks: Sequence[Content]) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Take one reference to a host block for each of ``blocks``; ``None`` when too few are free.

        Runs are copied faster than single blocks, so a free block that follows the one taken last is
        preferred to the head of the queue.

        Returns:
            The host table in the order of ``blocks``, and the copies still to be made as pairs of device and
            host block.
        """
        if self.num_to_copy(blocks) > self._num_free:
            return None
        table: list[int] = []
        copies: list[tuple[int, int]] = []
        last = self.num_blocks
        for content in blocks:
            host = self._places.get(content)
            if host is None:
                host = last + 1
                if host >= self.num_blocks or self._references[host]:
                    host = self._next[self.num_blocks]
                self._unlink(host)
                self._places[content] = host
                self._contents[host] = content
                copies.append((content[0], host))
                last = host
            self._references[host] += 1
            table.append(host)
        return table, copies

    def share(self, table: Sequence[int]) -> None:
        """Add one reference to each block of ``table``, as a forked sibling does.

        Raises:
            InvariantError: a block is free: what it held may be gone.
        """
        for block in table:
            if not self._is_held(block, 1):
                raise InvariantError(f"host block {block} was shared but nobody holds it")
        for block in table:
            self._references[block] += 1

    def release(self, table: Sequence[int]) -> None:
        """Drop one reference to each block of ``table``; contents that no table holds are forgotten.

        Raises:
            InvariantError: a block is released more often than it is held.
        """
        for block, count in Counter(table).items():
            if not self._is_held(block, count):
                raise InvariantError(f"host block {block} was released more often than it was held")
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block]:
                continue
            content = self._contents[block]
            self._contents[block] = None
            if content is not None:
                del self._places[content]
            self._link(block)

    def _is_held(self, block: int, count: int) -> bool:
        return 0 <= block < self.num_blocks and self._references[block] >= count

    def _link(self, block: int) -> None:
        """Put a block at the head of the free queue: a table released last to first is taken in its order."""
        end = self.num_blocks
        before = self._next[end]
        self._next[end] = self._previous[before] = block
        self._previous[block] = end
        self._next[block] = before
        self._num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._num_free -= 1

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Verify every invariant against all host tables that exist; O(blocks), for tests and debugging.

        Raises:
            InvariantError: says which invariant is broken, and for which block.
        """
        held = Counter(block for table in tables for block in table)
        for block in held:
            if not 0 <= block < self.num_blocks:
                raise InvariantError(f"a host table names block {block}, which does not exist")
        free = self._walk()
        if len(free) != self._num_free:
            raise InvariantError(f"{self._num_free} free host blocks are counted but {len(free)} are queued")
        for block, count in enumerate(self._references):
            if count != held[block]:
                raise InvariantError(
                    f"host block {block} has {count} references but is in {held[block]} host tables"
                )
            if (count > 0) == (block in free):
                state = "held and queued as free" if count else "neither held nor queued as free"
                raise InvariantError(f"host block {block} is {state}")
            content = self._contents[block]
            if (content is None) != (count == 0):
                state = "held but has no contents" if count else "free but keeps its contents"
                raise InvariantError(f"host block {block} is {state}")
            if content is not None and self._places.get(content) != block:
                raise InvariantError(f"host block {block} cannot be found by its contents {content}")
        if len(self._places) != self.num_used:
            raise InvariantError(
                f"{len(self._places)} contents can be found but {self.num_used} host blocks are used"
            )

    def _walk(self) -> set[int]:
        seen: set[int] = set()
        last = end = self.num_blocks
        block = self._next[end]
        while block != end:
            if block in seen:
                raise InvariantError(f"the free queue runs in a circle at host block {block}")
            if self._previous[block] != last:
                raise InvariantError(f"the free queue is torn before host block {block}")
            seen.add(block)
            last, block = block, self._next[block]
        if self._previous[end] != last:
            raise InvariantError("the free queue of host blocks is torn at its end")
        return seen
