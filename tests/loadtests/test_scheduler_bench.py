"""The scheduler's bench measures what it says: loads that run as described, on pools that are full."""

from __future__ import annotations

import pytest

from loadtests.experiments.scheduler import (
    POOLS,
    RUNNING,
    WINDOW,
    Bench,
    Case,
    Cost,
    all_cases,
    growth,
    microseconds,
)


@pytest.mark.parametrize("load", ["decode", "queue", "mix", "families"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_loads_run_as_described(load: str, prefix_caching: bool) -> None:
    bench = Bench(2_048, prefix_caching)
    for _ in range(2):  # one case after the other on the same pool
        case = Case(load, 16, 2_048, prefix_caching)
        assert bench.suits(case)
        waited: list[int] = []
        step = bench.step

        def watched(cost: Cost | None = None, waited: list[int] = waited) -> int:
            ended = step(cost)  # noqa: B023 - the bench's own, whatever the round
            waited.append(bench.scheduler.stats().waiting)
            return ended

        bench.step = watched  # type: ignore[method-assign]
        cost = bench.measure(case, 2 * WINDOW)
        bench.step = step  # type: ignore[method-assign]
        assert len(cost.schedule) == len(cost.commit) == 2 * WINDOW
        assert min(cost.step) > 0
        assert waited[-1] == (1_000 if load == "queue" else 0)
        assert not bench.scheduler.has_work()
        stats = bench.scheduler.stats()
        # The queue never ran.
        assert stats.referenced_blocks == stats.preemptions == stats.prefix_hit_tokens == 0
        if load != "queue":  # which takes most of the cache away
            assert (stats.cached_blocks > 1_500) == prefix_caching
        bench.scheduler.check()


def test_a_figure_is_the_median_of_means() -> None:
    seconds = [1e-6] * WINDOW + [3e-6] * (WINDOW - 1) + [19e-6] + [9e-6] * WINDOW + [100e-6] * (WINDOW - 1)
    assert microseconds(seconds) == pytest.approx(4.0)  # of 1, 4 and 9; a window that is not whole is left out


def test_every_pool_and_load_is_measured_and_the_smallest_pool_has_bars() -> None:
    cases = all_cases()
    loads = ("decode", "queue", "mix", "families")
    assert len({case.title for case in cases}) == len(cases)
    measured = {(case.load, case.num_blocks) for case in cases if case.running == RUNNING[-1]}
    assert measured == {(load, blocks) for load in loads for blocks in POOLS}
    bounded = [case for case in cases if case.is_bounded]
    assert {(case.load, case.running, case.num_blocks) for case in bounded} == {
        (load, 256, 8_192) for load in loads
    }


def test_growth_is_one_pool_over_another_for_each_load() -> None:
    for load in ("decode", "mix"):
        benches = [Bench(blocks, True) for blocks in (8_192, 9_000)]
        assert 0.2 < growth(benches, load, 32) < 5.0
        assert all(bench.scheduler.stats().running == 0 for bench in benches)
