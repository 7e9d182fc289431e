"""The paged side and the parts of the experiment, on small workloads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.scheduling.recovery import RecoveryMode
from loadtests.experiments.memory import constants as given
from loadtests.experiments.memory import parts as memory
from loadtests.experiments.memory.constants import ALPACA, GPU_LIKE, SHAREGPT, RecoveryLoad, Truth
from loadtests.experiments.memory.jobs import Job, make_jobs, own_tokens
from loadtests.experiments.memory.measure import Meter, Result
from loadtests.experiments.memory.paged import paged_config, simulate_paged
from loadtests.experiments.memory.parts import (
    MAX,
    ORACLE,
    ORACLE_FIRST_FIT,
    PAGED,
    SYSTEMS,
    filled,
    run_mode,
    saturation,
    simulate,
)
from loadtests.experiments.simulated_replica import SimulatedReplica, StepCost
from loadtests.report import Figure

SECOND = StepCost(1.0, 0.0, 0.0, 0.0)


def job(number: int, prompt: int, output: int, arrival: float = 0.0) -> Job:
    return Job(f"job-{number}", arrival, own_tokens(number, prompt), output)


def paged(jobs: list[Job], slots: int, block_size: int, cost: StepCost = SECOND) -> Result:
    replica = SimulatedReplica(paged_config(slots, block_size, cost, slots))
    result = simulate_paged(jobs, replica, Meter(slots=slots))
    assert not replica.scheduler.has_work()
    return result


def test_one_request_by_hand() -> None:
    # blocks of 4: 3, 4, 5, 6 tokens stored in 1, 1, 2, 2 blocks
    result = paged([job(0, 3, 4)], 16, 4)
    assert result.steps == 4
    assert result.split.tokens == (3 + 4 + 5 + 6) / 4
    assert result.split.internal == (1 + 0 + 3 + 2) / 4
    assert result.split.external == 16 - (4 + 4 + 8 + 8) / 4
    assert result.token_share == pytest.approx(100 * 18 / 24)
    assert result.seconds == 4.0


def test_two_requests_wait_for_blocks() -> None:
    # 4 blocks of 2; each request grows to 3 blocks, so the second one is preempted or waits, and both end.
    result = paged([job(0, 2, 4), job(1, 2, 4)], 8, 2)
    assert 4 < result.steps <= 8


def test_steps_take_the_time_of_their_constants() -> None:
    result = paged([job(0, 10, 3)], 64, 4, StepCost(1.0, 0.1, 0.01, 0.001))
    assert result.seconds == pytest.approx((1.0 + 1.0) + (1.01 + 0.010) + (1.01 + 0.011))


def test_noise_has_mean_one_and_is_repeatable() -> None:
    config = replace(paged_config(2_048, cost=SECOND), noise=0.3, seed=4)
    seconds = [simulate_paged([job(0, 1, 1_000)], SimulatedReplica(config), Meter()).seconds for _ in range(2)]
    assert seconds[0] == seconds[1] != 1_000
    assert seconds[0] == pytest.approx(1_000, rel=0.04)


def test_bound_of_the_block_size_by_hand() -> None:
    # 3, 4, 5, 6 tokens in 1, 1, 2, 2 blocks of 4
    assert filled([job(0, 3, 4)], 4) == pytest.approx(100 * 18 / 24)
    assert filled([job(0, 3, 4)], 1) == 100


def test_paged_beats_the_baselines_at_saturation() -> None:
    jobs = make_jobs(SHAREGPT, 8.0, 150, 3)
    results = {system: simulate(system, jobs) for system in SYSTEMS}
    best = results[PAGED]
    assert best.token_share > 96
    assert best.batch > 1.9 * results[ORACLE].batch
    assert 1.4 < best.batch / results[ORACLE_FIRST_FIT].batch < best.batch / results[ORACLE].batch
    assert best.batch > 4 * results[MAX].batch
    for result in results.values():
        assert sum(result.split.percent()) == pytest.approx(100)
        assert min(result.split.percent()) >= 0


def test_saturation_reports_bars_and_published_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given, "SATURATION_JOBS", {SHAREGPT.name: 120, ALPACA.name: 800})
    found = saturation()
    bars = {figure.name for figure in found if figure.bar is not None}
    assert f"{SHAREGPT.name}: tokens/allocated" in bars
    assert f"{ALPACA.name}: tokens/allocated, of the bound of blocks of 16" in bars
    assert f"{SHAREGPT.name}: average batch over {ORACLE_FIRST_FIT}" in bars
    assert len(bars) == 9
    assert f"{SHAREGPT.name}: average batch, {ORACLE}" in {figure.name for figure in found}


@pytest.mark.parametrize("copy", [0.01, 1_000.0])
def test_auto_takes_the_cheaper_recovery(copy: float) -> None:
    load = RecoveryLoad("small", SHAREGPT, 60, 4_000)
    runs = {mode: run_mode(load, GPU_LIKE, Truth("t", copy=copy), mode) for mode in RecoveryMode}
    seconds = {mode: result.seconds for mode, result in runs.items()}
    assert all(result.preemptions > 5 for result in runs.values())
    swaps_better = seconds[RecoveryMode.SWAP] < seconds[RecoveryMode.RECOMPUTE]
    assert swaps_better == (copy < 1)
    worse = max(seconds[RecoveryMode.SWAP], seconds[RecoveryMode.RECOMPUTE])
    assert seconds[RecoveryMode.AUTO] < worse


def test_command_prints_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(value: float) -> list[Figure]:
        return [Figure("a figure", value, bar=1.0)]

    monkeypatch.setitem(memory.PARTS, "prefix", lambda: part(2.0))
    monkeypatch.setitem(memory.PARTS, "parallel", lambda: part(0.5))
    out = tmp_path / "out.json"
    memory.main(["--only", "prefix", "--check", "--json", str(out)])
    text = capsys.readouterr().out
    assert "a figure: 2  bar >= 1  ok" in text
    assert json.loads(out.read_text())["figures"][0]["holds"]
    with pytest.raises(SystemExit, match="1"):
        memory.main(["--only", "parallel", "--check"])
