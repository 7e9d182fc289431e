"""Swap: a preempted sequence's KV goes to host blocks, and comes back to new blocks of the device."""

from __future__ import annotations

from engine.kv.block_pool import NO_BLOCK
from engine.scheduling.recovery import Decision
from engine.scheduling.recovery_tracker import Contents
from engine.scheduling.sequence import Sequence
from engine.scheduling.state import SchedulerState
from engine.scheduling.step import StepPlan, Swap


def swap_out(
    state: SchedulerState, blocks: list[int], contents: Contents, decision: Decision, plan: StepPlan
) -> list[int]:
    """Copy ``blocks`` to the host in this step; return the host blocks, ``NO_BLOCK`` where there is none.

    Blocks whose contents are on the host already are not copied.
    """
    swapped = state.host.swap_out(contents)
    assert swapped is not None, "the policy was told that they fit"
    host_blocks, pairs = swapped
    plan.transfers.swap_out.extend(pairs)
    plan.swaps.append(Swap(decision, len(pairs), 0))
    following = iter(host_blocks)
    return [NO_BLOCK if block == NO_BLOCK else next(following) for block in blocks]


def swap_in(state: SchedulerState, sequence: Sequence, plan: StepPlan) -> None:
    """Add blocks for what the prefix index no longer has, to be filled from the host in this step.

    Blocks outside the window stay away: one released in the step that fills it could be given to another
    sequence and be filled twice.
    """
    pool, table = state.pool, sequence.block_table
    found = len(table)
    first_visible = state.index.visible_from(sequence.computed)
    state.block_tables.release_before(sequence, min(first_visible, found))
    sources = sequence.host_table[found : pool.blocks_for(sequence.computed)]
    unseen = min(max(first_visible - found, 0), len(sources))
    sources[:unseen] = [NO_BLOCK] * unseen
    present = [block for block in sources if block != NO_BLOCK]
    last = table[-1] if table else None
    fresh = pool.allocate(len(present), last if last != NO_BLOCK else None)
    assert fresh is not None, "admission has counted them"
    plan.transfers.swap_in.extend(zip(present, fresh, strict=True))
    following = iter(fresh)
    table.extend(NO_BLOCK if source == NO_BLOCK else next(following) for source in sources)
    if sequence.decision is not None:
        plan.swaps.append(Swap(sequence.decision, 0, len(present)))
