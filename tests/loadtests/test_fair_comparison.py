"""What makes simulated arms comparable: one cost for all that know prefixes, arrivals that wait for nobody."""

from __future__ import annotations

import pytest

from loadtests.experiments.routing.arms import Arm
from loadtests.experiments.routing.constants import BLOCK_SIZE, COST, TOKEN_BUDGET, Shape
from loadtests.experiments.routing.fleet import Fleet
from loadtests.experiments.routing.workloads import shared, unshared
from loadtests.experiments.simulated_replica import ReplicaConfig

SHAPE = Shape(groups=12, system=1_600, questions=0, question=64, output=16)
TIMES = [0.02 * number for number in range(100)]


def replica(blocks: int) -> ReplicaConfig:
    return ReplicaConfig(COST, blocks, BLOCK_SIZE, TOKEN_BUDGET, kv_events=True)


def test_arms_that_find_prefixes_choose_alike_where_there_are_none() -> None:
    """What the exact index is worth is then not what the cost is worth."""
    exact, approximate = (
        Fleet(arm, unshared(SHAPE, TIMES, 1), replica(1_000), replicas=3).run()
        for arm in (Arm.PREFIX, Arm.APPROXIMATE)
    )
    assert exact.choices == approximate.choices
    assert len({place for _, place in exact.choices}) == 3


@pytest.mark.parametrize("arm", list(Arm))
def test_requests_come_when_they_are_due_however_many_are_unanswered(arm: Arm) -> None:
    outcome = Fleet(arm, shared(SHAPE, TIMES, 1, vary=True), replica(150), replicas=1).run()
    assert [when for when, _ in outcome.choices] == TIMES
    assert outcome.unfinished == 0
    assert max(record.ttft for record in outcome.records) > 10 * (TIMES[1] - TIMES[0])
