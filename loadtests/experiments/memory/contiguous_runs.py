"""Paged against contiguous allocation: memory and batch at saturation, and for a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadtests.experiments.memory.constants import (
    BLOCK_SIZE,
    PUBLISHED_BATCH,
    PUBLISHED_SPLIT,
    SATURATION_JOBS,
    SATURATION_RATE,
    SEED,
    SHAREGPT,
    TRACE_JOBS,
    WORKLOADS,
    Lengths,
)
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
from loadtests.experiments.memory.traces import read_trace
from loadtests.findings import Findings, Table
from loadtests.report import Figure

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
    for lengths in WORKLOADS:
        name, rate = lengths.name, SATURATION_RATE * lengths.published_rate
        jobs = make_jobs(lengths, rate, SATURATION_JOBS[name], SEED)
        results = {system: simulate(system, jobs) for system in watched(f"saturation, {name}", SYSTEMS)}
        published = PUBLISHED_SPLIT if lengths is SHAREGPT else {}
        rows = []
        for system, result in results.items():
            shares, paper = result.split.percent(), published.get(system)
            batch = PUBLISHED_BATCH[name].get(system)
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
    name, paged, bound = lengths.name, results[PAGED], filled(jobs, BLOCK_SIZE)
    long = lengths is SHAREGPT
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


def run_trace(path: Path) -> Findings:
    """All systems on the beginning of a trace, at its own arrival times.

    Raises:
        TraceError: the file cannot be read.
    """
    trace = read_trace(path, TRACE_JOBS)
    findings = Findings()
    rows, count = [], len(trace.jobs)
    for system in watched(trace.name, SYSTEMS):
        result = simulate(system, trace.jobs, saturated=False)
        shares = (f"{share:.1f}" for share in (*result.split.percent(), result.token_share))
        rates = (f"{result.batch:.2f}", f"{result.latency:.3f}", f"{count / result.seconds:.2f}")
        rows.append((system, *shares, *rates, f"{result.hits:.1f}"))
        findings.figures.append(Figure(f"{trace.name}: average batch, {system}", result.batch))
    prompt = sum(len(job.prompt) for job in trace.jobs) / count
    output = sum(job.output for job in trace.jobs) / count
    note = (
        f"lengths divided by {trace.factor}, then {trace.clipped} prompts cut, to fit 2,048 tokens; means "
        f"{prompt:.0f} and {output:.0f}; averages over the whole run"
    )
    percent = (*(f"{part} %" for part in PARTS), "tokens/allocated %")
    header = ("system", *percent, "batch", "s per token", "req/s", "prompt hits %")
    title = f"{trace.name}: {count} requests at {trace.rate:.2f} per second"
    findings.tables.append(Table(title, header, tuple(rows), note))
    return findings
