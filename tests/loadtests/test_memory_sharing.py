"""Perfect sharing worked out by hand, and what the scheduler reaches of it."""

from __future__ import annotations

import pytest

from loadtests.experiments.memory.constants import ALPACA
from loadtests.experiments.memory.jobs import Job, make_jobs
from loadtests.experiments.memory.measure import Meter
from loadtests.experiments.memory.paged import paged_config, simulate_paged
from loadtests.experiments.memory.sharing import SharingMeter, perfect_blocks
from loadtests.experiments.simulated_replica import SimulatedReplica


def test_blocks_of_samples_by_hand() -> None:
    # a prompt of 10 tokens: 2 full blocks of 4 in common; each sequence has its own third, and fourth
    assert perfect_blocks(10, [10], 4) == 3
    assert perfect_blocks(10, [12, 12], 4) == 2 + 1 + 1
    assert perfect_blocks(10, [13, 13, 12], 4) == 2 + 2 + 2 + 1
    assert perfect_blocks(10, [6, 13], 4) == 2 + 1 + 2  # the first has the second block in part only
    assert perfect_blocks(3, [5, 5], 4) == 4
    assert perfect_blocks(8, [], 4) == 0


def shared(jobs: list[Job], block_size: int = 16, prefix: int = 0) -> SharingMeter:
    meter = SharingMeter({job.name: job for job in jobs}, block_size, prefix)
    replica = SimulatedReplica(paged_config(block_size=block_size))
    result = simulate_paged(jobs, replica, Meter(), meter)
    assert result.preemptions == 0
    replica.scheduler.check()
    assert replica.scheduler.stats().referenced_blocks == 0
    return meter


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("width", [2, 6])
def test_samples_share_all_they_can(width: int, block_size: int) -> None:
    meter = shared(make_jobs(ALPACA, 2.0, 30, 5, width=width), block_size)
    assert meter.possible > 4
    assert meter.saved == pytest.approx(meter.possible, rel=0.01)


def test_prefixes_are_shared_whole() -> None:
    meter = shared(make_jobs(ALPACA, 10.0, 50, 5, prefix=83), prefix=83)
    assert meter.possible > 30
    assert meter.saved == pytest.approx(meter.possible, rel=0.01)
