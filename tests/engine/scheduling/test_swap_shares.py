"""What a step and its copies took is shared by the sequences that they ran and moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kv_simulation import KVSimulation, add, make_request, make_scheduler
from tiny_engines import tiny_engine_config

from engine.engine import Engine
from engine.execution.calibration import Calibration
from engine.kv.block_pool import BlockPool
from engine.kv.host_pool import HostPool
from engine.kv.transfers import Transfers
from engine.scheduling.block_tables import ComputedBlocks
from engine.scheduling.recovery import Rates, Recovery, RecoveryMode, RecoveryPolicy, Victim
from engine.scheduling.recovery_tracker import RecoveryTracker
from engine.scheduling.step import StepPlan, StepTiming, Swap


def make_policy() -> RecoveryPolicy:
    return RecoveryPolicy(RecoveryMode.SWAP, 16, Rates(1000.0, 100.0, 200.0, 0.01, 0.02))


def test_each_is_charged_by_its_blocks_and_that_is_what_is_learned() -> None:
    policy, taught = make_policy(), make_policy()
    pool, host = BlockPool(16, 16), HostPool(16)
    tracker = RecoveryTracker(pool, host, policy)
    large, small, back, nothing = (policy.choose(Victim(48, 3, 3, 0, 0, True)) for _ in range(4))
    for _ in range(4):
        taught.choose(Victim(48, 3, 3, 0, 0, True))
    plan = StepPlan(
        8,
        transfers=Transfers(swap_out=[(block, block) for block in range(4)], swap_in=[(4, 4), (5, 5)]),
        swaps=[Swap(large, 3, 0), Swap(small, 1, 0), Swap(back, 0, 2), Swap(nothing, 0, 0)],
    )
    tracker.account(plan, StepTiming(0.0, 0.8, 0.4))
    assert [decision.outcome for decision in (large, small, back, nothing)] == pytest.approx(
        [0.6, 0.2, 0.4, 0.0]
    )
    taught.saw_swap_out(3, 0.8 * 3 / 4)
    taught.saw_swap_out(1, 0.8 * 1 / 4)
    taught.saw_swap_in(2, 0.4)
    assert policy.rates == taught.rates
    assert policy.rates.swap_out < 100.0
    assert policy.rates.prefill == 1000.0


@pytest.mark.parametrize(("recovery", "seconds"), [("recompute", 0.015), ("swap", 0.032)])
def test_a_recovery_costs_what_its_steps_took(recovery: Recovery, seconds: float) -> None:
    scheduler = make_scheduler(8, 4, recovery=recovery, host_blocks=8, prefix_caching=False)
    simulation = KVSimulation(4)
    scheduler.add(make_request("victim", [1] * 15, 10, priority=1, ignore_eos=True))
    simulation.step(scheduler)  # 15 tokens, in 4 blocks
    scheduler.add(make_request("first", [2] * 17, 4, ignore_eos=True))
    simulation.drain(scheduler)
    stats = scheduler.stats().recovery
    assert (stats.finished[recovery], stats.abandoned) == (1, 0)
    assert stats.outcomes[recovery] == pytest.approx(seconds)


def test_a_step_that_only_swaps_back_says_nothing_of_the_way_out() -> None:
    policy = make_policy()
    pool, host = BlockPool(16, 16), HostPool(16)
    tracker = RecoveryTracker(pool, host, policy)
    decision = policy.choose(Victim(48, 3, 0, 0, 0, True))
    plan = StepPlan(
        8, transfers=Transfers(swap_in=[(0, 0)]), swaps=[Swap(decision, 0, 0), Swap(decision, 0, 1)]
    )
    tracker.account(plan, StepTiming(0.0, 0.0, 0.4))
    assert decision.outcome == pytest.approx(0.4)
    assert [policy.rates.swap_out, policy.rates.out_call] == pytest.approx([100.0, 0.01])
    assert policy.rates.swap_in < 200.0


def test_each_prompt_teaches_what_its_tokens_took() -> None:
    policy, taught = make_policy(), make_policy()
    pool, host = BlockPool(16, 16), HostPool(16)
    tracker = RecoveryTracker(pool, host, policy)
    scheduler = make_scheduler(64, 16, token_budget=40)
    plan, decoding = StepPlan(40), StepPlan(40)
    for number, length in enumerate([30, 1, 8, 1]):
        sequence = add(scheduler, make_request(f"request{number}", [1] * length))
        plan.add(sequence, length)
        if length == 1:
            decoding.add(sequence, 1)
    tracker.account(plan, StepTiming(0.8))
    taught.saw_prefill(30, 0.8 * 30 / 40)
    taught.saw_prefill(8, 0.8 * 8 / 40)
    assert policy.rates == taught.rates
    assert policy.rates.prefill < 1000.0
    before = policy.rates
    tracker.account(decoding, StepTiming(0.8))
    assert policy.rates == before


def test_a_recompute_is_charged_with_the_lost_tokens_alone() -> None:
    """The last of its chunks may run tokens that it had not computed before."""
    policy = RecoveryPolicy(RecoveryMode.RECOMPUTE, 16, Rates(1000.0, 100.0, 200.0))
    tracker = RecoveryTracker(BlockPool(16, 16), HostPool(0), policy)
    sequence = add(make_scheduler(64, 16, token_budget=40), make_request("r", [1] * 40))
    sequence.computed = 20
    decision = tracker.preempted(sequence, ComputedBlocks([0, 1], [(0, 1, 16), (1, 1, 4)]))
    assert decision is not None
    sequence.computed = 0
    for tokens in (15, 20):
        plan = StepPlan(40)
        plan.add(sequence, tokens)
        tracker.account(plan, StepTiming(tokens / 10.0))
        sequence.computed += tokens
    assert decision.outcome == pytest.approx(1.5 + 0.5)
    assert decision.ended


@pytest.mark.parametrize("refit", [False, True])
def test_copies_told_as_a_pace_keep_the_calibrated_fixed_part(refit: bool) -> None:
    """Each is charged what a block of the one before it took, so that a line would go through the origin."""
    chooser = RecoveryPolicy(RecoveryMode.AUTO, 16, Rates(1000.0, 100.0, 200.0, 0.02, 0.01), refit_calls=refit)
    sizes, before = [2, 4, 8, 3, 6], 4
    for blocks in sizes * 40:
        chooser.saw_swap_out(blocks, blocks * (0.02 / before + 1 / 100.0))
        chooser.saw_swap_in(blocks, blocks * (0.01 / before + 1 / 200.0))
        before = blocks
    fixed = [chooser.rates.out_call / 0.02, chooser.rates.in_call / 0.01]
    assert all(share < 0.25 if refit else 0.75 < share < 1.25 for share in fixed), fixed


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_on_cuda_takes_its_copies_to_be_told_as_a_pace(
    tiny_models: dict[str, Path], device: str
) -> None:
    engine = Engine(tiny_engine_config(tiny_models["Llama"], swap_space=1 << 20), offline=True)
    engine.runner.device = torch.device(device)
    policy = engine._recovery_policy(Calibration(1000.0, 64))
    before = policy.rates
    each = 1.0 / before.swap_out + before.out_call
    for blocks in [1, 2, 4, 8] * 40:  # a fixed part that was not calibrated
        policy.saw_swap_out(blocks, (blocks + 10.0) * each)
    fixed = policy.rates.out_call * policy.rates.swap_out
    assert (fixed == pytest.approx(before.out_call * before.swap_out)) == (device == "cuda")
