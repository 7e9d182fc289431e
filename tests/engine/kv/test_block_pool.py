"""Reference counts, eviction order and whole-or-nothing calls of the block pool."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from engine.kv.block_pool import NO_BLOCK, BlockPool, InvariantError


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


def test_the_block_that_follows_is_preferred_to_the_head_of_the_queue() -> None:
    pool = BlockPool(8, 16)
    first, second = take(pool, 2), take(pool, 2)
    pool.release(second)
    pool.release(first)  # the queue begins with 0
    assert take(pool, 2, after=4) == [5, 6]
    pool.check([[5, 6]])


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


def test_referenced_blocks_are_counted_however_many_tables_hold_them() -> None:
    pool = BlockPool(8, 16)
    held = take(pool, 3)
    pool.share(held[:1])
    assert pool.count_referenced([*held, 5, NO_BLOCK]) == 3
    assert pool.count_referenced([]) == 0


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


def test_generations_count_how_often_a_block_was_handed_out() -> None:
    pool = BlockPool(2, 16)
    assert [pool.generation(0), pool.generation(1)] == [0, 0]
    first = take(pool, 2)
    pool.key(0)
    pool.release(first)
    pool.share([0])  # found again: nobody wrote to it
    assert [pool.generation(0), pool.generation(1)] == [1, 1]
    pool.release([0])
    assert take(pool, 2) == [0, 1]  # one was cached, one free
    assert [pool.generation(0), pool.generation(1)] == [2, 2]
    assert pool.allocate(1) is None
    assert [pool.generation(0), pool.generation(1)] == [2, 2]


def test_the_high_water_mark_only_rises() -> None:
    pool = BlockPool(6, 16)
    assert pool.high_water_mark == 0
    first = pool.allocate(2)
    assert first is not None
    pool.allocate(2)
    assert pool.high_water_mark == 4
    pool.release(first)
    pool.allocate(1)  # used again
    assert pool.high_water_mark == 4


def test_absent_blocks_are_passed_over() -> None:
    pool = BlockPool(4, 16)
    table = [NO_BLOCK, NO_BLOCK, *take(pool, 2)]
    pool.check([table])
    pool.key(1)
    pool.share(table)
    pool.check([table, table])
    pool.release(table)
    pool.release(table)
    assert counts(pool) == (0, 1, 3)
    pool.share([NO_BLOCK, 1])  # out of the queue of cached blocks
    pool.check([[NO_BLOCK, 1]])
    with pytest.raises(InvariantError, match="block 0 was shared after it was freed"):
        pool.share([NO_BLOCK, 1, 0])
    with pytest.raises(InvariantError, match="block 0 was released more often"):
        pool.release([NO_BLOCK, 1, 0])
    with pytest.raises(InvariantError, match="block 1 was released more often"):
        pool.release([NO_BLOCK, NO_BLOCK, 1, 1])
    with pytest.raises(InvariantError, match="keyed but nobody holds it"):
        pool.key(NO_BLOCK)
    pool.unkey(NO_BLOCK)
    pool.check([[1, NO_BLOCK]])
    assert (pool.references(NO_BLOCK), pool.is_keyed(NO_BLOCK), pool.generation(NO_BLOCK)) == (0, False, 0)
    pool.release([NO_BLOCK])
    pool.release([])
    pool.check([[1]])
