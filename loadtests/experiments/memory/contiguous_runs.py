"""Paged against contiguous allocation: memory and batch at saturation, latency by rate, block sizes, traces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from loadtests.experiments.memory.constants import (
    BLOCK_SIZE,
    BLOCK_SIZE_JOBS,
    BLOCK_SIZE_RATE,
    BLOCK_SIZES,
    CURVE_SECONDS,
    LATENCY_LIMIT,
    PUBLISHED_BATCH,
    PUBLISHED_RATE_GAIN,
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
from loadtests.findings import Findings, Plot, Table
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
            rows.append(
                (
                    system,
                    *(
                        f"{share:.1f}" + (f" ({paper[i]:.1f})" if paper else "")
                        for i, share in enumerate(shares)
                    ),
                    f"{result.token_share:.1f}",
                    f"{result.batch:.2f}" + (f" ({batch:.2f})" if batch else ""),
                    f"{result.throughput:.2f}",
                    str(result.preemptions),
                )
            )
            if paper and system != PAGED:
                points = f"{name}: tokens, {system}, points from the published"
                findings.figures.append(Figure(points, abs(shares[0] - paper[0]), "", _NEAR, True))
        header = ("system", *PARTS, "tokens/allocated", "average batch", "req/s", "preemptions")
        note = f"published batches are at {lengths.published_rate:g} requests per second"
        findings.tables.append(
            Table(f"Memory of {name} at saturation, percent (published)", header, tuple(rows), note)
        )
        if lengths is SHAREGPT:
            places = tuple(map(float, range(len(SYSTEMS))))
            bars = {
                part: (places, tuple(results[system].split.percent()[i] for system in SYSTEMS))
                for i, part in enumerate(PARTS)
            }
            title = f"KV memory while requests wait, lengths {name}"
            findings.plots.append(
                Plot("memory-161-338", title, "", "percent of KV memory", bars, SYSTEMS, y_max=100)
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


def run_latency() -> Findings:
    """Normalised latency of all systems at each rate; the same requests for all systems."""
    findings = Findings()
    for lengths in WORKLOADS:
        name, rates = lengths.name, lengths.rates
        curves: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        batches = []
        for rate in watched(f"latency, {name}", rates):
            jobs = make_jobs(lengths, rate, round(rate * CURVE_SECONDS[name]), SEED)
            results = {system: simulate(system, jobs, saturated=False) for system in SYSTEMS}
            for system, result in results.items():
                curves[system].append(result.latency)
            if rate == lengths.published_rate:
                paper = PUBLISHED_BATCH[name]
                batches = [
                    (system, f"{result.batch:.2f}", f"{paper[system]:.2f}" if system in paper else "")
                    for system, result in results.items()
                ]
        reached = {system: sustained(rates, curve, LATENCY_LIMIT) for system, curve in curves.items()}
        rows = [
            (system, *(f"{latency:.3f}" for latency in curve), f"{reached[system]:.2f}")
            for system, curve in curves.items()
        ]
        title = f"Normalised latency of {name}, seconds per output token, by requests per second"
        header = ("system", *(f"{rate:g}" for rate in rates), f"rate at {LATENCY_LIMIT:g} s")
        findings.tables.append(Table(title, header, tuple(rows)))
        title = f"Average batch of {name} at {lengths.published_rate:g} requests per second"
        findings.tables.append(Table(title, ("system", "batch", "published"), tuple(batches)))
        if lengths is SHAREGPT:
            series = {system: (rates, tuple(curve)) for system, curve in curves.items()}
            labels = ("requests per second", "seconds per output token")
            title = f"Normalised latency, lengths {name}"
            findings.plots.append(Plot("latency-161-338", title, *labels, series, y_max=5 * LATENCY_LIMIT))
        for system in (MAX, ORACLE, ORACLE_FIRST_FIT):
            published = PUBLISHED_RATE_GAIN.get(system) if lengths is SHAREGPT else None
            note = f" (published: {published})" if published else ""
            gain = reached[PAGED] / reached[system]
            findings.figures.append(Figure(f"{name}: rate over {system} at the same latency{note}", gain, "x"))
    return findings


def sustained(rates: Sequence[float], latencies: Sequence[float], limit: float) -> float:
    """Highest rate with a latency up to ``limit``, linear between the measured ones; 0 if there is none."""
    if latencies[0] > limit:
        return 0.0
    for i in range(1, len(rates)):
        if latencies[i] > limit:
            part = (limit - latencies[i - 1]) / (latencies[i] - latencies[i - 1])
            return rates[i - 1] + part * (rates[i] - rates[i - 1])
    return rates[-1]


def run_block_sizes() -> Findings:
    """The paged scheduler with each block size: at saturation, and at one rate for its latency."""
    rows = []
    shares: dict[str, list[float]] = {lengths.name: [] for lengths in WORKLOADS}
    for lengths, size in watched("block sizes", list(product(WORKLOADS, BLOCK_SIZES))):
        name, count = lengths.name, BLOCK_SIZE_JOBS[lengths.name]
        full = make_jobs(lengths, SATURATION_RATE * lengths.published_rate, count, SEED)
        steady = make_jobs(lengths, BLOCK_SIZE_RATE[name], count, SEED)
        result = simulate(PAGED, full, block_size=size)
        latency = simulate(PAGED, steady, saturated=False, block_size=size).latency
        shares[name].append(result.token_share)
        figures = (f"{result.token_share:.2f}", f"{filled(full, size):.2f}", f"{result.batch:.2f}")
        rows.append((name, str(size), *figures, f"{latency:.4f}", str(result.preemptions)))
    sizes = tuple(map(float, BLOCK_SIZES))
    series = {name: (sizes, tuple(share)) for name, share in shares.items()}
    rates = ", ".join(f"{rate:g} on {name}" for name, rate in BLOCK_SIZE_RATE.items())
    note = f"latency at {rates} requests per second; small blocks make no step slower here"
    header = ("lengths", "block size", "tokens/allocated %", "bound %", "batch", "s per token", "preemptions")
    title = "Allocated slots that hold a token"
    plot = Plot("blocks-tokens", title, "tokens in a block", "percent", series, log_x=True)
    return Findings([Table("Block sizes", header, tuple(rows), note)], plots=[plot])


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
        f"{prompt:.0f} and {output:.0f}; averages over the whole run; "
        f"a cache without end would hit {possible_hits(trace.jobs, BLOCK_SIZE):.1f} %"
    )
    percent = (*(f"{part} %" for part in PARTS), "tokens/allocated %")
    header = ("system", *percent, "batch", "s per token", "req/s", "prompt hits %")
    title = f"{trace.name}: {count} requests at {trace.rate:.2f} per second"
    findings.tables.append(Table(title, header, tuple(rows), note))
    return findings
