"""The scheduler's bench measures what it says: loads that run as described, on pools that are full."""

from __future__ import annotations

import pytest

from loadtests.experiments.scheduler import LOADS, WINDOW, Bench, growth, microseconds


@pytest.mark.parametrize("load", LOADS)
def test_loads_run_as_described(load: str) -> None:
    bench = Bench(2_048, running=16)
    for _ in range(2):  # one after the other on the same pool
        waited: list[int] = []
        step = bench.step

        def watched(seconds: list[float] | None = None, waited: list[int] = waited) -> int:
            ended = step(seconds)  # noqa: B023 - the bench's own, whatever the round
            waited.append(bench.scheduler.stats().waiting)
            return ended

        bench.step = watched  # type: ignore[method-assign]
        seconds = bench.measure(load, 2 * WINDOW)
        bench.step = step  # type: ignore[method-assign]
        assert len(seconds) == 2 * WINDOW
        assert min(seconds) > 0
        assert waited[-1] == (1_000 if load == "queue" else 0)
        assert not bench.scheduler.has_work()
        stats = bench.scheduler.stats()
        # The queue never ran.
        assert stats.referenced_blocks == stats.preemptions == stats.prefix_hit_tokens == 0
        if load != "queue":  # which takes most of the cache away
            assert stats.cached_blocks > 1_500
        bench.scheduler.check()


def test_a_figure_is_the_median_of_means() -> None:
    seconds = [1e-6] * WINDOW + [3e-6] * (WINDOW - 1) + [19e-6] + [9e-6] * WINDOW + [100e-6] * (WINDOW - 1)
    assert microseconds(seconds) == pytest.approx(4.0)  # of 1, 4 and 9; a window that is not whole is left out


def test_growth_is_one_pool_over_another_for_each_load() -> None:
    for load in ("decode", "mix"):
        benches = [Bench(blocks) for blocks in (8_192, 9_000)]
        assert 0.2 < growth(benches, load, 32) < 5.0
        assert all(bench.scheduler.stats().running == 0 for bench in benches)
