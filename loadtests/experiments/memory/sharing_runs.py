"""Memory saved by parallel sampling and beam search, next to perfect sharing; what shared prefixes bring."""

from __future__ import annotations

from collections.abc import Callable

from loadtests.experiments.memory.beams import load_parents
from loadtests.experiments.memory.constants import (
    BLOCK_SIZE,
    GPU_LIKE,
    PREFIX_JOBS,
    PREFIX_RATE,
    PUBLISHED_PREFIX_GAIN,
    PUBLISHED_SAVING,
    SEED,
    SHARED_PREFIXES,
    SHARING_JOBS,
    SHARING_SEQUENCE_RATE,
    TRANSLATION,
    WIDTHS,
    WORKLOADS,
    Lengths,
)
from loadtests.experiments.memory.contiguous import Reservation
from loadtests.experiments.memory.findings import Findings, Plot, Table, progress_bar, simulate
from loadtests.experiments.memory.jobs import Job, make_jobs
from loadtests.experiments.memory.measure import Meter, Result
from loadtests.experiments.memory.paged import PAGED, Machine, Memory, simulate_paged
from loadtests.experiments.memory.sharing import SharingMeter
from loadtests.report import Figure

_BAR = 99.0  # percent of what perfect sharing saves


def run_parallel() -> Findings:
    """Requests for 2, 4 and 6 samples."""
    return _run_families("parallel", "Parallel sampling")


def run_beam() -> Findings:
    """Requests for 2, 4 and 6 beams, which go on from one another as recorded."""
    return _run_families("beam", "Beam search")


def _run_families(kind: str, title: str) -> Findings:
    findings = Findings()
    rows = []
    series: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {}
    with progress_bar(title.lower(), len(WIDTHS) * sum(SHARING_JOBS.values())) as progress:
        for lengths in WORKLOADS:
            saved = []
            published = PUBLISHED_SAVING[kind, lengths.name]
            for place, width in enumerate(WIDTHS):
                meter, result = _run_family(kind, lengths, width, progress)
                saved.append(meter.saved)
                paper = (
                    f"{published[place]:.1f}"
                    if len(published) == len(WIDTHS)
                    else f"{published[0]:.1f} to {published[-1]:.1f}"
                )
                reached = 100 * meter.saved / meter.possible
                rows.append(
                    (
                        lengths.name,
                        str(width),
                        f"{meter.saved:.2f}",
                        f"{meter.possible:.2f}",
                        f"{reached:.2f}",
                        paper,
                        str(result.preemptions),
                        str(meter.skipped),
                    )
                )
                name = f"{lengths.name}: {title.lower()}, {width}"
                findings.figures.append(Figure(f"{name}: memory saved", meter.saved, " %"))
                findings.figures.append(Figure(f"{name}: of perfect sharing", reached, " %", _BAR))
            series[lengths.name] = (tuple(map(float, WIDTHS)), tuple(saved))
    findings.tables.append(
        Table(
            f"{title}: memory saved, percent",
            ("lengths", "sequences", "saved", "perfect", "of perfect", "published", "preemptions", "skipped"),
            tuple(rows),
            "blocks saved over blocks without sharing, averaged over time",
        )
    )
    findings.plots.append(Plot(f"saved-{kind}", title, "sequences", "percent of blocks saved", series))
    return findings


def _run_family(
    kind: str, lengths: Lengths, width: int, progress: Callable[[], object]
) -> tuple[SharingMeter, Result]:
    count = SHARING_JOBS[lengths.name]
    rate = SHARING_SEQUENCE_RATE[lengths.name] / width
    parents = load_parents(width) if kind == "beam" else ()
    jobs = make_jobs(lengths, rate, count, SEED, width=width, parents=parents)
    return run_shared(jobs, SharingMeter(_by_name(jobs), BLOCK_SIZE), progress)


def run_shared(
    jobs: list[Job], sharing: SharingMeter, progress: Callable[[], object], saturated: bool = False
) -> tuple[SharingMeter, Result]:
    """The paged scheduler on ``jobs``, watched by ``sharing``."""
    scheduler, _ = Memory().scheduler()
    meter = Meter(PAGED, len(jobs) // 10, saturated)
    result = simulate_paged(jobs, scheduler, Machine(GPU_LIKE), meter, sharing=sharing, progress=progress)
    return sharing, result


def run_prefix() -> Findings:
    """Prompts that begin with the same 80 or 341 tokens, at saturation, next to Orca (Oracle)."""
    findings = Findings()
    rows = []
    with progress_bar("shared prefixes", 2 * len(SHARED_PREFIXES) * PREFIX_JOBS) as progress:
        for prefix in SHARED_PREFIXES:
            jobs = make_jobs(TRANSLATION, PREFIX_RATE, PREFIX_JOBS, SEED, prefix=prefix)
            oracle = simulate(Reservation.ORACLE.value, jobs, progress)
            meter, result = run_shared(
                jobs, SharingMeter(_by_name(jobs), BLOCK_SIZE, prefix), progress, saturated=True
            )
            reached = 100 * meter.saved / meter.possible
            gain = result.throughput / oracle.throughput
            rows.append(
                (
                    str(prefix),
                    f"{meter.saved:.2f}",
                    f"{meter.possible:.2f}",
                    f"{reached:.2f}",
                    f"{result.batch:.1f}",
                    f"{oracle.batch:.1f}",
                    f"{result.throughput:.2f}",
                    f"{oracle.throughput:.2f}",
                    f"{gain:.2f} ({PUBLISHED_PREFIX_GAIN[prefix]:.2f})",
                )
            )
            name = f"shared prefix of {prefix}"
            findings.figures.append(Figure(f"{name}: memory saved", meter.saved, " %"))
            findings.figures.append(Figure(f"{name}: of perfect sharing", reached, " %", _BAR))
            findings.figures.append(Figure(f"{name}: throughput over Orca Oracle", gain, "x"))
    findings.tables.append(
        Table(
            "Shared prefixes at saturation (published)",
            (
                "tokens",
                "saved %",
                "perfect %",
                "of perfect %",
                "batch",
                "Oracle's",
                "req/s",
                "Oracle's",
                "gain",
            ),
            tuple(rows),
            f"then {TRANSLATION.prompt:g} tokens of its own and {TRANSLATION.output:g} of output on average",
        )
    )
    return findings


def _by_name(jobs: list[Job]) -> dict[str, Job]:
    return {job.name: job for job in jobs}
