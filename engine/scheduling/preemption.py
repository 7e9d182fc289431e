"""Takes the blocks of the last running sequence when none are left; its KV is swapped or recomputed later."""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv.block_pool import NO_BLOCK, BlockPool, InvariantError
from engine.scheduling.recovery import Recovery
from engine.scheduling.sequence import Sequence
from engine.scheduling.state import SchedulerState
from engine.scheduling.step import StepPlan
from engine.scheduling.swapping import swap_out


def grow(state: SchedulerState, sequence: Sequence, length: int, plan: StepPlan) -> int:
    """Let a running sequence write up to ``length`` more tokens; preempt others until it can write one.

    Returns how many tokens; 0 if it was preempted itself. Writing fewer tokens is better than a preemption, so
    blocks are taken from others only for the first token.
    """
    while True:
        covered = state.block_tables.extend(sequence, length, plan.transfers)
        if covered:
            return covered
        plan.out_of_blocks = True
        position = _victim_for(state, sequence, plan)
        is_itself = state.running[position] is sequence
        preempt(state, position, plan)
        if is_itself:
            return 0


def preempt(state: SchedulerState, position: int, plan: StepPlan) -> None:
    """Take the blocks of the running sequence at ``position``, which has no chunk in this step."""
    sequence = state.running[position]
    # Blocks that no layer can see any more need not be saved, and do not count as lost.
    state.block_tables.release_outside_window(sequence)
    computed = state.block_tables.computed_blocks(sequence)
    decision = state.recoveries.preempted(sequence, computed)
    if decision is not None and decision.recovery is Recovery.SWAP:
        state.preempt_to_swap(position, swap_out(state, computed, decision, plan))
    else:
        state.preempt_to_recompute(position)
    plan.preempted.append(sequence)


class FreedBlocks:
    """Counts the blocks that become available if several sequences are preempted together.

    A block is freed once only victims refer to it, so a family of forks frees its shared blocks with its last
    member. ``kept`` are blocks that the sequence to be admitted finds in the cache.
    """

    def __init__(self, pool: BlockPool, kept: Iterable[int]) -> None:
        self._pool = pool
        self._kept = set(kept)
        self._references: dict[int, int] = {}
        self.count = 0

    def add(self, block_table: list[int]) -> None:
        """One more victim, with this block table."""
        references, pool = self._references, self._pool
        for block in block_table:
            if block == NO_BLOCK or block in self._kept:
                continue
            held = references[block] = references.get(block, 0) + 1
            self.count += held == pool.references(block)


def _victim_for(state: SchedulerState, sequence: Sequence, plan: StepPlan) -> int:
    """The position of the last running sequence: the youngest loses its blocks first."""
    position = len(state.running) - 1
    if state.running[position] is sequence and not plan.chunks:
        # All before it are held beams that wait for this one: they can wait without blocks.
        position -= 1
        if position < 0:
            raise InvariantError(f"request {sequence.request_id!r} runs alone and does not fit the pool")
    return position
