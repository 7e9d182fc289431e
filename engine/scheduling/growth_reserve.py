"""The blocks that admission keeps back, so that running sequences can grow without preempting each other."""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv.block_pool import BlockPool
from engine.scheduling.sequence import Sequence

_MAX_GROWTH = 8.0  # blocks for each running sequence, after repeated shortage


class GrowthReserve:
    """Reserves, for each running sequence, the rest of its prefill and some blocks of growth.

    Without it, admission into the last free blocks would cause a preemption a few steps later. The growth
    starts at one block, doubles with each step that runs out of blocks, and decays by 1% with every other step.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._growth = 1.0  # blocks for each running sequence

    def adapt(self, out_of_blocks: bool) -> None:
        """A step's running sequences have been planned."""
        if out_of_blocks:
            self._growth = min(_MAX_GROWTH, 2 * self._growth)
        else:
            self._growth = max(1.0, 0.99 * self._growth)

    def blocks(self, sequences: Iterable[Sequence]) -> int:
        """Blocks to keep back for these; sequences that will be forked from them count, too."""
        size = self._pool.block_size
        growth = int(self._growth * size)
        blocks = 0
        for sequence in sequences:
            tokens = len(sequence.token_ids) + growth
            if tokens > sequence.max_total_tokens:
                tokens = sequence.max_total_tokens
            own = (tokens + size - 1) // size - len(sequence.block_table)
            if own > 0:
                blocks += own
            if sequence.num_seqs > 1:
                blocks += (sequence.num_seqs - 1) * (max(own, 0) + 1)
        return blocks

    def upper_bound(self, prefilling: Iterable[Sequence], num_running_seqs: int) -> int:
        """At least :meth:`blocks` of all running sequences; ``prefilling`` are those that do not decode yet.

        The table of a sequence that decodes covers its whole text: it can only want what growth may fill.
        """
        growth = self._pool.blocks_for(int(self._growth * self._pool.block_size))
        return self.blocks(prefilling) + num_running_seqs * (growth + 1)
