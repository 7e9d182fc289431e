"""How long requests take as more of them come: normalised latency against request rate."""

from __future__ import annotations

from loadtests.experiments.memory.constants import (
    CURVE_SECONDS,
    LATENCY_LIMIT,
    PUBLISHED_BATCH,
    PUBLISHED_RATE_GAIN,
    SEED,
    SHAREGPT,
    WORKLOADS,
    Lengths,
)
from loadtests.experiments.memory.findings import SYSTEMS, Findings, Plot, Table, progress_bar, simulate
from loadtests.experiments.memory.jobs import make_jobs
from loadtests.experiments.memory.paged import PAGED
from loadtests.report import Figure


def run_latency() -> Findings:
    """All systems at each rate; the same requests for all systems."""
    findings = Findings()
    total = len(SYSTEMS) * sum(_count(lengths, rate) for lengths in WORKLOADS for rate in lengths.rates)
    with progress_bar("latency", total) as progress:
        for lengths in WORKLOADS:
            curves: dict[str, list[float]] = {system: [] for system in SYSTEMS}
            batches: dict[str, float] = {}
            for rate in lengths.rates:
                jobs = make_jobs(lengths, rate, _count(lengths, rate), SEED)
                for system in SYSTEMS:
                    result = simulate(system, jobs, progress, saturated=False)
                    curves[system].append(result.latency)
                    if rate == lengths.published_rate:
                        batches[system] = result.batch
            _describe(findings, lengths, curves)
            _describe_batches(findings, lengths, batches)
    return findings


def _count(lengths: Lengths, rate: float) -> int:
    return round(rate * CURVE_SECONDS[lengths.name])


def sustained(rates: tuple[float, ...], latencies: list[float], limit: float) -> float:
    """Highest rate with a latency up to ``limit``, linear between the measured ones; 0 if there is none."""
    if latencies[0] > limit:
        return 0.0
    for i in range(1, len(rates)):
        if latencies[i] > limit:
            part = (limit - latencies[i - 1]) / (latencies[i] - latencies[i - 1])
            return rates[i - 1] + part * (rates[i] - rates[i - 1])
    return rates[-1]


def _describe(findings: Findings, lengths: Lengths, curves: dict[str, list[float]]) -> None:
    name, rates = lengths.name, lengths.rates
    limit = LATENCY_LIMIT
    reached = {system: sustained(rates, curve, limit) for system, curve in curves.items()}
    findings.tables.append(
        Table(
            f"Normalised latency of {name}, seconds per output token, by requests per second",
            ("system", *(f"{rate:g}" for rate in rates), f"rate at {limit:g} s"),
            tuple(
                (system, *(f"{latency:.3f}" for latency in curve), f"{reached[system]:.2f}")
                for system, curve in curves.items()
            ),
        )
    )
    findings.plots.append(
        Plot(
            f"latency-{name.replace('/', '-')}",
            f"Normalised latency, lengths {name}",
            "requests per second",
            "seconds per output token",
            {system: (rates, tuple(curve)) for system, curve in curves.items()},
            y_max=5 * limit,
        )
    )
    for system in SYSTEMS:
        findings.figures.append(
            Figure(f"{name}: rate at {limit:g} s per token, {system}", reached[system], " req/s")
        )
    for system, published in PUBLISHED_RATE_GAIN.items():
        if not reached[system]:
            continue
        gain = reached[PAGED] / reached[system]
        note = f" (published: {published})" if lengths is SHAREGPT else ""
        findings.figures.append(Figure(f"{name}: rate over {system} at that latency{note}", gain, "x"))


def _describe_batches(findings: Findings, lengths: Lengths, batches: dict[str, float]) -> None:
    published = PUBLISHED_BATCH[lengths.name]
    rate = lengths.published_rate
    findings.tables.append(
        Table(
            f"Average batch of {lengths.name} at {rate:g} requests per second",
            ("system", "batch", "published"),
            tuple(
                (system, f"{batch:.2f}", f"{published[system]:.2f}" if system in published else "")
                for system, batch in batches.items()
            ),
        )
    )
    for system, batch in batches.items():
        findings.figures.append(Figure(f"{lengths.name}: average batch at {rate:g} req/s, {system}", batch))
