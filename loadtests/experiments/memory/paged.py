"""The real scheduler, block pool and prefix index, with a model that only takes (simulated) time."""

from __future__ import annotations

import random
from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.request import ModelLimits, Request
from engine.sampling_params import SamplingParams
from engine.scheduling.candidates import Candidates
from engine.scheduling.recovery import Rates, RecoveryMode, RecoveryPolicy
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import StepPlan, StepTiming
from loadtests.experiments.memory.constants import (
    BLOCK_SIZE,
    MAX_LENGTH,
    MAX_NUM_SEQS,
    POOL_SLOTS,
    TOKEN_BUDGET,
    StepCost,
)
from loadtests.experiments.memory.jobs import VOCABULARY, Job
from loadtests.experiments.memory.measure import Meter, Result
from loadtests.experiments.memory.sharing import SharingMeter

PAGED = "paged"


@dataclass(frozen=True, slots=True)
class Memory:
    """Sizes of the pools, in tokens, and how a preempted request recovers."""

    slots: int = POOL_SLOTS
    block_size: int = BLOCK_SIZE
    host_slots: int = 0
    recovery: RecoveryMode = RecoveryMode.RECOMPUTE
    rates: Rates = field(
        default_factory=Rates
    )  # what the policy believes at first; it learns from what it sees

    def scheduler(self, max_length: int = MAX_LENGTH) -> tuple[Scheduler, RecoveryPolicy]:
        """A scheduler as the engine makes one."""
        num_blocks = self.slots // self.block_size
        policy = RecoveryPolicy(self.recovery, self.block_size, self.rates)
        scheduler = Scheduler.create(
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_num_seqs=MAX_NUM_SEQS,
            token_budget=TOKEN_BUDGET,
            prefix_caching=True,
            eos_token_ids=(),
            model_key=(),
            limits=ModelLimits(VOCABULARY, max_length, num_blocks, self.block_size),
            recovery=policy,
            host_blocks=self.host_slots // self.block_size,
        )
        return scheduler, policy


class Machine:
    """Takes the time of a step; with ``noise``, each part by a log-normal factor of that sigma and mean 1."""

    def __init__(self, cost: StepCost, block_size: int = BLOCK_SIZE, noise: float = 0.0, seed: int = 0) -> None:
        self._cost = cost
        self._block = cost.swapped_block * block_size / BLOCK_SIZE
        self._noise = noise
        self._rng = random.Random(seed)

    def run(self, plan: StepPlan) -> StepTiming:
        """Seconds that the plan takes."""
        prefill = rows = context = 0
        for chunk in plan.chunks:
            if chunk.length == 1:
                rows += 1
                context += chunk.start
            else:
                prefill += chunk.length
        compute = self._cost.step(prefill, rows, context) * self._factor()
        transfers = plan.transfers
        if not transfers:
            return StepTiming(compute)
        return StepTiming(compute, self._copy(len(transfers.swap_out)), self._copy(len(transfers.swap_in)))

    def _copy(self, blocks: int) -> float:
        return (self._cost.swap_call + blocks * self._block) * self._factor() if blocks else 0.0

    def _factor(self) -> float:
        if not self._noise:
            return 1.0
        return self._rng.lognormvariate(-(self._noise**2) / 2, self._noise)


def make_request(job: Job) -> Request:
    """The job as the engine sees it: it ends by length, which the scheduler does not plan with."""
    if job.parents is not None:
        params = SamplingParams(
            max_tokens=job.output, ignore_eos=True, use_beam_search=True, n=job.width, temperature=0.0
        )
    else:
        params = SamplingParams(max_tokens=job.output, ignore_eos=True, n=job.width)
    return Request(job.name, list(job.prompt), params, arrival=job.arrival + 1e-9)


def outcomes_of(plan: StepPlan, jobs: dict[str, Job]) -> list[int | Candidates]:
    """What the model answers: tokens that tell siblings apart, and beams that go on as recorded."""
    answers: list[int | Candidates] = []
    for chunk in plan.chunks:
        if not chunk.samples:
            continue
        sequence = chunk.sequence
        if sequence.group is None:
            answers.append(1)
        elif jobs[sequence.request_id].parents is not None:
            answers.append(_candidates(sequence, jobs[sequence.request_id]))
        elif not sequence.group.forked:
            width = sequence.group.params.width
            answers.append(Candidates(tuple(range(1, width + 1)), (-1.0,) * width))
        else:
            answers.append(1 + sequence.number)
    return answers


def _candidates(sequence: Sequence, job: Job) -> Candidates:
    """Candidates with which the beam search chooses the recorded parents.

    The sum of beam ``i`` after ``t`` tokens is made to be ``-(t * width + i)``, exact in floating point, so a
    beam's own sum says which one it is. What must not go on is far less likely.
    """
    assert job.parents is not None
    width = job.width
    made = sequence.num_output_tokens
    beam = -int(sequence.logprob) - made * width
    parents = job.parents[made % len(job.parents)] if made else (0,) * width
    tokens = []
    logprobs = []
    for rank, parent in enumerate(parents):
        if parent == beam:
            tokens.append(1 + rank)
            logprobs.append(-float((made + 1) * width + rank) - sequence.logprob)
    for rank in range(width - len(tokens)):
        tokens.append(1 + width + rank)
        logprobs.append(-1e9)
    return Candidates(tuple(tokens), tuple(logprobs))


def simulate_paged(
    jobs: abc.Sequence[Job],
    scheduler: Scheduler,
    machine: Machine,
    meter: Meter,
    block_size: int = BLOCK_SIZE,
    sharing: SharingMeter | None = None,
    progress: Callable[[], object] = lambda: None,
) -> Result:
    """Run ``jobs`` (in order of arrival) through ``scheduler``, which is empty."""
    arrivals = deque(jobs)
    live: dict[str, Job] = {}
    now = 0.0
    while arrivals or live:
        if not live:
            now = max(now, arrivals[0].arrival)
        while arrivals and arrivals[0].arrival <= now:
            job = arrivals.popleft()
            live[job.name] = job
            scheduler.add(make_request(job))
        plan = scheduler.schedule()
        timing = machine.run(plan)
        seconds = timing.compute + timing.swap_out + timing.swap_in
        now += seconds
        stats = scheduler.stats()
        allocated = stats.referenced_blocks * block_size
        empty = 0  # only in last blocks, which nobody shares once their next token is planned
        for chunk in plan.chunks:
            empty += len(chunk.sequence.block_table) * block_size - chunk.start - chunk.length
        meter.step(
            seconds,
            tokens=allocated - empty,
            reserved=0,
            internal=empty,
            allocated=allocated,
            batch=len(plan.chunks),
            waiting=stats.waiting + stats.preempted > 0,
        )
        if sharing is not None:
            sharing.step(plan, seconds, stats.referenced_blocks)
        for delta in scheduler.commit(plan, outcomes_of(plan, live), timing):
            if delta.finish_reason is not None:
                job = live[delta.request_id]
                if job.width == 1 or delta.final:
                    del live[job.name]
                    meter.end(job, now)
                    if sharing is not None:
                        sharing.forget(job)
                    progress()
    stats = scheduler.stats()
    return meter.result(now, stats.preemptions, 100 * stats.prefix_hit_tokens / stats.prefix_query_tokens)
