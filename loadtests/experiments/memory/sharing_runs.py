"""Memory saved by parallel sampling and beam search, next to perfect sharing; what shared prefixes bring."""

from __future__ import annotations

from itertools import product

from loadtests.experiments.memory import constants as given
from loadtests.experiments.memory.jobs import Job, load_parents, make_jobs
from loadtests.experiments.memory.measure import Meter, Result
from loadtests.experiments.memory.paged import paged_config, simulate_paged
from loadtests.experiments.memory.sharing import SharingMeter
from loadtests.experiments.memory.systems import ORACLE, ORACLE_FIRST_FIT, simulate, watched
from loadtests.experiments.simulated_replica import SimulatedReplica
from loadtests.report import Figure, Findings, Table

_BAR = 99.0  # percent of what perfect sharing saves


def run_parallel() -> Findings:
    """Requests for 2, 4 and 6 samples."""
    return _run_groups("parallel", "Parallel sampling")


def run_beam() -> Findings:
    """Requests for 2, 4 and 6 beams, which go on from one another as recorded."""
    return _run_groups("beam", "Beam search")


def _run_groups(kind: str, title: str) -> Findings:
    findings = Findings()
    rows = []
    for lengths, width in watched(title.lower(), list(product(given.WORKLOADS, given.WIDTHS))):
        name = lengths.name
        parents = load_parents(width) if kind == "beam" else ()
        rate = given.SHARING_SEQUENCE_RATE[name] / width
        jobs = make_jobs(lengths, rate, given.SHARING_JOBS[name], given.SEED, width=width, parents=parents)
        meter, result = _run_shared(jobs)
        reached = 100 * meter.saved / meter.possible
        published = given.PUBLISHED_SAVING[kind, name]
        paper = f"{published[0]:.1f} to {published[-1]:.1f}"
        if len(published) == len(given.WIDTHS):
            paper = f"{published[given.WIDTHS.index(width)]:.1f}"
        shares = (f"{share:.2f}" for share in (meter.saved, meter.possible, reached))
        rows.append((name, str(width), *shares, paper, str(result.preemptions), str(meter.skipped)))
        figure = Figure(f"{name}: {title.lower()}, {width}: of perfect sharing", reached, " %", _BAR)
        findings.figures.append(figure)
    header = ("lengths", "sequences", "saved", "perfect", "of perfect", "published", "preemptions", "skipped")
    note = "blocks saved over blocks without sharing, averaged over time"
    findings.tables.append(Table(f"{title}: memory saved, percent", header, tuple(rows), note))
    return findings


def _run_shared(jobs: list[Job], prefix: int = 0) -> tuple[SharingMeter, Result]:
    """The paged scheduler on ``jobs``, at saturation where they share a prefix."""
    sharing = SharingMeter({job.name: job for job in jobs}, given.BLOCK_SIZE, prefix)
    meter = Meter(len(jobs) // 10, saturated=prefix > 0)
    return sharing, simulate_paged(jobs, SimulatedReplica(paged_config()), meter, sharing)


def run_prefix() -> Findings:
    """Prompts that begin with the same 80 or 341 tokens, at saturation, next to Orca (Oracle)."""
    findings = Findings()
    rows = []
    for prefix in watched("shared prefixes", given.SHARED_PREFIXES):
        jobs = make_jobs(given.TRANSLATION, given.PREFIX_RATE, given.PREFIX_JOBS, given.SEED, prefix=prefix)
        oracle, first_fit = (simulate(system, jobs) for system in (ORACLE, ORACLE_FIRST_FIT))
        meter, result = _run_shared(jobs, prefix)
        reached = 100 * meter.saved / meter.possible
        gain, harder = (result.throughput / other.throughput for other in (oracle, first_fit))
        shares = (f"{share:.2f}" for share in (meter.saved, meter.possible, reached))
        batches = (f"{one.batch:.1f}" for one in (result, oracle))
        rates = (f"{one.throughput:.2f}" for one in (result, oracle))
        published = f"{gain:.2f} ({given.PUBLISHED_PREFIX_GAIN[prefix]:.2f})"
        rows.append((str(prefix), *shares, *batches, *rates, published, f"{harder:.2f}"))
        name = f"shared prefix of {prefix}"
        findings.figures.append(Figure(f"{name}: of perfect sharing", reached, " %", _BAR))
        findings.figures.append(Figure(f"{name}: throughput over {ORACLE}", gain, "x"))
        findings.figures.append(Figure(f"{name}: throughput over {ORACLE_FIRST_FIT}", harder, "x"))
    header = (
        *("tokens", "saved %", "perfect %", "of perfect %", "batch", "Oracle's", "req/s", "Oracle's"),
        *("gain", "over first fit"),
    )
    note = "then 30 tokens of its own and 30 of output on average"
    findings.tables.append(Table("Shared prefixes at saturation (published)", header, tuple(rows), note))
    return findings
