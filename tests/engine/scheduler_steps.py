"""What tests of the scheduler share."""

from __future__ import annotations

from kv_simulation import KVSimulation

from engine.request import Request, RequestState
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_plan import StepPlan


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(chunk.request.request_id, chunk.start, chunk.length, chunk.samples) for chunk in plan.chunks]


def tokens(count: int, first: int = 0) -> list[int]:
    """Tokens that differ from those of any other ``first``."""
    return [(first + position) % 40 for position in range(count)]


def run_until_preempted(scheduler: Scheduler, simulation: KVSimulation, request: Request) -> None:
    for _ in range(100):
        if request.state is RequestState.PREEMPTED:
            return
        simulation.step(scheduler)
    raise AssertionError("no preemption in 100 steps")
