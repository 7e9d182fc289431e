"""Reference counts, eviction order and whole-or-nothing calls of the block pool."""

from __future__ import annotations

import pytest

from engine.block_pool import BlockPool, InvariantError
from engine.errors import ConfigError


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.num_referenced, pool.num_cached, pool.num_free


def take(pool: BlockPool, count: int, after: int | None = None) -> list[int]:
    blocks = pool.allocate(count, after)
    assert blocks is not None
    return blocks


def test_fresh_pool_hands_out_adjacent_blocks_in_ascending_order() -> None:
    pool = BlockPool(8, 16)
    assert take(pool, 3) == [0, 1, 2]
    assert take(pool, 2) == [3, 4]
    assert counts(pool) == (5, 0, 3)


def test_too_few_blocks_change_nothing() -> None:
    pool = BlockPool(4, 16)
    held = take(pool, 2)
    assert pool.allocate(3) is None
    assert counts(pool) == (2, 0, 2)
    pool.check([held])
    assert take(pool, 2) == [2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_a_table_grows_into_the_block_that_follows_it() -> None:
    pool = BlockPool(8, 16)
    first, second = take(pool, 2), take(pool, 2)
    assert take(pool, 1, after=first[-1]) == [4]  # block 2 is held, so the head of the queue
    pool.release(second)
    assert take(pool, 1, after=first[-1]) == [2]
    assert take(pool, 1, after=7) == [3]  # nothing follows the last block


def test_freed_blocks_come_back_in_table_order_before_untouched_ones() -> None:
    pool = BlockPool(6, 16)
    table = take(pool, 3)
    pool.release(table)
    assert take(pool, 2) == [0, 1]
    pool.check([[0, 1]])


def test_unkeyed_first_then_least_recently_used_and_tails_before_heads() -> None:
    pool = BlockPool(6, 16)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    older, newer = take(pool, 2), take(pool, 3)
    for block in (*older, *newer[:2]):
        pool.key(block)
    pool.release(older)
    pool.release(newer)
    assert counts(pool) == (0, 4, 2)
    assert take(pool, 2) == [4, 5]
    assert evicted == []
    order = [take(pool, 1)[0] for _ in range(4)]
    assert order == evicted == [1, 0, 3, 2]
    assert pool.allocate(1) is None
    assert not any(pool.is_keyed(block) for block in range(6))


def test_sharing_a_cached_block_saves_it_from_eviction() -> None:
    pool = BlockPool(3, 16)
    table = take(pool, 3)
    for block in table:
        pool.key(block)
    pool.release(table)
    pool.share([1])
    assert counts(pool) == (1, 2, 0)
    assert take(pool, 2) == [0, 2]
    pool.check([[1], [0, 2]])
    pool.share([1, 0])
    pool.check([[1], [0, 2], [1, 0]])
    pool.release([1])
    assert pool.references(1) == 1


def test_unkeying_frees_a_cached_block_and_only_marks_a_held_one() -> None:
    pool = BlockPool(2, 16)
    table = take(pool, 2)
    pool.key(0)
    pool.key(1)
    pool.release([1])
    pool.unkey(0)
    pool.unkey(1)
    pool.unkey(1)
    assert counts(pool) == (1, 0, 1)
    pool.check([[0]])
    pool.release([0])
    assert counts(pool) == (0, 0, 2)
    assert table == [0, 1]


def test_wrong_calls_are_refused_whole() -> None:
    pool = BlockPool(4, 16)
    held = take(pool, 2)
    with pytest.raises(InvariantError, match="block 2 was shared after it was freed"):
        pool.share([0, 2])
    with pytest.raises(InvariantError, match="block 3 was released more often"):
        pool.release([0, 3])
    with pytest.raises(InvariantError, match="block 1 was released more often"):
        pool.release([0, 1, 1])
    with pytest.raises(InvariantError, match="block 2 was keyed but nobody holds it"):
        pool.key(2)
    pool.check([held])
    assert [pool.references(block) for block in range(4)] == [1, 1, 0, 0]


def test_blocks_for_rounds_up() -> None:
    pool = BlockPool(4, 16)
    assert [pool.blocks_for(tokens) for tokens in (0, 1, 15, 16, 17, 32)] == [0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize(("num_blocks", "block_size", "name"), [(0, 16, "num_blocks"), (4, 0, "block_size")])
def test_sizes_must_be_positive(num_blocks: int, block_size: int, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        BlockPool(num_blocks, block_size)


def pool_with_all_states() -> tuple[BlockPool, list[list[int]]]:
    """Blocks 0 and 1 held (0 keyed), 2 and 3 cached, 4 and 5 free."""
    pool = BlockPool(6, 16)
    held, cached = take(pool, 2), take(pool, 2)
    for block in (0, 2, 3):
        pool.key(block)
    pool.release(cached)
    pool.check([held])
    return pool, [held]


def test_check_finds_tables_that_disagree() -> None:
    pool, _ = pool_with_all_states()
    for tables, message in [
        ([], "block 0 has 1 references but is in 0 block tables"),
        ([[0, 1], [1]], "block 1 has 1 references but is in 2 block tables"),
        ([[0, 1, 4]], "block 4 has 0 references but is in 1 block tables"),
        ([[0, 1, 6]], "block 6, which does not exist"),
    ]:
        with pytest.raises(InvariantError, match=message):
            pool.check(tables)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reference", "block 0 has 2 references"),
        ("negative", "block 4 has -1 references"),
        ("held_and_free", "block 1 is in 2 states"),
        ("lost", "block 4 is in 0 states"),
        ("keyed_free", "block 5 is keyed but queued as free"),
        ("unkeyed_cached", "block 2 is not keyed but queued as cached"),
        ("count", "are counted but"),
        ("torn", "torn"),
        ("circle", "runs in a circle"),
    ],
)
def test_check_finds_planted_faults(fault: str, message: str) -> None:
    pool, tables = pool_with_all_states()
    match fault:
        case "reference":
            pool._references[0] += 1
        case "negative":
            pool._references[4] = -1
        case "held_and_free":
            pool._link(1)
        case "lost":
            pool._unlink(4)
        case "keyed_free":
            pool._keyed[5] = 1
        case "unkeyed_cached":
            pool._keyed[2] = 0
        case "count":
            pool._num_cached += 1
        case "torn":
            pool._previous[5] = 0
        case "circle":
            pool._next[5] = 4
            pool._previous[4] = 5
            pool._next[pool._free_end] = 4
            pool._previous[4] = pool._free_end
    with pytest.raises(InvariantError, match=message):
        pool.check(tables)
