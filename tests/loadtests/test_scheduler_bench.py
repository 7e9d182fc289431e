"""The scheduler's bench measures what it says: loads that run as described, on pools that are full."""

from __future__ import annotations

import pytest

from loadtests.experiments.scheduler import LOADS, WINDOW, Bench


@pytest.mark.parametrize("load", LOADS)
def test_loads_run_as_described(load: str) -> None:
    bench = Bench(2_048, load, 2 * WINDOW, running=16)
    bench.seconds.clear()
    bench.run(2 * WINDOW)
    assert len(bench.seconds) == 2 * WINDOW
    assert min(bench.seconds) > 0
    stats = bench.scheduler.stats()
    assert (stats.running, stats.waiting) == (16, 1_000 if load == "queue" else 0)
    assert bench.pool.num_free == 0
    assert stats.preemptions == stats.prefix_hit_tokens == 0
    bench.pool.release(bench.held)
    bench.scheduler.check()
