"""The real scheduler, block pool and prefix index, with a model that only takes (simulated) time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from engine.recovery import RecomputeRecovery, RecoveryPolicy
from engine.request import ModelLimits, Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.step_plan import StepPlan
from loadtests.memory_experiment.constants import (
    BLOCK_SIZE,
    MAX_LENGTH,
    MAX_NUM_SEQS,
    POOL_SLOTS,
    TOKEN_BUDGET,
    StepCost,
)
from loadtests.memory_experiment.jobs import VOCABULARY, Job
from loadtests.memory_experiment.measure import Meter, Result

SYSTEM = "paged"
_TOKEN = 1  # what the simulated model always answers


def make_scheduler(
    *,
    slots: int = POOL_SLOTS,
    block_size: int = BLOCK_SIZE,
    max_length: int = MAX_LENGTH,
    prefix_caching: bool = True,
    recovery: RecoveryPolicy | None = None,
) -> Scheduler:
    """A scheduler over a pool of ``slots`` tokens, as the engine makes one."""
    num_blocks = slots // block_size
    return Scheduler.create(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=MAX_NUM_SEQS,
        token_budget=TOKEN_BUDGET,
        prefix_caching=prefix_caching,
        eos_token_ids=(),
        model_key=(),
        limits=ModelLimits(VOCABULARY, max_length, num_blocks, block_size),
        recovery=recovery or RecomputeRecovery(),
    )


def make_request(job: Job) -> Request:
    """The job as the engine sees it: it ends by length, which the scheduler does not plan with."""
    params = SamplingParams(max_tokens=job.output, ignore_eos=True)
    return Request(job.name, list(job.prompt), params, arrival=job.arrival + 1e-9)


def work_of(plan: StepPlan) -> tuple[int, int, int]:
    """Prompt tokens, decodes, and KV tokens that the decodes read."""
    prefill = rows = context = 0
    for chunk in plan.chunks:
        if chunk.length == 1:
            rows += 1
            context += chunk.start
        else:
            prefill += chunk.length
    return prefill, rows, context


def simulate_paged(
    jobs: Sequence[Job],
    scheduler: Scheduler,
    cost: StepCost,
    meter: Meter,
    block_size: int = BLOCK_SIZE,
    progress: Callable[[], None] = lambda: None,
) -> Result:
    """Run single-sequence ``jobs`` (in order of arrival) through ``scheduler``."""
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
        seconds = cost.step(*work_of(plan))
        now += seconds
        stats = scheduler.stats()
        allocated = stats.referenced_blocks * block_size
        tokens = sum(chunk.request.computed + chunk.length for chunk in plan.chunks)
        meter.step(
            seconds,
            tokens=tokens,
            reserved=0,
            internal=allocated - tokens,
            allocated=allocated,
            batch=len(plan.chunks),
            waiting=stats.waiting + stats.preempted > 0,
        )
        for delta in scheduler.commit(plan, [_TOKEN] * sum(chunk.samples for chunk in plan.chunks)):
            if delta.finish_reason is not None:
                meter.end(live.pop(delta.request_id), now)
                progress()
    return meter.result(now, scheduler.stats().preemptions)
