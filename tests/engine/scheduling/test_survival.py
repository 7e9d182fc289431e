"""What the recovery policy believes of the blocks that a preempted sequence leaves, and when it learns it."""

from __future__ import annotations

import pytest
from kv_simulation import KVSimulation, add, make_request, make_scheduler

from engine.scheduling.recovery import Rates, Recovery, RecoveryMode, RecoveryPolicy, Victim
from engine.scheduling.sequence import SequenceState

BLOCK = 16


def test_an_estimate_takes_what_typically_survives_and_the_choice_what_survives_on_average() -> None:
    policy = RecoveryPolicy(RecoveryMode.AUTO, BLOCK, Rates(1000.0, 200.0, 400.0))
    victim = Victim(tokens=160, blocks=10, to_copy=10, findable=10, shared=0, swappable=True)
    for kept in [10, 10, 0] * 20:
        decision = policy.choose(victim)
        policy.resumed(decision, kept)
    assert policy.stats().survival == pytest.approx(2 / 3, abs=0.1)
    # Likely all survives, and computing again costs nothing; on average it takes 0.05 s, a swap 0.06 s.
    decision = policy.choose(victim)
    assert decision.recovery is Recovery.RECOMPUTE
    assert decision.estimate == 0.0
    assert decision.other_estimate == pytest.approx(10 / 200)
    # At a third of the speed to compute it is the average that decides, and not what is likely.
    policy = RecoveryPolicy(RecoveryMode.AUTO, BLOCK, Rates(300.0, 200.0, 400.0))
    for kept in [10, 10, 0] * 20:
        policy.resumed(policy.choose(victim), kept)
    decision = policy.choose(victim)
    assert decision.recovery is Recovery.SWAP
    assert decision.other_estimate == 0.0


def test_each_decision_teaches_once() -> None:
    policy = RecoveryPolicy(RecoveryMode.RECOMPUTE, BLOCK, Rates(1000.0))
    decision = policy.choose(Victim(160, 10, 10, findable=10, shared=0, swappable=False))
    policy.resumed(decision, 0)
    once = policy.stats().survival
    assert once < 0.5
    policy.resumed(decision, 10)
    assert policy.stats().survival == once


@pytest.mark.parametrize("recovery", ["swap", "recompute"])
def test_a_loss_is_learned_before_the_request_comes_back(recovery: str) -> None:
    scheduler = make_scheduler(8, 4, recovery=recovery, host_blocks=32)
    simulation = KVSimulation(4)

    def survival() -> float:
        return scheduler.stats().recovery.survival

    first = add(scheduler, make_request("a", [1] * 13, max_tokens=8, ignore_eos=True))
    simulation.step(scheduler)
    assert first.state is SequenceState.RUNNING
    scheduler.add(make_request("b", [2] * 29, priority=-1, max_tokens=3, ignore_eos=True))
    simulation.step(scheduler)
    assert first.state is not SequenceState.RUNNING
    assert survival() == 0.5  # it may come back at once
    scheduler.add(make_request("c", [3] * 25, priority=-2, ignore_eos=True))
    simulation.step(scheduler)
    assert scheduler.stats().preemptions == 2
    assert survival() == 0.25  # its three blocks are gone, and it still waits
    assert first.state is not SequenceState.RUNNING
    lessons = []
    while scheduler.has_work():
        before = survival()
        simulation.step(scheduler)
        if survival() != before:
            lessons.append(survival())
    assert len(lessons) == 1  # of the second one, at its return
    assert scheduler.stats().recovery.pending == 0
