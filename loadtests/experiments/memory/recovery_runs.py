"""Swap against recompute against auto, on machines that are not as the recovery policy was told."""

from __future__ import annotations

from collections.abc import Callable

from engine.scheduling.recovery import Rates, Recovery, RecoveryMode, RecoveryStats
from loadtests.experiments.memory.beams import load_parents
from loadtests.experiments.memory.constants import (
    BLOCK_SIZE,
    CPU_LIKE,
    GPU_LIKE,
    HOST_SHARE,
    RECOVERY_LOADS,
    RECOVERY_NOISE,
    RECOVERY_RATE,
    SEED,
    TRUTHS,
    RecoveryLoad,
    StepCost,
    Truth,
)
from loadtests.experiments.memory.findings import Findings, Table, progress_bar
from loadtests.experiments.memory.jobs import make_jobs
from loadtests.experiments.memory.measure import Meter, Result
from loadtests.experiments.memory.paged import PAGED, Machine, Memory, simulate_paged
from loadtests.report import Figure

MACHINES = {"GPU-like": GPU_LIKE, "CPU-like": CPU_LIKE}
_BAR = 1.05


def run_recovery() -> Findings:
    """Every load on every machine in each of the three modes; what counts is the time until all is done."""
    findings = Findings()
    total = len(MACHINES) * len(TRUTHS) * len(RecoveryMode) * sum(load.requests for load in RECOVERY_LOADS)
    worst = 0.0
    with progress_bar("recovery", total) as progress:
        for machine, told in MACHINES.items():
            rows = []
            for truth in TRUTHS:
                for load in RECOVERY_LOADS:
                    runs = {mode: run_mode(load, told, truth, mode, progress) for mode in RecoveryMode}
                    swap, recompute, auto = (
                        runs[mode][0].seconds
                        for mode in (RecoveryMode.SWAP, RecoveryMode.RECOMPUTE, RecoveryMode.AUTO)
                    )
                    ratio = auto / min(swap, recompute)
                    worst = max(worst, ratio)
                    result, stats = runs[RecoveryMode.AUTO]
                    rows.append(
                        (
                            truth.name,
                            load.name,
                            str(load.slots),
                            f"{swap:.1f}",
                            f"{recompute:.1f}",
                            f"{auto:.1f}",
                            f"{ratio:.4f}",
                            str(result.preemptions),
                            str(stats.decisions[Recovery.SWAP]),
                            str(stats.trials),
                        )
                    )
                    name = f"{machine}, {truth.name}, {load.name}: auto over the better"
                    findings.figures.append(Figure(name, ratio, "x"))
            findings.tables.append(
                Table(
                    f"Recovery on a {machine} machine, seconds until all requests have ended",
                    (
                        "truth",
                        "load",
                        "pool",
                        "swap",
                        "recompute",
                        "auto",
                        "auto/better",
                        "preemptions",
                        "of them swapped",
                        "trials",
                    ),
                    tuple(rows),
                    f"noise of sigma {RECOVERY_NOISE:g} on all times; the last three columns are of auto",
                )
            )
    name = "recovery: auto over the better of swap and recompute, worst"
    findings.figures.append(Figure(name, worst, "x", _BAR, True))
    return findings


def run_mode(
    load: RecoveryLoad, told: StepCost, truth: Truth, mode: RecoveryMode, progress: Callable[[], object]
) -> tuple[Result, RecoveryStats]:
    """One run; the policy starts with the rates of ``told``, the machine has those of ``truth``."""
    parents = load_parents(load.width) if load.beam else ()
    jobs = make_jobs(
        load.lengths,
        RECOVERY_RATE,
        load.requests,
        SEED,
        prefix=load.prefix,
        width=load.width,
        parents=parents,
    )
    copies = 1 / told.swapped_block
    rates = Rates(prefill=1 / told.prefill_token, swap_out=copies, swap_in=copies)
    memory = Memory(load.slots, host_slots=HOST_SHARE * load.slots, recovery=mode, rates=rates)
    scheduler, policy = memory.scheduler()
    machine = Machine(told.scaled(truth.prefill, truth.copy), BLOCK_SIZE, RECOVERY_NOISE, SEED)
    meter = Meter(PAGED, 0, saturated=False, slots=load.slots)
    result = simulate_paged(jobs, scheduler, machine, meter, progress=progress)
    return result, policy.stats()
