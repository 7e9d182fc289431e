"""Recorded traffic: where its memory goes, and what its shared prefixes save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from loadtests.experiments.memory.constants import BLOCK_SIZE, TRACE_JOBS
from loadtests.experiments.memory.findings import SYSTEMS, Findings, Table, progress_bar, simulate
from loadtests.experiments.memory.jobs import Job
from loadtests.experiments.memory.paged import PAGED
from loadtests.experiments.memory.traces import read_trace
from loadtests.report import Figure


def possible_hits(jobs: Sequence[Job], block_size: int) -> float:
    """Percent of prompt tokens in whole blocks that an earlier prompt began with, were every block kept."""
    seen: dict[tuple[int, tuple[int, ...]], int] = {}
    hits = tokens = 0
    for job in jobs:
        tokens += len(job.prompt)
        parent, hit = 0, True
        for start in range(0, len(job.prompt) - block_size + 1, block_size):
            key = (parent, job.prompt[start : start + block_size])
            hit = hit and key in seen and start + block_size < len(job.prompt)
            hits += hit * block_size
            parent = seen.setdefault(key, len(seen) + 1)
    return 100 * hits / tokens


def run_trace(path: Path) -> Findings:
    """All systems on the beginning of a trace, at its own arrival times.

    Raises:
        TraceError: the file cannot be read.
    """
    trace = read_trace(path, TRACE_JOBS)
    findings = Findings()
    rows = []
    count = len(trace.jobs)
    with progress_bar(trace.name, len(SYSTEMS) * count) as progress:
        for system in SYSTEMS:
            result = simulate(system, trace.jobs, progress, saturated=False)
            rows.append(
                (
                    system,
                    *(f"{share:.1f}" for share in result.split.percent()),
                    f"{result.token_share:.1f}",
                    f"{result.batch:.2f}",
                    f"{result.latency:.3f}",
                    f"{count / result.seconds:.2f}",
                    f"{result.hits:.1f}",
                )
            )
            findings.figures.append(
                Figure(f"{trace.name}: tokens/allocated, {system}", result.token_share, " %")
            )
            if system == PAGED:
                findings.figures.append(Figure(f"{trace.name}: prompt tokens cached", result.hits, " %"))
            findings.figures.append(Figure(f"{trace.name}: average batch, {system}", result.batch))
            findings.figures.append(Figure(f"{trace.name}: latency, {system}", result.latency, " s/token"))
    prompt = sum(len(job.prompt) for job in trace.jobs) / count
    output = sum(job.output for job in trace.jobs) / count
    findings.tables.append(
        Table(
            f"{trace.name}: {count} requests at {trace.rate:.2f} per second",
            (
                "system",
                "tokens %",
                "reserved %",
                "internal %",
                "external %",
                "tokens/allocated %",
                "batch",
                "s per token",
                "req/s",
                "prompt hits %",
            ),
            tuple(rows),
            f"lengths divided by {trace.factor}, then {trace.clipped} prompts cut, to fit 2,048 tokens; means "
            f"{prompt:.0f} and {output:.0f}; averages over the whole run; "
            f"a cache without end would hit {possible_hits(trace.jobs, BLOCK_SIZE):.1f} %",
        )
    )
    return findings
