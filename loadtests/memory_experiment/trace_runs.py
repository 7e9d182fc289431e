"""Recorded traffic: where its memory goes, and what its shared prefixes save."""

from __future__ import annotations

from pathlib import Path

from loadtests.memory_experiment.constants import TRACE_JOBS
from loadtests.memory_experiment.findings import SYSTEMS, Findings, Table, progress_bar, simulate
from loadtests.memory_experiment.traces import read_trace
from loadtests.report import Figure


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
                )
            )
            findings.figures.append(
                Figure(f"{trace.name}: tokens/allocated, {system}", result.token_share, " %")
            )
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
            ),
            tuple(rows),
            f"lengths divided by {trace.factor}, then {trace.clipped} prompts cut, to fit 2,048 tokens; means "
            f"{prompt:.0f} and {output:.0f}; averages over the whole run",
        )
    )
    return findings
