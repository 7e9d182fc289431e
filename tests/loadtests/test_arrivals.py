"""Open and closed loops: who waits for whom."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from loadtests.arrivals import closed_loop, open_loop, poisson
from loadtests.stats import by_turns, median, quantile, ratio


def test_poisson_arrivals_have_their_rate_and_depend_on_the_seed() -> None:
    one = list(poisson(50.0, 200.0, random.Random(1)))
    assert one == list(poisson(50.0, 200.0, random.Random(1)))
    assert one == sorted(one)
    assert one[-1] < 200.0
    assert len(one) == pytest.approx(10_000, rel=0.05)


def test_an_open_loop_waits_for_no_answer() -> None:
    """All are sent although none is answered before the last one has been sent."""
    sent: list[str] = []

    async def everything() -> list[tuple[str, float]]:
        last = asyncio.Event()

        async def send(job: str, due: float) -> tuple[str, float]:
            sent.append(job)
            if len(sent) == 3:
                last.set()
            await last.wait()
            return job, due

        return await open_loop([(0.0, "a"), (0.001, "b"), (0.002, "c")], send, began)

    began = time.perf_counter()
    assert asyncio.run(everything()) == [("a", began), ("b", began + 0.001), ("c", began + 0.002)]


def test_a_closed_loop_has_as_many_open_as_users() -> None:
    open_now = most = 0

    async def send(job: int) -> int:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0)
        open_now -= 1
        return job

    assert sorted(asyncio.run(closed_loop(3, range(20), send))) == list(range(20))
    assert most == 3


def test_statistics() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(range(100), 0.99) == 99
    assert median([]) != median([])  # not a number
    assert (ratio([3.0, 1.0], [4.0]), ratio([1.0], [0.0])) == (0.5, float("inf"))


def test_calls_take_turns() -> None:
    calls: list[str] = []
    times = by_turns(2, lambda: calls.append("a"), lambda: calls.append("b"))
    assert calls == ["a", "b", "a", "b"]
    assert [len(own) for own in times] == [2, 2]
