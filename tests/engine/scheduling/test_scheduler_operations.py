"""A hundred thousand random operations: all requests end, nothing leaks, every read is its own, none starves.

Requests for one sequence, for several, for ranked ones and for beams arrive, run, fork, lose their blocks,
recover either way, are aborted or fail in every state, move in from elsewhere, and the cache is reset.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from scheduler_operations import CASES, Case, Driver

from engine.request import FinishReason, TokenDelta
from engine.scheduling.sequence import SequenceState

OPERATIONS = 2_000  # of each case below: more than 100,000 in all


SEEDS = 5
assert len(CASES) * SEEDS * OPERATIONS >= 100_000


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_operations(case: Case, seed: int) -> None:
    driver = Driver(case, seed)
    driver.run(OPERATIONS)
    # Nobody starves: with no more arrivals all that is left ends within a bound that its sizes give.
    left = len(driver.live())
    tokens = case.num_blocks * case.block_size
    driver.simulation.drain(driver.scheduler, most_steps=200 + left * 4 * tokens * (4 + tokens))
    scheduler, simulation = driver.scheduler, driver.simulation
    assert simulation.over == set(driver.requests)
    stats = scheduler.stats()
    assert stats.referenced_blocks == stats.running == stats.waiting == stats.preempted == stats.swapped == 0
    assert stats.cached_blocks + stats.free_blocks == case.num_blocks
    assert stats.host_blocks_used == 0
    assert stats.recovery.pending == 0
    assert sum(stats.finished.values()) == len(simulation.ended)
    ends_of: dict[str, list[TokenDelta]] = defaultdict(list)
    for key, delta in simulation.ended.items():
        ends_of[key.split("#")[0]].append(delta)
    for name, request in driver.requests.items():
        ends = ends_of[name]
        reasons = {delta.finish_reason for delta in ends}
        if reasons <= {FinishReason.STOP, FinishReason.LENGTH}:
            started = request.outputs.count(None) if request.outputs else 0
            assert len(ends) == request.params.n - started
        elif FinishReason.ABORT in reasons:
            assert name in driver.aborted
        assert driver.first[name].state is SequenceState.FINISHED
    if case.recovery == "swap" and case.host_blocks >= 7:
        assert stats.recovery.decisions["swap"] > 0
    assert (stats.copied_blocks > 0) == (case.block_size > 1)  # blocks of one token are never partly full
