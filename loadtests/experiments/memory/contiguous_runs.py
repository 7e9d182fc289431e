"""Paged against contiguous allocation: memory and batch at saturation."""

from __future__ import annotations

from collections.abc import Sequence

from loadtests.experiments.memory import constants as given
from loadtests.experiments.memory.constants import Lengths
from loadtests.experiments.memory.jobs import Job, make_jobs
from loadtests.experiments.memory.measure import Result
from loadtests.experiments.memory.systems import (
    MAX,
    ORACLE,
    ORACLE_FIRST_FIT,
    PAGED,
    SYSTEMS,
    simulate,
    watched,
)
from loadtests.report import Figure, Findings, Table

PARTS = ("tokens", "reserved", "internal", "external")
_NEAR = 5.0  # percentage points that a baseline's token share may be from the published one


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


def run_saturation() -> Findings:
    """All systems on both workloads, with requests arriving several times faster than any can serve."""
    findings = Findings()
    for lengths in given.WORKLOADS:
        name, rate = lengths.name, given.SATURATION_RATE * lengths.published_rate
        jobs = make_jobs(lengths, rate, given.SATURATION_JOBS[name], given.SEED)
        results = {system: simulate(system, jobs) for system in watched(f"saturation, {name}", SYSTEMS)}
        published = given.PUBLISHED_SPLIT if lengths is given.SHAREGPT else {}
        rows = []
        for system, result in results.items():
            shares, paper = result.split.percent(), published.get(system)
            batch = given.PUBLISHED_BATCH[name].get(system)
            parts = [f"{share:.1f}" for share in shares]
            if paper:
                parts = [f"{part} ({of:.1f})" for part, of in zip(parts, paper, strict=True)]
            average = f"{result.batch:.2f}" + (f" ({batch:.2f})" if batch else "")
            rest = (f"{result.token_share:.1f}", average, f"{result.throughput:.2f}", str(result.preemptions))
            rows.append((system, *parts, *rest))
            if paper and system != PAGED:
                points = f"{name}: tokens, {system}, points from the published"
                findings.figures.append(Figure(points, abs(shares[0] - paper[0]), "", _NEAR, True))
        header = ("system", *PARTS, "tokens/allocated", "average batch", "req/s", "preemptions")
        note = f"published batches are at {lengths.published_rate:g} requests per second"
        findings.tables.append(
            Table(f"Memory of {name} at saturation, percent (published)", header, tuple(rows), note)
        )
        findings.figures += _saturation_figures(lengths, jobs, results)
    return findings


def _saturation_figures(lengths: Lengths, jobs: Sequence[Job], results: dict[str, Result]) -> list[Figure]:
    name, paged, bound = lengths.name, results[PAGED], filled(jobs, given.BLOCK_SIZE)
    long = lengths is given.SHAREGPT
    figures = [
        Figure(f"{name}: tokens/allocated", paged.token_share, " %", 96.0 if long else None),
        Figure(
            f"{name}: tokens/allocated, of the bound of blocks of 16",
            100 * paged.token_share / bound,
            " %",
            99.0,
        ),
    ]
    for system, bar in ((ORACLE, 2.2), (ORACLE_FIRST_FIT, 1.7), (MAX, 4.3)):
        ratio = paged.batch / results[system].batch
        figures.append(Figure(f"{name}: average batch over {system}", ratio, "x", bar if long else None))
    return figures
