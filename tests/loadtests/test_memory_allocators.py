from __future__ import annotations

import random

from loadtests.experiments.memory.allocators import BuddyAllocator, FirstFitAllocator


def test_runs_are_the_next_power_of_two() -> None:
    assert [BuddyAllocator.rounded(slots) for slots in (1, 2, 3, 4, 5, 25, 32, 33, 2048)] == [
        1, 2, 4, 4, 8, 32, 32, 64, 2048,
    ]  # fmt: skip


def test_splits_and_merges_by_hand() -> None:
    buddy = BuddyAllocator(16)
    assert buddy.allocate(3) == 0  # 16 -> 8 + (4 + [4])
    assert buddy.allocate(5) == 8
    assert buddy.allocate(4) == 4
    assert buddy.allocate(1) is None
    buddy.release(0)
    buddy.release(8)
    assert buddy.allocate(9) is None  # 12 slots are free, but no run of 16
    assert buddy.allocate(8) == 8
    buddy.release(8)
    buddy.release(4)
    assert buddy.allocate(16) == 0


def test_pool_of_any_size_is_its_binary_digits() -> None:
    buddy = BuddyAllocator(15_700)  # 8,192 + 4,096 + 2,048 + ... hold 7 runs of 2,048
    runs = [buddy.allocate(2_048) for _ in range(8)]
    assert runs.pop() is None
    assert sorted(run for run in runs if run is not None) == [*range(0, 7 * 2_048, 2_048)]
    assert buddy.allocate(1_024) == 14_336
    assert buddy.allocate(1_024) is None


def test_digits_never_merge_with_each_other() -> None:
    buddy = BuddyAllocator(6)  # runs of 4 and 2
    assert buddy.allocate(4) == 0
    assert buddy.allocate(2) == 4
    buddy.release(4)
    buddy.release(0)
    assert buddy.allocate(5) is None
    assert buddy.allocate(4) == 0


def test_random_use_keeps_runs_apart_and_loses_none() -> None:
    rng = random.Random(1)
    buddy = BuddyAllocator(1_000)
    taken: dict[int, int] = {}
    for _ in range(3_000):
        if taken and rng.random() < 0.5:
            start = rng.choice(list(taken))
            del taken[start]
            buddy.release(start)
        else:
            slots = rng.randint(1, 200)
            run = buddy.allocate(slots)
            if run is not None:
                size = BuddyAllocator.rounded(slots)
                assert run % size == 0
                assert run + size <= 1_000
                assert all(run + size <= other or other + length <= run for other, length in taken.items())
                taken[run] = size
    for start in taken:
        buddy.release(start)
    assert [buddy.allocate(size) for size in (512, 256, 128, 64, 32, 8)] == [0, 512, 768, 896, 960, 992]


def test_first_fit_takes_the_first_run_that_is_long_enough() -> None:
    pool = FirstFitAllocator(12)
    assert [pool.allocate(slots) for slots in (3, 4, 5)] == [0, 3, 7]
    assert pool.allocate(1) is None
    pool.release(0)
    pool.release(7)
    assert pool.allocate(4) == 7  # 3 slots are free before, too few
    assert pool.allocate(2) == 0
    pool.release(3)
    assert pool.allocate(5) == 2  # the slot that was left there and the 4 after it are one run
    assert pool.allocate(2) is None  # 1 slot is free


def test_first_fit_keeps_runs_apart_and_loses_none() -> None:
    rng = random.Random(2)
    pool = FirstFitAllocator(1_000)
    taken: dict[int, int] = {}
    for _ in range(3_000):
        if taken and rng.random() < 0.5:
            start = rng.choice(list(taken))
            del taken[start]
            pool.release(start)
        else:
            slots = rng.randint(1, 200)
            start = pool.allocate(slots)
            ends = [0, *(first + length for first, length in sorted(taken.items()))]
            begins = [*sorted(taken), 1_000]
            fits = [end for end, begin in zip(ends, begins, strict=True) if begin - end >= slots]
            assert start == (fits[0] if fits else None)
            if start is not None:
                taken[start] = slots
    for start in taken:
        pool.release(start)
    assert pool.allocate(1_000) == 0
