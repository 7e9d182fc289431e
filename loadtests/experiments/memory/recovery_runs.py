"""Swap against recompute against auto, on machines that are not as the recovery policy was told."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from engine.scheduling.recovery import Rates, Recovery, RecoveryMode, RecoveryStats
from loadtests.experiments.memory import constants as given
from loadtests.experiments.memory.constants import RecoveryLoad, Truth
from loadtests.experiments.memory.jobs import load_parents, make_jobs
from loadtests.experiments.memory.measure import Meter, Result
from loadtests.experiments.memory.paged import paged_config, simulate_paged
from loadtests.experiments.memory.systems import watched
from loadtests.experiments.simulated_replica import SimulatedReplica, StepCost
from loadtests.report import Figure, Findings, Table

MACHINES = {"GPU-like": given.GPU_LIKE, "CPU-like": given.CPU_LIKE}
_BAR = 1.05


def run_recovery() -> Findings:
    """Every load on every machine in each of the three modes; what counts is the time until all is done."""
    findings = Findings()
    worst = 0.0
    for machine, told in MACHINES.items():
        rows = []
        for truth, load in watched(f"recovery, {machine}", list(product(given.TRUTHS, given.RECOVERY_LOADS))):
            runs = {mode: run_mode(load, told, truth, mode) for mode in RecoveryMode}
            modes = (RecoveryMode.SWAP, RecoveryMode.RECOMPUTE, RecoveryMode.AUTO)
            swap, recompute, auto = (runs[mode][0].seconds for mode in modes)
            ratio = auto / min(swap, recompute)
            worst = max(worst, ratio)
            result, stats = runs[RecoveryMode.AUTO]
            seconds = (f"{swap:.1f}", f"{recompute:.1f}", f"{auto:.1f}", f"{ratio:.4f}")
            counts = (result.preemptions, stats.decisions[Recovery.SWAP], stats.trials)
            rows.append((truth.name, load.name, str(load.slots), *seconds, *map(str, counts)))
        header = (
            *("truth", "load", "pool", "swap", "recompute", "auto", "auto/better"),
            *("preemptions", "of them swapped", "trials"),
        )
        title = f"Recovery on a {machine} machine, seconds until all requests have ended"
        note = f"noise of sigma {given.RECOVERY_NOISE:g} on all times; the last three columns are of auto"
        findings.tables.append(Table(title, header, tuple(rows), note))
    name = "recovery: auto over the better of swap and recompute, worst"
    findings.figures.append(Figure(name, worst, "x", _BAR, True))
    return findings


def run_mode(
    load: RecoveryLoad, told: StepCost, truth: Truth, mode: RecoveryMode
) -> tuple[Result, RecoveryStats]:
    """One run; the policy starts with the rates of ``told``, the machine has those of ``truth``."""
    jobs = make_jobs(
        load.lengths,
        given.RECOVERY_RATE,
        load.requests,
        given.SEED,
        prefix=load.prefix,
        width=load.width,
        parents=load_parents(load.width) if load.beam else (),
    )
    copies = 1 / told.swapped_block
    config = replace(
        paged_config(load.slots, cost=told.scaled(truth.prefill, truth.copy)),
        host_blocks=given.HOST_SHARE * load.slots // given.BLOCK_SIZE,
        recovery=mode,
        rates=Rates(prefill=1 / told.prefill_token, swap_out=copies, swap_in=copies),
        noise=given.RECOVERY_NOISE,
        seed=given.SEED,
    )
    replica = SimulatedReplica(config)
    result = simulate_paged(jobs, replica, Meter(slots=load.slots))
    return result, replica.policy.stats()
