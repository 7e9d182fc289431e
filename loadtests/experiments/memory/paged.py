"""The paged side: jobs run through a simulated replica, whose scheduler is the engine's own."""

from __future__ import annotations

from collections import abc, deque

from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduling.candidates import Candidates
from engine.scheduling.step import StepPlan
from loadtests.experiments.memory import constants as given
from loadtests.experiments.memory.jobs import Job
from loadtests.experiments.memory.measure import Meter, Result
from loadtests.experiments.memory.sharing import SharingMeter
from loadtests.experiments.simulated_replica import ReplicaConfig, SimulatedReplica, StepCost


def paged_config(
    slots: int = given.POOL_SLOTS,
    block_size: int = given.BLOCK_SIZE,
    cost: StepCost = given.GPU_LIKE,
    length: int = given.MAX_LENGTH,
) -> ReplicaConfig:
    """The published machine with a pool of ``slots`` tokens, for sequences up to ``length`` tokens."""
    return ReplicaConfig(cost, slots // block_size, block_size, given.TOKEN_BUDGET, given.MAX_NUM_SEQS, length)


def simulate_paged(
    jobs: abc.Sequence[Job], replica: SimulatedReplica, meter: Meter, sharing: SharingMeter | None = None
) -> Result:
    """Run ``jobs`` (in order of arrival) on a replica that is empty."""
    arrivals = deque(jobs)
    live: dict[str, Job] = {}
    now = 0.0
    size = replica.config.block_size
    while arrivals or live:
        if not live:
            now = max(now, arrivals[0].arrival)
        while arrivals and arrivals[0].arrival <= now:
            job = arrivals.popleft()
            live[job.name] = job
            replica.add(_request(job))
        seconds, plan = replica.begin_step(), replica.plan
        assert seconds is not None
        assert plan is not None
        now += seconds
        stats = replica.scheduler.stats()
        # Slots are empty only in last blocks, which nobody shares once their next token is planned.
        empty = sum(len(at.sequence.block_table) * size - at.start - at.length for at in plan.chunks)
        meter.step(
            seconds,
            tokens=stats.referenced_blocks * size - empty,
            reserved=0,
            internal=empty,
            batch=len(plan.chunks),
            waiting=stats.waiting + stats.preempted > 0,
        )
        if sharing is not None:
            sharing.step(plan, seconds, stats.referenced_blocks)
        for delta in replica.end_step(_outcomes(plan)):
            if delta.finish_reason is not None and (live[delta.request_id].width == 1 or delta.final):
                del live[delta.request_id]
                meter.end()
    return meter.result(now, replica.scheduler.stats().preemptions)


def _request(job: Job) -> Request:
    params = SamplingParams(max_tokens=job.output, ignore_eos=True, n=job.width)
    return Request(job.name, list(job.prompt), params, arrival=job.arrival + 1e-9)


def _outcomes(plan: StepPlan) -> list[int | Candidates]:
    """What the model answers: tokens that tell siblings apart."""
    answers: list[int | Candidates] = []
    for chunk in plan.chunks:
        if not chunk.samples:
            continue
        sequence = chunk.sequence
        if sequence.group is None:
            answers.append(1)
        elif not sequence.group.forked:
            width = sequence.group.params.width
            answers.append(Candidates(tuple(range(1, width + 1)), (-1.0,) * width))
        else:
            answers.append(1 + sequence.number)
    return answers
