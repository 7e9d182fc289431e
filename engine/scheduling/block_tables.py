"""Block tables: they grow by allocation, share blocks by reference, and copy a shared block before a write."""

from __future__ import annotations

from typing import NamedTuple

from engine.kv.block_pool import NO_BLOCK, BlockPool
from engine.kv.host_pool import Content
from engine.kv.prefix_index import PrefixIndex
from engine.kv.transfers import Transfers
from engine.scheduling.sequence import Sequence


class ComputedBlocks(NamedTuple):
    """The part of a block table that holds computed KV, and what names the contents of its blocks."""

    table: list[int]  # may have ``NO_BLOCK``
    contents: list[Content]  # in the order of the table, of the blocks that are there


class BlockTables:
    """Maps each sequence's logical blocks to physical ones; the only place that changes ``block_table``."""

    def __init__(self, pool: BlockPool, index: PrefixIndex) -> None:
        self._pool = pool
        self._index = index

    def reuse_prefix(self, sequence: Sequence) -> int:
        """Begin an empty table with the cached blocks that the prefix index found; return how many."""
        sequence.block_table = self._index.blocks(sequence.node)
        self._pool.share(sequence.block_table)
        sequence.indexed = len(sequence.block_table)
        return sequence.indexed

    def extend(self, sequence: Sequence, length: int, transfers: Transfers) -> int:
        """Let a sequence write up to ``length`` more tokens; return how many, 0 if blocks are out.

        Its table is extended to cover them. A block that other sequences also hold is copied before the write.
        """
        pool, size = self._pool, self._pool.block_size
        self.release_outside_window(sequence)
        computed, table = sequence.computed, sequence.block_table
        first = computed // size
        copy = first < len(table) and pool.references(table[first]) > 1
        missing = copy + max(0, pool.blocks_for(computed + length) - len(table))
        if missing:
            count = min(missing, pool.num_available)
            blocks = pool.allocate(count, table[-1] if table and not copy else None) if count else None
            if blocks:
                if copy:
                    self._copy_on_write(table, first, blocks.pop(0), transfers)
                table.extend(blocks)
            elif copy or len(table) * size <= computed:
                return 0
        sequence.writable = len(table) * size
        return min(length, sequence.writable - computed)

    def extend_further(self, sequence: Sequence, length: int, most: int) -> int:
        """:meth:`extend` by at most ``most`` blocks, which are available, without releases or copies.

        Args:
            sequence: one that may write a token already.
            length: tokens beyond those computed.
            most: new blocks.
        """
        pool, table = self._pool, sequence.block_table
        missing = min(pool.blocks_for(sequence.computed + length) - len(table), most)
        if missing > 0:
            table.extend(pool.allocate(missing, table[-1]) or ())
            sequence.writable = len(table) * pool.block_size
        return min(length, sequence.writable - sequence.computed)

    def _copy_on_write(self, table: list[int], place: int, block: int, transfers: Transfers) -> None:
        """Replace a shared block by ``block``, its copy: the step copies the contents before it writes."""
        transfers.copies.append((table[place], block))
        self._pool.release(table[place : place + 1])
        table[place] = block

    def append_swapped(self, sequence: Sequence, host_blocks: list[int]) -> list[tuple[int, int]]:
        """Append a new block for each host block, ``NO_BLOCK`` for ``NO_BLOCK``; admission has counted them.

        Returns:
            Pairs of host block and new block, to be copied in this step.
        """
        table = sequence.block_table
        present = [block for block in host_blocks if block != NO_BLOCK]
        last = table[-1] if table else None
        fresh = self._pool.allocate(len(present), last if last != NO_BLOCK else None)
        assert fresh is not None, "admission has counted them"
        following = iter(fresh)
        table.extend(NO_BLOCK if block == NO_BLOCK else next(following) for block in host_blocks)
        return list(zip(present, fresh, strict=True))

    def computed_blocks(self, sequence: Sequence) -> ComputedBlocks:
        """The blocks of a sequence's computed tokens."""
        pool, computed = self._pool, sequence.computed
        table = sequence.block_table[: pool.blocks_for(computed)]
        contents = [
            (block, pool.generation(block), min(pool.block_size, computed - place * pool.block_size))
            for place, block in enumerate(table)
            if block != NO_BLOCK
        ]
        return ComputedBlocks(table, contents)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all computed blocks of ``parent``, a partial last one, too: :meth:`extend` copies it."""
        size = self._pool.block_size
        child.computed, child.indexed = parent.computed, parent.indexed
        child.block_table = parent.block_table[: self._pool.blocks_for(parent.computed)]
        self._pool.share(child.block_table)
        # From here on neither may write to a partial last block before it has looked at its references.
        child.writable = 0 if child.computed % size else len(child.block_table) * size
        parent.writable = 0

    def release(self, sequence: Sequence) -> None:
        """Give up all blocks."""
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.writable = 0

    def release_outside_window(self, sequence: Sequence) -> None:
        """Release the blocks that no layer of a sliding-window model can see any more."""
        if self._index.window is not None:
            self.release_before(sequence, self._index.visible_from(sequence.computed))

    def release_before(self, sequence: Sequence, place: int) -> None:
        """Release the blocks before ``place`` in a table; nothing reads them any more."""
        table = sequence.block_table
        while place > 0 and table[place - 1] != NO_BLOCK:
            place -= 1
            self._pool.release(table[place : place + 1])
            table[place] = NO_BLOCK
