"""What the measurements of recovery make of what they saw."""

from __future__ import annotations

import pytest

from engine.request import FinishReason
from engine.scheduling.latency_stats import LatencyStats
from engine.scheduling.recovery import Rates, RecoveryMode, RecoveryPolicy, Victim
from engine.scheduling.scheduler_stats import SchedulerStats
from loadtests.experiments.recovery import Run, bars, requests_of
from loadtests.report import Figure


def run_of(mode: RecoveryMode, decisions: int, outcome: float) -> Run:
    """Decisions that were estimated at 0.15 s (a swap) or 0.16 s each and took ``outcome``."""
    policy = RecoveryPolicy(mode, 16, Rates(1000.0, 100.0, 200.0))
    for _ in range(decisions):
        decision = policy.choose(Victim(160, 10, 10, 0, 0, True))
        policy.spent(decision, outcome)
        policy.done(decision)
    stats = SchedulerStats(
        referenced_blocks=0,
        cached_blocks=0,
        free_blocks=0,
        shared_blocks=0,
        running=0,
        waiting=0,
        preempted=0,
        swapped=0,
        prompt_tokens=0,
        generated_tokens=0,
        prefix_query_tokens=0,
        prefix_hit_tokens=0,
        preemptions=decisions,
        host_blocks=0,
        host_blocks_used=0,
        copied_blocks=0,
        recovery=policy.stats(),
        finished=dict.fromkeys(FinishReason, 0),
        latency=LatencyStats(lambda: 0.0),
    )
    return Run({"a": [1, 2, 3]}, 1.5, stats)


def verdicts(figures: list[Figure]) -> list[bool]:
    return [figure.holds for figure in figures if figure.bar is not None]


def test_a_run_must_keep_its_tokens_decide_often_and_estimate_well() -> None:
    good = run_of(RecoveryMode.SWAP, 200, 0.18)
    assert verdicts(bars("swap", good, True)) == [True] * 3
    assert verdicts(bars("swap", good, False)) == [False, True, True]
    assert verdicts(bars("swap", run_of(RecoveryMode.SWAP, 199, 0.18), True)) == [True, False, True]
    assert verdicts(bars("swap", run_of(RecoveryMode.SWAP, 200, 0.3), True)) == [True, True, False]
    assert verdicts(bars("recompute", run_of(RecoveryMode.RECOMPUTE, 200, 0.08), True)) == [True, True, False]


def test_in_auto_mode_a_kind_that_was_hardly_taken_has_no_bar() -> None:
    # Auto takes the swap here; the other kind is but a trial or two.
    figures = bars("auto", run_of(RecoveryMode.AUTO, 200, 0.9), True)
    errors = {figure.name.split()[-2]: figure for figure in figures if "error" in figure.name}
    assert not errors["swap"].holds
    assert all(figure.bar is None for kind, figure in errors.items() if kind == "recompute")


def test_the_figures_say_what_happened() -> None:
    run = run_of(RecoveryMode.SWAP, 4, 0.3)
    values = {figure.name: figure.value for figure in bars("swap", run, True)}
    assert (values["swap: output"], values["swap: preemptions"], values["swap: decisions"]) == (2.0, 4, 4)
    assert values["swap: median error of 4 swap estimates"] == pytest.approx(0.5)


def test_a_load_is_the_same_for_the_same_seed() -> None:
    one, again, other = (requests_of(seed, 20) for seed in (1, 1, 2))
    assert [request.token_ids for request in one] == [request.token_ids for request in again]
    assert [request.token_ids for request in one] != [request.token_ids for request in other]
    assert [request.priority for request in one] == [-number for number in range(20)]
