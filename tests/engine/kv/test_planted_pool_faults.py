"""The check of the block pool finds each fault that it is there for, and needs each of its conditions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from faulty_states import Check, Fault, Faults, assert_all_needed, assert_found

from engine.kv.block_pool import BlockPool


def pool_with_all_states() -> tuple[BlockPool, list[list[int]]]:
    """Blocks 0 and 1 held (0 keyed), 2 and 3 cached, 4 and 5 free."""
    pool = BlockPool(6, 16)
    held, cached = pool.allocate(2), pool.allocate(2)
    assert held is not None
    assert cached is not None
    for block in (0, 2, 3):
        pool.key(block)
    pool.release(cached)
    pool.check([held])
    return pool, [held]


def pool_fault(plant: Callable[[BlockPool, list[list[int]]], object]) -> Fault:
    def build() -> Check:
        pool, tables = pool_with_all_states()
        plant(pool, tables)
        return lambda: pool.check(tables)

    return build


def circle(pool: BlockPool, tables: list[list[int]]) -> None:
    """The queue of free blocks leads from 5 back to 4."""
    pool._next[pool._free_end], pool._previous[4] = 4, pool._free_end
    pool._next[4], pool._previous[5] = 5, 4
    pool._next[5] = 4


def into_the_other_queue(pool: BlockPool, tables: list[list[int]]) -> None:
    """The queue of free blocks leads to the end of the queue of cached ones."""
    pool._next[pool._free_end] = pool._cached_end


POOL_FAULTS: Faults = {
    "a reference too many": (
        pool_fault(lambda pool, tables: pool._references.__setitem__(0, 2)),
        "block 0 has 2 references but is in 1 block tables",
    ),
    "a negative count": (
        pool_fault(lambda pool, tables: pool._references.__setitem__(4, -1)),
        "block 4 has -1 references but is in 0 block tables",
    ),
    "a count of shared blocks too high": (
        pool_fault(lambda pool, tables: setattr(pool, "_num_shared", 1)),
        "1 shared blocks are counted but there are 0",
    ),
    "a table too many": (
        pool_fault(lambda pool, tables: tables.append([1])),
        "block 1 has 1 references but is in 2 block tables",
    ),
    "a table lost": (
        pool_fault(lambda pool, tables: tables.clear()),
        "block 0 has 1 references but is in 0 block tables",
    ),
    "a free block in a table": (
        pool_fault(lambda pool, tables: tables.append([4])),
        "block 4 has 0 references but is in 1 block tables",
    ),
    "a block past the end": (
        pool_fault(lambda pool, tables: tables.append([6])),
        "names block 6, which does not exist",
    ),
    "a negative block": (
        pool_fault(lambda pool, tables: tables.append([-2])),
        "names block -2, which does not exist",
    ),
    "absent blocks held": (
        pool_fault(lambda pool, tables: pool._references.__setitem__(-1, 1)),
        "the place of absent blocks is held or keyed",
    ),
    "absent blocks keyed": (
        pool_fault(lambda pool, tables: pool._keyed.__setitem__(-1, 1)),
        "the place of absent blocks is held or keyed",
    ),
    "held and free": (
        pool_fault(lambda pool, tables: pool._link(1)),
        "block 1 is in 2 states; it must be in one",
    ),
    "held and cached": (
        pool_fault(lambda pool, tables: pool._link(0)),
        "block 0 is in 2 states; it must be in one",
    ),
    "in no queue": (
        pool_fault(lambda pool, tables: pool._unlink(4)),
        "block 4 is in 0 states; it must be in one",
    ),
    "keyed among free ones": (
        pool_fault(lambda pool, tables: pool._keyed.__setitem__(5, 1)),
        "block 5 is keyed but queued as free",
    ),
    "unkeyed among cached ones": (
        pool_fault(lambda pool, tables: pool._keyed.__setitem__(2, 0)),
        "block 2 is not keyed but queued as cached",
    ),
    "free ones miscounted": (
        pool_fault(lambda pool, tables: setattr(pool, "_num_free", 3)),
        "3 free and 2 cached blocks are counted but 2 and 2 are queued",
    ),
    "cached ones miscounted": (
        pool_fault(lambda pool, tables: setattr(pool, "_num_cached", 1)),
        "2 free and 1 cached blocks are counted but 2 and 2 are queued",
    ),
    "a queue torn in its middle": (
        pool_fault(lambda pool, tables: pool._previous.__setitem__(5, 0)),
        "the free queue is torn before block 5",
    ),
    "a queue torn at its end": (
        pool_fault(lambda pool, tables: pool._previous.__setitem__(pool._cached_end, 3)),
        "the cached queue is torn at its end",
    ),
    "a queue in a circle": (pool_fault(circle), "the free queue runs in a circle at block 4"),
    "a queue into the other": (
        pool_fault(into_the_other_queue),
        "the free queue leads to 7, which is no block",
    ),
    "a queue to nowhere": (
        pool_fault(lambda pool, tables: pool._next.__setitem__(5, -8)),
        "the free queue leads to -8, which is no block",
    ),
}


@pytest.mark.parametrize("name", POOL_FAULTS)
def test_each_planted_fault_is_found(name: str) -> None:
    assert_found(*POOL_FAULTS[name])


@pytest.mark.parametrize("check", ["check", "_walk"])
def test_no_condition_can_be_left_out(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_all_needed(BlockPool, check, POOL_FAULTS, monkeypatch)
