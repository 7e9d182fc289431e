"""Where the memory goes and how many requests run while more requests wait."""

from __future__ import annotations

from collections.abc import Sequence

from loadtests.experiments.memory.constants import (
    ALPACA,
    BLOCK_SIZE,
    PUBLISHED_BATCH,
    PUBLISHED_SPLIT,
    SATURATION_JOBS,
    SATURATION_RATE,
    SEED,
    SHAREGPT,
    WORKLOADS,
    Lengths,
)
from loadtests.experiments.memory.contiguous import Reservation
from loadtests.experiments.memory.findings import SYSTEMS, Findings, Plot, Table, progress_bar, simulate
from loadtests.experiments.memory.jobs import Job, make_jobs
from loadtests.experiments.memory.measure import Result
from loadtests.experiments.memory.paged import PAGED
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
    total = len(SYSTEMS) * sum(SATURATION_JOBS[lengths.name] for lengths in WORKLOADS)
    with progress_bar("saturation", total) as progress:
        for lengths in WORKLOADS:
            rate = SATURATION_RATE * lengths.published_rate
            jobs = make_jobs(lengths, rate, SATURATION_JOBS[lengths.name], SEED)
            results = {system: simulate(system, jobs, progress) for system in SYSTEMS}
            _describe(findings, lengths, jobs, results)
    return findings


def _describe(findings: Findings, lengths: Lengths, jobs: Sequence[Job], results: dict[str, Result]) -> None:
    name = lengths.name
    published = PUBLISHED_SPLIT if lengths is SHAREGPT else {}
    rows = []
    for system, result in results.items():
        shares = result.split.percent()
        paper = published.get(system)
        batch = PUBLISHED_BATCH[name].get(system)
        rows.append(
            (
                system,
                *(f"{share:.1f}" + (f" ({paper[i]:.1f})" if paper else "") for i, share in enumerate(shares)),
                f"{result.token_share:.1f}",
                f"{result.batch:.2f}" + (f" ({batch:.2f})" if batch else ""),
                f"{result.throughput:.2f}",
                str(result.preemptions),
            )
        )
        for part, share in zip(PARTS, shares, strict=True):
            findings.figures.append(_split_figure(name, system, part, share, paper))
        findings.figures.append(Figure(f"{name}: average batch, {system}", result.batch))
        findings.figures.append(Figure(f"{name}: throughput, {system}", result.throughput, " req/s"))
    findings.tables.append(
        Table(
            f"Memory of {name} at saturation, percent (published)",
            ("system", *PARTS, "tokens/allocated", "average batch", "req/s", "preemptions"),
            tuple(rows),
            f"published batches are at {lengths.published_rate:g} requests per second",
        )
    )
    bars = {
        part: (tuple(map(float, range(len(SYSTEMS)))), tuple(results[s].split.percent()[i] for s in SYSTEMS))
        for i, part in enumerate(PARTS)
    }
    findings.plots.append(
        Plot(
            f"memory-{name.replace('/', '-')}",
            f"KV memory while requests wait, lengths {name}",
            "",
            "percent of KV memory",
            bars,
            SYSTEMS,
            y_max=100,
        )
    )
    _add_bars(findings, lengths, jobs, results)


def _split_figure(
    workload: str, system: str, part: str, share: float, paper: tuple[float, ...] | None
) -> Figure:
    figure = Figure(f"{workload}: {part}, {system}", share, " %")
    if part == PARTS[0] and paper is not None and system != PAGED:
        distance = abs(share - paper[0])
        return Figure(f"{workload}: {part}, {system}, points from the published", distance, "", _NEAR, True)
    return figure


def _add_bars(findings: Findings, lengths: Lengths, jobs: Sequence[Job], results: dict[str, Result]) -> None:
    name, paged = lengths.name, results[PAGED]
    bound = filled(jobs, BLOCK_SIZE)
    findings.figures.append(
        Figure(f"{name}: bound of block size {BLOCK_SIZE} on tokens/allocated", bound, " %")
    )
    if lengths is SHAREGPT:
        findings.figures.append(Figure(f"{name}: tokens/allocated", paged.token_share, " %", 96.0))
    else:
        findings.figures.append(Figure(f"{name}: tokens/allocated", paged.token_share, " %"))
    if lengths is ALPACA:
        share = 100 * paged.token_share / bound
        findings.figures.append(Figure(f"{name}: tokens/allocated, of the bound", share, " %", 99.0))
    for reservation, bar in ((Reservation.ORACLE, 2.2), (Reservation.MAX, 4.3)):
        ratio = paged.batch / results[reservation.value].batch
        findings.figures.append(
            Figure(
                f"{name}: average batch over {reservation.value}",
                ratio,
                "x",
                bar if lengths is SHAREGPT else None,
            )
        )
