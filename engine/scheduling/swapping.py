"""Swap: copies a preempted sequence's KV to host blocks, and later back to new device blocks."""

from __future__ import annotations

from engine.kv.block_pool import NO_BLOCK
from engine.scheduling.block_tables import ComputedBlocks
from engine.scheduling.recovery import RecoveryDecision
from engine.scheduling.sequence import Sequence
from engine.scheduling.state import SchedulerState
from engine.scheduling.step import StepPlan, Swap


def swap_out(
    state: SchedulerState, computed: ComputedBlocks, decision: RecoveryDecision, plan: StepPlan
) -> list[int]:
    """Copy a table's computed blocks to the host in this step; return the host table.

    Blocks whose contents are already on the host are not copied.
    """
    swapped = state.host.swap_out(computed.contents)
    assert swapped is not None, "the policy was told that they fit"
    host_blocks, pairs = swapped
    plan.transfers.swap_out.extend(pairs)
    plan.swaps.append(Swap(decision, len(pairs), 0))
    following = iter(host_blocks)
    return [NO_BLOCK if block == NO_BLOCK else next(following) for block in computed.table]


def swap_in(state: SchedulerState, sequence: Sequence, plan: StepPlan) -> None:
    """Add blocks for what the prefix index no longer has, to be filled from the host in this step.

    Blocks outside the window are left out: one that is released in the step that fills it could be given to
    another sequence and be filled twice.
    """
    found = len(sequence.block_table)
    first_visible = state.index.visible_from(sequence.computed)
    state.block_tables.release_before(sequence, min(first_visible, found))
    sources = sequence.host_table[found : state.pool.blocks_for(sequence.computed)]
    unseen = min(max(first_visible - found, 0), len(sources))
    sources[:unseen] = [NO_BLOCK] * unseen
    pairs = state.block_tables.append_swapped(sequence, sources)
    plan.transfers.swap_in.extend(pairs)
    if sequence.decision is not None:
        plan.swaps.append(Swap(sequence.decision, 0, len(pairs)))
