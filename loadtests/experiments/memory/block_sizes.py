"""What the block size does to memory, batch and latency."""

from __future__ import annotations

from loadtests.experiments.memory.constants import (
    BLOCK_SIZE_JOBS,
    BLOCK_SIZE_RATE,
    BLOCK_SIZES,
    SATURATION_RATE,
    SEED,
    WORKLOADS,
)
from loadtests.experiments.memory.findings import Findings, Plot, Table, progress_bar, simulate
from loadtests.experiments.memory.jobs import make_jobs
from loadtests.experiments.memory.paged import PAGED, Memory
from loadtests.experiments.memory.saturation import filled
from loadtests.report import Figure


def run_block_sizes() -> Findings:
    """The paged scheduler with each block size: at saturation, and at one rate for its latency."""
    findings = Findings()
    rows = []
    shares: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {}
    latencies: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {}
    sizes = tuple(map(float, BLOCK_SIZES))
    total = 2 * len(BLOCK_SIZES) * sum(BLOCK_SIZE_JOBS[lengths.name] for lengths in WORKLOADS)
    with progress_bar("block sizes", total) as progress:
        for lengths in WORKLOADS:
            count, name = BLOCK_SIZE_JOBS[lengths.name], lengths.name
            full = make_jobs(lengths, SATURATION_RATE * lengths.published_rate, count, SEED)
            steady = make_jobs(lengths, BLOCK_SIZE_RATE[name], count, SEED)
            share, latency = [], []
            for size in BLOCK_SIZES:
                memory = Memory(block_size=size)
                result = simulate(PAGED, full, progress, memory=memory)
                slow = simulate(PAGED, steady, progress, saturated=False, memory=memory).latency
                share.append(result.token_share)
                latency.append(slow)
                rows.append(
                    (
                        name,
                        str(size),
                        f"{result.token_share:.2f}",
                        f"{filled(full, size):.2f}",
                        f"{result.batch:.2f}",
                        f"{slow:.4f}",
                        str(result.preemptions),
                    )
                )
                findings.figures.append(
                    Figure(f"{name}: tokens/allocated, block size {size}", result.token_share, " %")
                )
                findings.figures.append(Figure(f"{name}: average batch, block size {size}", result.batch))
                findings.figures.append(Figure(f"{name}: latency, block size {size}", slow, " s/token"))
            shares[name] = (sizes, tuple(share))
            latencies[name] = (sizes, tuple(latency))
    rates = ", ".join(f"{rate:g} on {name}" for name, rate in BLOCK_SIZE_RATE.items())
    findings.tables.append(
        Table(
            "Block sizes",
            ("lengths", "block size", "tokens/allocated %", "bound %", "batch", "s per token", "preemptions"),
            tuple(rows),
            f"latency at {rates} requests per second; small blocks make no step slower here",
        )
    )
    axis = "tokens in a block"
    findings.plots.append(
        Plot("blocks-tokens", "Allocated slots that hold a token", axis, "percent", shares, log_x=True)
    )
    findings.plots.append(
        Plot("blocks-latency", "Normalised latency", axis, "seconds per output token", latencies, log_x=True)
    )
    return findings
