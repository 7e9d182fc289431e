"""``python -m loadtests.memory``: how well KV memory is used, in simulated time.

The real scheduler, block pool and prefix index, with a model that only takes time, against contiguous
allocation: Orca with three ways to reserve, by the buddy allocator as published and by first fit. Every
assumption is in ``loadtests/experiments/memory/constants.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import TypeVar

from tqdm import tqdm

from engine.scheduling.recovery import Rates, RecoveryMode
from loadtests.experiments.memory import constants as given
from loadtests.experiments.memory.allocators import BuddyAllocator, FirstFitAllocator
from loadtests.experiments.memory.constants import RecoveryLoad, Truth
from loadtests.experiments.memory.contiguous import Reservation, simulate_contiguous
from loadtests.experiments.memory.jobs import Job, make_jobs
from loadtests.experiments.memory.measure import Meter, Result
from loadtests.experiments.memory.paged import paged_config, simulate_paged
from loadtests.experiments.memory.sharing import SharingMeter
from loadtests.experiments.simulated_replica import SimulatedReplica, StepCost
from loadtests.report import Figure, finish, most, parse, print_figures

Case = TypeVar("Case")

PAGED = "paged"
MAX, POW2, ORACLE = (reservation.value for reservation in Reservation)
ORACLE_FIRST_FIT = f"{ORACLE}, first fit"
CONTIGUOUS: dict[str, tuple[Reservation, type[BuddyAllocator | FirstFitAllocator]]] = {
    MAX: (Reservation.MAX, BuddyAllocator),
    POW2: (Reservation.POW2, BuddyAllocator),
    ORACLE: (Reservation.ORACLE, BuddyAllocator),
    f"{POW2}, first fit": (Reservation.POW2, FirstFitAllocator),
    ORACLE_FIRST_FIT: (Reservation.ORACLE, FirstFitAllocator),
}
"""The first three are the published baselines, whose allocator is the buddy allocator."""
SYSTEMS = (*CONTIGUOUS, PAGED)
MACHINES = {"GPU-like": given.GPU_LIKE, "CPU-like": given.CPU_LIKE}

NEAR = 5.0  # percentage points that a baseline's token share may be from the published one
SHARING_BAR = 99.0  # percent of what perfect sharing saves
RECOVERY_BAR = 1.05  # of the better of swap and recompute


def simulate(system: str, jobs: Sequence[Job]) -> Result:
    """Run one of ``SYSTEMS`` on the GPU-like machine, saturated; a tenth of the requests warms it up."""
    meter = Meter(len(jobs) // 10, saturated=True)
    if system == PAGED:
        return simulate_paged(jobs, SimulatedReplica(paged_config()), meter)
    reservation, allocator = CONTIGUOUS[system]
    return simulate_contiguous(jobs, reservation, allocator(given.POOL_SLOTS), given.GPU_LIKE, meter)


def filled(jobs: Sequence[Job], block_size: int) -> float:
    """Percent of the slots of allocated blocks that hold tokens if only last blocks are ever in part empty.

    Averaged over the time that requests spend in memory, one step for each token of output. This is the bound
    that the block size sets: no paged allocator without sharing can do better.
    """
    tokens = slots = 0
    for job in jobs:
        first = len(job.prompt)
        tokens += job.output * first + job.output * (job.output - 1) // 2
        slots += sum(-(-stored // block_size) for stored in range(first, first + job.output)) * block_size
    return 100 * tokens / slots


def saturation() -> list[Figure]:
    """All systems on both workloads, with requests arriving several times faster than any can serve."""
    figures = []
    for lengths in given.WORKLOADS:
        name, rate = lengths.name, given.SATURATION_RATE * lengths.published_rate
        long = lengths is given.SHAREGPT
        jobs = make_jobs(lengths, rate, given.SATURATION_JOBS[name], given.SEED)
        results = {system: simulate(system, jobs) for system in _watched(f"saturation, {name}", SYSTEMS)}
        for system, result in results.items():
            shares = result.split.percent()
            figures.append(Figure(f"{name}: average batch, {system}", result.batch))
            for part, share in zip(("tokens", "reserved", "internal", "external"), shares, strict=True):
                figures.append(Figure(f"{name}: memory, {part}, {system}", share, "%"))
            if long and system in given.PUBLISHED_TOKENS:
                points = f"{name}: tokens, {system}, points from the published"
                figures.append(most(points, abs(shares[0] - given.PUBLISHED_TOKENS[system]), NEAR))
        paged, bound = results[PAGED], filled(jobs, given.BLOCK_SIZE)
        of_bound = 100 * paged.token_share / bound
        figures += [
            Figure(f"{name}: tokens/allocated", paged.token_share, "%", 96.0 if long else None),
            Figure(f"{name}: tokens/allocated, of the bound of blocks of 16", of_bound, "%", 99.0),
        ]
        for system, bar in ((ORACLE, 2.2), (ORACLE_FIRST_FIT, 1.7), (MAX, 4.3)):
            ratio = paged.batch / results[system].batch
            figures.append(Figure(f"{name}: average batch over {system}", ratio, "x", bar if long else None))
    return figures


def parallel() -> list[Figure]:
    figures = []
    for lengths, width in _watched("parallel", list(product(given.WORKLOADS, given.WIDTHS))):
        rate = given.SHARING_SEQUENCE_RATE[lengths.name] / width
        jobs = make_jobs(lengths, rate, given.SHARING_JOBS[lengths.name], given.SEED, width=width)
        figures += _sharing(f"{lengths.name}: parallel, {width}", _run_shared(jobs)[0])
    return figures


def _run_shared(jobs: list[Job], prefix: int = 0) -> tuple[SharingMeter, Result]:
    """The paged scheduler on ``jobs``, at saturation where they share a prefix."""
    sharing = SharingMeter({job.name: job for job in jobs}, given.BLOCK_SIZE, prefix)
    meter = Meter(len(jobs) // 10, saturated=prefix > 0)
    return sharing, simulate_paged(jobs, SimulatedReplica(paged_config()), meter, sharing)


def _sharing(name: str, meter: SharingMeter) -> list[Figure]:
    return [
        Figure(f"{name}: blocks saved", meter.saved, "%"),
        Figure(f"{name}: of perfect sharing", 100 * meter.saved / meter.possible, "%", SHARING_BAR),
    ]


def prefix() -> list[Figure]:
    """Prompts that begin with the same 80 or 341 tokens, at saturation, next to Orca (Oracle)."""
    figures = []
    for tokens in _watched("shared prefixes", given.SHARED_PREFIXES):
        jobs = make_jobs(given.TRANSLATION, given.PREFIX_RATE, given.PREFIX_JOBS, given.SEED, prefix=tokens)
        meter, result = _run_shared(jobs, tokens)
        name = f"shared prefix of {tokens}"
        figures += _sharing(name, meter)
        for system in (ORACLE, ORACLE_FIRST_FIT):
            gain = result.throughput / simulate(system, jobs).throughput
            figures.append(Figure(f"{name}: throughput over {system}", gain, "x"))
    return figures


def recovery() -> list[Figure]:
    """Every load on every machine in each of the three modes; what counts is the time until all is done."""
    figures = []
    for machine, told in MACHINES.items():
        for truth, load in _watched(machine, list(product(given.TRUTHS, given.RECOVERY_LOADS))):
            seconds = {mode: run_mode(load, told, truth, mode).seconds for mode in RecoveryMode}
            auto = seconds.pop(RecoveryMode.AUTO) / min(seconds.values())
            name = f"{machine}, {truth.name}, {load.name}: auto over the better of swap and recompute"
            figures.append(Figure(name, auto, "x"))
    worst = max(figure.value for figure in figures)
    return [*figures, most("auto over the better of swap and recompute, worst", worst, RECOVERY_BAR, "x")]


def run_mode(load: RecoveryLoad, told: StepCost, truth: Truth, mode: RecoveryMode) -> Result:
    """One run; the policy starts with the rates of ``told``, the machine has those of ``truth``."""
    options = {"prefix": load.prefix, "width": load.width}
    jobs = make_jobs(load.lengths, given.RECOVERY_RATE, load.requests, given.SEED, **options)
    copies = 1 / told.swapped_block
    config = replace(
        paged_config(load.slots, cost=told.scaled(truth.prefill, truth.copy)),
        host_blocks=given.HOST_SHARE * load.slots // given.BLOCK_SIZE,
        recovery=mode,
        rates=Rates(prefill=1 / told.prefill_token, swap_out=copies, swap_in=copies),
        noise=given.RECOVERY_NOISE,
        seed=given.SEED,
    )
    return simulate_paged(jobs, SimulatedReplica(config), Meter(slots=load.slots))


def _watched(name: str, cases: Sequence[Case]) -> Iterable[Case]:
    """The cases, with a progress bar where somebody watches."""
    return tqdm(cases, desc=name, unit="case", disable=None)


PARTS: dict[str, Callable[[], list[Figure]]] = {
    part.__name__: part for part in (saturation, parallel, prefix, recovery)
}


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse("memory", __doc__, {"--only": (PARTS, "parts")}, argv)
    figures: list[Figure] = []
    for name in arguments.only:
        found = PARTS[name]()
        print_figures(name, found)
        figures += found
    finish("loadtests.memory", figures, arguments)
