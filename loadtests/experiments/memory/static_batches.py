"""Padded static batches, as FasterTransformer runs them: a batch ends with its longest output."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from loadtests.experiments.memory.constants import MAX_LENGTH, POOL_SLOTS, StepCost
from loadtests.experiments.memory.jobs import Job
from loadtests.experiments.memory.measure import Meter, Result

STATIC = "static batches"


def simulate_static(
    jobs: Sequence[Job],
    cost: StepCost,
    meter: Meter,
    slots: int = POOL_SLOTS,
    max_length: int = MAX_LENGTH,
    progress: Callable[[], object] = lambda: None,
) -> Result:
    """Run ``jobs`` (in order of arrival) in batches of as many as the memory holds at ``max_length`` each.

    When a batch has ended, the earliest requests that have arrived make the next one. Prompts are padded to the
    longest of the batch, and every row runs until the longest output has ended, which is when all answers
    of the batch come.
    """
    seats = slots // max_length
    if seats < 1:
        raise ValueError(f"{slots} slots do not hold one sequence of {max_length} tokens")
    waiting: deque[Job] = deque()
    arrivals = deque(jobs)
    now = 0.0
    while arrivals or waiting:
        if not waiting:
            now = max(now, arrivals[0].arrival)
        while arrivals and arrivals[0].arrival <= now:
            waiting.append(arrivals.popleft())
        batch = [waiting.popleft() for _ in range(min(seats, len(waiting)))]
        padded = max(len(job.prompt) for job in batch)
        for step in range(max(job.output for job in batch)):
            while arrivals and arrivals[0].arrival <= now:
                waiting.append(arrivals.popleft())
            live = [job for job in batch if job.output > step]
            if step == 0:
                seconds = cost.step(padded * len(batch), 0, 0)
            else:
                seconds = cost.step(0, len(batch), len(batch) * (padded + step - 1))
            now += seconds
            tokens = sum(len(job.prompt) + step for job in live)
            later = sum(job.total for job in live) - tokens
            meter.step(
                seconds,
                tokens=tokens,
                reserved=later,
                internal=len(batch) * max_length - tokens - later,
                allocated=len(batch) * max_length,
                batch=len(live),
                waiting=bool(waiting),
            )
        for job in batch:
            meter.end(job, now)
            progress()
    return meter.result(now)
