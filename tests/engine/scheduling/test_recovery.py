"""Estimates, learning, trials and counts of the recovery policy."""

from __future__ import annotations

import itertools
import random

import pytest

from engine.errors import ConfigError
from engine.kv.block_pool import InvariantError
from engine.scheduling.estimators import STALE
from engine.scheduling.recovery import (
    Rates,
    Recovery,
    RecoveryDecision,
    RecoveryMode,
    RecoveryPolicy,
    Victim,
)

SWAP, RECOMPUTE = Recovery.SWAP, Recovery.RECOMPUTE
BLOCK = 16


def victim(
    tokens: int = 160, to_copy: int = 10, findable: int = 0, shared: int = 0, swappable: bool = True
) -> Victim:
    return Victim(tokens, -(-tokens // BLOCK), to_copy, findable, shared, swappable)


def policy(
    prefill: float = 1000.0,
    swap_out: float = 100.0,
    swap_in: float = 200.0,
    mode: RecoveryMode = RecoveryMode.AUTO,
) -> RecoveryPolicy:
    return RecoveryPolicy(mode, BLOCK, Rates(prefill, swap_out, swap_in))


# Ten blocks: 10 / 100 + 10 / 200 = 0.15 s to swap; 160 / 1000 = 0.16 s to compute again.


def test_auto_takes_the_cheaper_and_tells_both_estimates() -> None:
    decision = policy().choose(victim())
    assert decision.recovery is SWAP
    assert decision.estimate == pytest.approx(0.15)
    assert decision.other_estimate == pytest.approx(0.16)
    decision = policy(prefill=1100.0).choose(victim())
    assert decision.recovery is RECOMPUTE
    assert decision.estimate == pytest.approx(160 / 1100)
    assert decision.other_estimate == pytest.approx(0.15)
    assert (decision.fallback, decision.trial, decision.outcome) == (False, False, 0.0)
    assert (decision.tokens, decision.blocks) == (160, 10)


def test_a_tie_is_computed_again() -> None:
    assert policy(prefill=1024.0, swap_out=128.0, swap_in=128.0).choose(victim(160, 10)).recovery is RECOMPUTE
    assert policy(prefill=1023.0, swap_out=128.0, swap_in=128.0).choose(victim(160, 10)).recovery is SWAP


def test_blocks_on_the_host_cost_no_copy() -> None:
    decision = policy(prefill=10_000.0).choose(victim(to_copy=0))
    assert decision.recovery is RECOMPUTE
    assert decision.other_estimate == pytest.approx(0.05)
    assert policy(prefill=3_000.0).choose(victim(to_copy=0)).recovery is SWAP


def test_blocks_that_are_expected_to_be_found_cost_neither_way() -> None:
    # 2 are shared, and of 4 more half survive at first: 4 of the 10 blocks are expected to be found.
    decision = policy().choose(victim(findable=6, shared=2))
    assert decision.recovery is RECOMPUTE
    assert decision.estimate == pytest.approx(96 / 1000)
    assert decision.other_estimate == pytest.approx(10 / 100 + 6 / 200)
    assert (decision.findable, decision.shared) == (6, 2)


def test_the_choice_counts_no_copy_of_a_block_that_survives() -> None:
    # Of 11 blocks 10 are shared: one is copied back in 0.005 s, or its 10 tokens computed in 0.01 s.
    decision = policy().choose(victim(170, to_copy=0, findable=10, shared=10))
    assert decision.recovery is SWAP
    assert decision.estimate == pytest.approx(0.005)


def test_a_request_whose_last_block_is_findable_and_held_costs_nothing_to_compute() -> None:
    decision = policy().choose(victim(tokens=150, findable=10, shared=10))
    assert (decision.recovery, decision.estimate) == (RECOMPUTE, 0.0)


def test_blocks_that_a_window_has_dropped_may_be_findable_but_are_never_less_than_nothing_to_copy() -> None:
    chooser = policy(mode=RecoveryMode.SWAP)
    decision = chooser.choose(Victim(160, 2, 1, findable=8, shared=8, swappable=True))
    assert decision.estimate == pytest.approx(0.01)


def test_a_request_without_blocks_is_computed_again() -> None:
    for mode in RecoveryMode:
        decision = policy(mode=mode).choose(victim(tokens=0, to_copy=0))
        assert (decision.recovery, decision.estimate, decision.fallback) == (RECOMPUTE, 0.0, False)


@pytest.mark.parametrize("unknown", ["prefill", "swap_out", "swap_in"])
def test_an_unknown_rate_means_recompute_until_it_is_measured(unknown: str) -> None:
    chooser = RecoveryPolicy(
        RecoveryMode.AUTO,
        BLOCK,
        Rates(
            0.0 if unknown == "prefill" else 50.0,
            0.0 if unknown == "swap_out" else 100.0,
            0.0 if unknown == "swap_in" else 200.0,
        ),
    )
    for _ in range(3 * STALE):
        decision = chooser.choose(victim())
        assert decision.recovery is RECOMPUTE
    missing = decision.estimate if unknown == "prefill" else decision.other_estimate
    assert not missing
    {
        "prefill": chooser.saw_prefill,
        "swap_out": chooser.saw_swap_out,
        "swap_in": chooser.saw_swap_in,
    }[unknown](100, 1.0)
    assert getattr(chooser.rates, unknown) == pytest.approx(100.0)
    assert chooser.choose(victim()).recovery is SWAP


def test_modes_hold_whatever_it_costs() -> None:
    slow_swap = policy(swap_out=1.0, mode=RecoveryMode.SWAP)
    slow_prefill = policy(prefill=1.0, mode=RecoveryMode.RECOMPUTE)
    for _ in range(3 * STALE):
        assert slow_swap.choose(victim()).recovery is SWAP
        assert slow_prefill.choose(victim()).recovery is RECOMPUTE
    assert slow_swap.stats().trials == slow_prefill.stats().trials == 0
    unknown = policy(0.0, 0.0, 0.0, mode=RecoveryMode.RECOMPUTE)
    assert unknown.choose(victim()).recovery is RECOMPUTE


def test_a_swap_is_possible_before_any_rate_is_known() -> None:
    chooser = policy(0.0, 0.0, 0.0, mode=RecoveryMode.SWAP)
    decision = chooser.choose(victim())
    assert (decision.recovery, decision.estimate, decision.other_estimate) == (SWAP, 0.0, None)
    chooser.spent(decision, 0.5)
    chooser.done(decision)
    assert chooser.stats().median_ratio[SWAP] is None  # nothing was estimated


@pytest.mark.parametrize("mode", [RecoveryMode.SWAP, RecoveryMode.AUTO])
def test_a_full_host_pool_falls_back_to_recompute(mode: RecoveryMode) -> None:
    chooser = policy(mode=mode)
    decision = chooser.choose(victim(swappable=False))
    assert (decision.recovery, decision.fallback) == (RECOMPUTE, True)
    assert decision.estimate == pytest.approx(0.16)
    assert decision.other_estimate == pytest.approx(0.15)
    assert chooser.stats().fallbacks == 1
    assert not policy(prefill=1e6).choose(victim(swappable=False)).fallback  # no swap was wanted


def finish(chooser: RecoveryPolicy, decision: RecoveryDecision, *seconds: float) -> None:
    for part in seconds:
        chooser.spent(decision, part)
    chooser.done(decision)


def test_counts_sums_and_medians() -> None:
    chooser = policy()
    swaps = [chooser.choose(victim()) for _ in range(3)]
    again = chooser.choose(victim(findable=10, shared=5))  # 7.5 of 10 blocks found: 0.04 s
    assert chooser.stats().pending == 4
    finish(chooser, swaps[0], 0.10, 0.05)
    finish(chooser, swaps[1], 0.30)
    finish(chooser, swaps[2], 0.12)
    finish(chooser, again, 0.02)
    stats = chooser.stats()
    assert stats.decisions == stats.finished == {SWAP: 3, RECOMPUTE: 1}
    assert (stats.pending, stats.abandoned, stats.fallbacks, stats.trials) == (0, 0, 0, 0)
    assert stats.estimates == {SWAP: pytest.approx(0.45), RECOMPUTE: pytest.approx(0.04)}
    assert stats.outcomes == {SWAP: pytest.approx(0.57), RECOMPUTE: pytest.approx(0.02)}
    assert stats.median_ratio == {SWAP: pytest.approx(1.0), RECOMPUTE: pytest.approx(0.5)}
    assert stats.median_error == {SWAP: pytest.approx(0.25), RECOMPUTE: pytest.approx(1.0)}
    assert (stats.rates, stats.survival) == (Rates(1000.0, 100.0, 200.0), 0.5)


def test_the_median_is_of_the_last_512() -> None:
    chooser = policy(mode=RecoveryMode.SWAP)
    for index in range(1500):
        finish(chooser, chooser.choose(victim()), 0.15 * (1 if index < 1000 else 2))
    assert chooser.stats().median_ratio[SWAP] == pytest.approx(2.0)
    assert chooser.stats().finished[SWAP] == 1500


def test_an_abandoned_recovery_is_not_counted_as_an_outcome() -> None:
    chooser = policy()
    decision = chooser.choose(victim())
    chooser.spent(decision, 99.0)
    chooser.abandon(decision)
    chooser.abandon(decision)
    stats = chooser.stats()
    assert (stats.abandoned, stats.pending, stats.finished[SWAP], stats.outcomes[SWAP]) == (1, 0, 0, 0.0)
    with pytest.raises(InvariantError, match="completed after it had ended"):
        chooser.done(decision)
    finished = chooser.choose(victim())
    chooser.done(finished)
    chooser.abandon(finished)
    assert chooser.stats().abandoned == 1


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_size is 0"):
        RecoveryPolicy(RecoveryMode.AUTO, 0, Rates())


def test_survival_follows_what_is_found_of_the_blocks_that_nobody_held() -> None:
    for mode in (RecoveryMode.SWAP, RecoveryMode.RECOMPUTE):
        chooser = policy(mode=mode)
        for _ in range(50):
            chooser.resumed(chooser.choose(victim(findable=10, shared=2)), found=4)
        assert chooser.stats().survival == pytest.approx(0.25, abs=0.02)
        for kept in (0, 100):  # holders let go of theirs, or others computed more: a probability stays one
            for _ in range(100):
                chooser.resumed(chooser.choose(victim(findable=10, shared=2)), kept)
            assert chooser.stats().survival == pytest.approx(float(kept > 0), abs=0.02)


def test_a_request_without_unheld_findable_blocks_teaches_nothing_about_survival() -> None:
    chooser = policy()
    chooser.resumed(chooser.choose(victim(findable=4, shared=4)), found=4)
    chooser.resumed(chooser.choose(victim()), found=0)
    assert chooser.stats().survival == 0.5


@pytest.mark.parametrize(("wrong", "measurements"), [(1 / 30, 80), (1 / 3, 30), (3.0, 30), (30.0, 60)])
def test_a_wrong_calibration_is_corrected_within_tens_of_measurements(wrong: float, measurements: int) -> None:
    chooser = policy(prefill=1000.0 * wrong, swap_out=100.0 * wrong, swap_in=200.0 * wrong)
    noise = random.Random(7)
    for _ in range(measurements):
        tokens, blocks = noise.randint(50, 500), noise.randint(5, 50)
        chooser.saw_prefill(tokens, tokens / 1000.0 * noise.uniform(0.7, 1.3))
        chooser.saw_swap_out(blocks, blocks / 100.0 * noise.uniform(0.7, 1.3))
        chooser.saw_swap_in(blocks, blocks / 200.0 * noise.uniform(0.7, 1.3))
    for tokens in (160, 400):
        decision = chooser.choose(victim(tokens, tokens // BLOCK))
        estimates = {decision.recovery: decision.estimate, _other(decision): decision.other_estimate}
        blocks = tokens // BLOCK
        assert estimates[RECOMPUTE] == pytest.approx(tokens / 1000.0, rel=0.15)
        assert estimates[SWAP] == pytest.approx(blocks / 100.0 + blocks / 200.0, rel=0.15)


def _other(decision: RecoveryDecision) -> Recovery:
    return RECOMPUTE if decision.recovery is SWAP else SWAP


def test_the_choice_and_the_estimate_know_the_fixed_part_of_a_copy_and_of_a_step() -> None:
    # Out 0.02 + blocks / 100 and back 0.04 + blocks / 200, against 0.1 + tokens / 1000.
    rates = Rates(1000.0, 100.0, 200.0, 0.02, 0.04)
    chooser = RecoveryPolicy(RecoveryMode.AUTO, BLOCK, rates)
    assert chooser.rates == rates
    decision = chooser.choose(victim(32, 2))
    assert decision.recovery is RECOMPUTE
    assert decision.other_estimate == pytest.approx(0.04 + 0.05)
    assert chooser.choose(victim(32, 0)).other_estimate == pytest.approx(0.05)  # only the way back
    for tokens in [20, 40, 80] * 40:
        chooser.saw_prefill(tokens, 0.1 + tokens / 1000.0)
        chooser.saw_swap_out(tokens // 20, 0.02 + tokens / 2000.0)
        chooser.saw_swap_in(tokens // 20, 0.04 + tokens / 4000.0)
    decision = chooser.choose(victim(32, 2))
    assert decision.recovery is SWAP
    assert decision.estimate == pytest.approx(0.09, rel=0.05)
    assert decision.other_estimate == pytest.approx(0.132, rel=0.05)
    assert decision.fallback is False


def test_odd_steps_do_not_swing_a_rate() -> None:
    chooser = policy()
    for _ in range(30):
        chooser.saw_prefill(256, 0.256)
    for _ in range(20):  # tiny chunks at four times the cost a token
        chooser.saw_prefill(2, 0.008)
    assert chooser.rates.prefill == pytest.approx(1000.0, rel=0.05)
    chooser.saw_prefill(256, 256.0)  # the machine slept
    assert chooser.rates.prefill > 800.0
    chooser.saw_prefill(256, 1e-9)
    assert chooser.rates.prefill < 1000.0
    before = chooser.rates
    for tokens, seconds in ((0, 1.0), (10, 0.0), (0, 0.0)):
        chooser.saw_prefill(tokens, seconds)
    assert chooser.rates == before


def measure(
    chooser: RecoveryPolicy, decision: RecoveryDecision, out: float, into: float, prefill: float
) -> None:
    """Carry ``decision`` out on a machine with these rates."""
    if decision.recovery is SWAP:
        seconds = decision.blocks / out, decision.blocks / into
        chooser.saw_swap_out(decision.blocks, seconds[0])
        chooser.saw_swap_in(decision.blocks, seconds[1])
    else:
        seconds = decision.tokens / prefill, 0.0
        chooser.saw_prefill(decision.tokens, seconds[0])
    finish(chooser, decision, *seconds)


def test_an_alternative_that_was_calibrated_three_times_too_slow_is_found_out() -> None:
    # In truth 0.075 s to swap and 0.16 s to compute; swap is believed to take 0.225 s.
    chooser = policy(swap_out=200 / 3, swap_in=400 / 3)
    chosen = []
    for _ in range(3 * STALE):
        decision = chooser.choose(victim())
        chosen.append(decision.recovery)
        measure(chooser, decision, 200.0, 400.0, 1000.0)
    assert chosen[: STALE + 1] == [RECOMPUTE] * STALE + [SWAP]
    assert chosen[STALE + 1 :].count(RECOMPUTE) == chooser.stats().trials - 1 == 1  # now that is tried
    # The same the other way round: nothing but recomputes would measure the prefill rate.
    chooser = policy(prefill=500.0)
    for _ in range(3 * STALE):
        decision = chooser.choose(victim())
        measure(chooser, decision, 100.0, 200.0, 1500.0)
    assert decision.recovery is RECOMPUTE


def trial_places(chooser: RecoveryPolicy, one: Victim, count: int, prefill: float = 1000.0) -> list[int]:
    """Indices of the trials among ``count`` decisions on a machine that swaps as fast as it is believed to."""
    places = []
    rates = chooser.rates
    for index in range(count):
        decision = chooser.choose(one)
        if decision.trial:
            places.append(index)
        measure(chooser, decision, rates.swap_out, rates.swap_in, prefill)
    return places


def test_trials_are_as_rare_as_they_are_dear() -> None:
    twice = policy(prefill=160 / 0.075)
    assert trial_places(twice, victim(), 1000, 160 / 0.075)[:3] == [64, 129, 194]
    fivefold = policy(prefill=160 / 0.03)
    places = trial_places(fivefold, victim(), 2000, 160 / 0.03)
    assert places[0] == STALE
    gaps = [after - before for before, after in itertools.pairwise(places)]
    assert gaps
    assert all(3.9 * STALE <= gap <= 4.1 * STALE for gap in gaps)
    assert trial_places(policy(prefill=160 / 0.01), victim(), 1000, 160 / 0.01) == []  # 15 times dearer
    for chooser in (twice, fivefold):
        stats = chooser.stats()
        assert stats.trials * STALE <= sum(stats.decisions.values())
        assert stats.trials == stats.decisions[SWAP]


def test_what_is_measured_anyway_needs_no_trial_and_a_full_host_pool_makes_none() -> None:
    chooser = policy()
    for _ in range(5 * STALE):
        chooser.saw_prefill(100, 0.1)  # prompts
        assert chooser.choose(victim()).recovery is SWAP
    chooser = policy(prefill=1100.0)
    for _ in range(5 * STALE):
        assert chooser.choose(victim(swappable=False)).recovery is RECOMPUTE
    assert chooser.stats().trials == 0
