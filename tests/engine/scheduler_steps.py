"""What tests of the scheduler share."""

from __future__ import annotations

from itertools import takewhile

from kv_simulation import KVSimulation

from engine.scheduling.admission import blocks_needed, is_next_block_scheduled
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence, SequenceState
from engine.scheduling.step import StepPlan


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(chunk.sequence.request_id, chunk.start, chunk.length, chunk.samples) for chunk in plan.chunks]


def tokens(count: int, first: int = 0) -> list[int]:
    """Tokens that differ from those of any other ``first``."""
    return [(first + position) % 40 for position in range(count)]


def assert_no_idle_budget(scheduler: Scheduler, plan: StepPlan) -> None:
    """Tokens are only left if no sequence could use them: the step is not shorter than it has to be."""
    state = scheduler.state
    if plan.budget_left <= 0 or plan.out_of_blocks:
        return
    planned = {chunk.sequence: chunk.length for chunk in plan.chunks}
    for sequence in state.running:
        left = sequence.remaining - planned.get(sequence, 0)
        assert left <= 0 or not state.pool.num_available, f"{sequence.key} could compute {left} tokens more"
    startable = [sequence for sequence in state.waiting if sequence.candidates is None]
    leaving = list(takewhile(lambda sequence: sequence.state is SequenceState.SWAPPING_OUT, startable))
    if len(leaving) == len(startable) or state.num_seqs >= state.max_num_seqs:
        return
    first = startable[len(leaving)]
    # Those that this step swaps out come back before it.
    withheld = sum(state.pool.blocks_for(len(sequence.token_ids) + 1) for sequence in leaving)
    needed = blocks_needed(state, first) + state.reserve.blocks(state.running) + withheld
    if not is_next_block_scheduled(state, first, plan):
        assert needed > state.pool.num_available, f"{first.key} could start"


def run_until_preempted(scheduler: Scheduler, simulation: KVSimulation, sequence: Sequence) -> None:
    for _ in range(100):
        if sequence.state is SequenceState.PREEMPTED:
            return
        simulation.step(scheduler)
    raise AssertionError("no preemption in 100 steps")
