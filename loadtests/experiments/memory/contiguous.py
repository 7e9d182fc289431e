"""Contiguous allocation with iteration-level scheduling, as published for Orca (Yu et al., OSDI 2022)."""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Sequence

from loadtests.experiments.memory.allocators import Allocator, BuddyAllocator
from loadtests.experiments.memory.constants import MAX_LENGTH
from loadtests.experiments.memory.jobs import Job
from loadtests.experiments.memory.measure import Meter, Result
from loadtests.experiments.simulated_replica import StepCost


class Reservation(enum.Enum):
    """Slots that a request takes when it starts, kept until it ends."""

    MAX = "Orca Max"  # the longest sequence that the model allows
    POW2 = "Orca Pow2"  # room for an output of the next power of two, so at most twice the true one
    ORACLE = "Orca Oracle"  # prompt and true output: not possible, an upper bound

    def slots(self, job: Job) -> int:
        if self is Reservation.MAX:
            return MAX_LENGTH
        if self is Reservation.POW2:
            return min(MAX_LENGTH, len(job.prompt) + BuddyAllocator.rounded(job.output))
        return job.total


def simulate_contiguous(
    jobs: Sequence[Job], reservation: Reservation, allocator: Allocator, cost: StepCost, meter: Meter
) -> Result:
    """Run ``jobs`` (in order of arrival), in their order: one that finds no free run blocks those behind it.

    A request starts in any step; its prompt runs whole in its first one, together with the others' decodes.
    """
    waiting: deque[Job] = deque()
    running: list[tuple[int, int, Job, int, int]] = []  # last step, tie, job, first slot, slots reserved
    arrivals = deque(jobs)
    now = 0.0
    step = 0
    rows = stored = needed = reserved = 0
    while arrivals or waiting or running:
        while arrivals and arrivals[0].arrival <= now:
            waiting.append(arrivals.popleft())
        prefill = started = 0
        context = stored  # of those that decode
        while waiting:
            job = waiting[0]
            size = reservation.slots(job)
            run = allocator.allocate(size)
            if run is None:
                break
            waiting.popleft()
            heapq.heappush(running, (step + job.output, step * 2**20 + started, job, run, size))
            started += 1
            prefill += len(job.prompt)
            stored += len(job.prompt)
            needed += job.total
            reserved += size
        if not running:
            if waiting:
                size = reservation.slots(waiting[0])
                raise ValueError(f"{waiting[0].name} needs runs of {size} slots and can never start")
            now = arrivals[0].arrival
            continue
        stored += rows  # each decode stores the token that the step before made
        seconds = cost.step(prefill, rows, context)
        now += seconds
        meter.step(
            seconds,
            tokens=stored,
            reserved=needed - stored,
            internal=reserved - needed,
            batch=len(running),
            waiting=bool(waiting),
        )
        step += 1
        while running and running[0][0] == step:
            _, _, job, run, size = heapq.heappop(running)
            allocator.release(run)
            stored -= job.total - 1
            needed -= job.total
            reserved -= size
            meter.end()
        rows = len(running)
    return meter.result(now)
