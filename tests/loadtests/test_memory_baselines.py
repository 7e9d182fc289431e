"""Each baseline on a few requests, against steps worked out by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loadtests.experiments.memory.allocators import Allocator, BuddyAllocator, FirstFitAllocator
from loadtests.experiments.memory.contiguous import Reservation, simulate_contiguous
from loadtests.experiments.memory.jobs import Job
from loadtests.experiments.memory.measure import Meter, Result, Split
from loadtests.experiments.simulated_replica import StepCost

SECOND = StepCost(1.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # every step takes a second


def job(name: str, prompt: int, output: int, arrival: float = 0.0) -> Job:
    return Job(name, arrival, tuple(range(prompt)), output)


def run(
    jobs: list[Job],
    reservation: Reservation,
    slots: int,
    saturated: bool = False,
    allocator: Callable[[int], Allocator] = BuddyAllocator,
    cost: StepCost = SECOND,
) -> Result:
    meter = Meter(0, saturated, slots)
    return simulate_contiguous(jobs, reservation, allocator(slots), cost, meter)


def parts(split: Split) -> tuple[float, float, float, float]:
    return (split.tokens, split.reserved, split.internal, split.external)


def test_slots_of_each_reservation() -> None:
    one = job("a", 10, 25)
    assert Reservation.MAX.slots(one) == 2_048
    assert Reservation.POW2.slots(one) == 10 + 32
    assert Reservation.ORACLE.slots(one) == 35
    assert Reservation.POW2.slots(job("b", 1_800, 200)) == 2_048


def test_oracle_by_hand() -> None:
    # 6 slots, rounded to 8: both run at once in a pool of 16, each for 3 steps, with 3, 4, 5 tokens stored.
    result = run([job("a", 3, 3), job("b", 3, 3)], Reservation.ORACLE, 16)
    assert result.steps == 3
    assert result.batch == 2
    assert parts(result.split) == (8, 4, 0, 4)
    assert result.token_share == pytest.approx(100 * 8 / 12)
    assert result.seconds == 3.0


def test_first_fit_wastes_no_slots_by_rounding() -> None:
    # 6 slots each: the buddy allocator rounds them to 8 and fits two into 18, first fit three.
    jobs = [job(name, 3, 3) for name in "abc"]
    by_buddies, first_fit = (
        run(jobs, Reservation.ORACLE, 18, allocator=allocator)
        for allocator in (BuddyAllocator, FirstFitAllocator)
    )
    assert (by_buddies.batch, first_fit.batch) == (1.5, 3)
    assert first_fit.split.external == 0


def test_pow2_by_hand() -> None:
    # 3 + 4 slots, rounded to 8; 6 are ever used, so 1 of each is internal and 1 lost by rounding.
    result = run([job("a", 3, 3), job("b", 3, 3)], Reservation.POW2, 16)
    assert parts(result.split) == (8, 4, 2, 2)


def test_max_by_hand() -> None:
    # 2 runs of 2,048 and 904 slots left over; the third request waits for the first one's run.
    jobs = [job("a", 3, 2), job("b", 3, 4), job("c", 3, 2)]
    result = run(jobs, Reservation.MAX, 5_000)
    assert result.steps == 4  # a: steps 1-2, b: 1-4, c: 3-4
    assert result.batch == 2
    # stored by step: 3 + 3, 4 + 4, 5 + 3, 6 + 4
    assert result.split.tokens == (6 + 8 + 8 + 10) / 4
    assert result.split.reserved == (12 - 6 + 12 - 8 + 12 - 8 + 12 - 10) / 4
    assert result.split.internal == 2 * 2_048 - 12
    assert result.split.external == 5_000 - 2 * 2_048
    assert result.seconds == 4.0


def test_first_come_first_served_blocks_a_small_one() -> None:
    # "b" needs 16 slots of which 8 are free; "c" would fit but is behind it.
    jobs = [job("a", 4, 4), job("b", 8, 8), job("c", 2, 2)]
    result = run(jobs, Reservation.ORACLE, 16)
    assert result.steps == 4 + 8 + 2
    assert result.batch == 1


def test_only_saturated_steps_are_measured() -> None:
    jobs = [job("a", 4, 4), job("b", 8, 8)]
    result = run(jobs, Reservation.ORACLE, 16, saturated=True)
    assert result.split.tokens == (4 + 5 + 6 + 7) / 4  # while "b" waits
    assert result.throughput == 1 / 4


def test_what_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"runs of 35 slots"):
        run([job("a", 10, 25)], Reservation.ORACLE, 32)


def test_idle_time_passes() -> None:
    result = run([job("a", 1, 1), job("b", 1, 1, arrival=10.0)], Reservation.ORACLE, 4)
    assert result.seconds == 11.0


def test_cost_of_a_step_counts_prompts_rows_and_context() -> None:
    cost = StepCost(1.0, 0.1, 0.01, 0.001, 0.0, 0.0)
    result = run([job("a", 10, 3)], Reservation.ORACLE, 16, cost=cost)
    # the prompt, then two decodes that read 10 and 11 tokens
    assert result.seconds == pytest.approx((1.0 + 1.0) + (1.01 + 0.010) + (1.01 + 0.011))
