"""What tests of the scheduler share."""

from __future__ import annotations

from kv_simulation import KVSimulation

from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence, SequenceState
from engine.scheduling.step import StepPlan


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(chunk.sequence.request_id, chunk.start, chunk.length, chunk.samples) for chunk in plan.chunks]


def tokens(count: int, first: int = 0) -> list[int]:
    """Tokens that differ from those of any other ``first``."""
    return [(first + position) % 40 for position in range(count)]


def run_until_preempted(scheduler: Scheduler, simulation: KVSimulation, sequence: Sequence) -> None:
    for _ in range(100):
        if sequence.state is SequenceState.PREEMPTED:
            return
        simulation.step(scheduler)
    raise AssertionError("no preemption in 100 steps")
