"""Sharing, whole-or-nothing calls and self-checks of the host pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.kv.block_pool import InvariantError
from engine.kv.host_pool import Content, HostPool


def contents(*blocks: int, generation: int = 1, fill: int = 16) -> list[Content]:
    return [(block, generation, fill) for block in blocks]


def swap_out(pool: HostPool, blocks: list[Content]) -> tuple[list[int], list[tuple[int, int]]]:
    result = pool.swap_out(blocks)
    assert result is not None
    return result


def test_a_table_goes_to_adjacent_blocks_in_its_own_order() -> None:
    pool = HostPool(8)
    assert swap_out(pool, contents(7, 3, 5)) == ([0, 1, 2], [(7, 0), (3, 1), (5, 2)])
    assert (pool.num_blocks, pool.num_free, pool.num_used) == (8, 5, 3)
    pool.check([[0, 1, 2]])


def test_equal_contents_are_shared_and_only_the_rest_is_copied() -> None:
    pool = HostPool(8)
    first, _ = swap_out(pool, contents(7, 3))
    sibling = [*contents(7, 3), *contents(9, fill=4)]
    assert pool.num_to_copy(sibling) == 1
    assert swap_out(pool, sibling) == ([0, 1, 2], [(9, 2)])
    assert pool.num_to_copy(sibling) == 0
    assert [pool.references(block) for block in range(3)] == [2, 2, 1]
    pool.check([first, [0, 1, 2]])


def test_another_generation_or_another_fill_is_other_contents() -> None:
    pool = HostPool(8)
    swap_out(pool, contents(7, generation=1, fill=4))
    assert pool.num_to_copy(contents(7, generation=2, fill=4)) == 1
    assert pool.num_to_copy(contents(7, generation=1, fill=5)) == 1
    assert swap_out(pool, contents(7, generation=1, fill=5)) == ([1], [(7, 1)])
    pool.check([[0], [1]])


def test_equal_contents_in_one_call_take_one_block() -> None:
    pool = HostPool(1)
    assert pool.num_to_copy(contents(7, 7)) == 1
    assert swap_out(pool, contents(7, 7)) == ([0, 0], [(7, 0)])
    pool.check([[0, 0]])
    pool.release([0, 0])
    pool.check([])


def test_contents_are_forgotten_with_the_last_reference() -> None:
    pool = HostPool(4)
    table, _ = swap_out(pool, contents(7, 3))
    pool.share(table)
    pool.release(table)
    assert pool.num_to_copy(contents(7, 3)) == 0
    pool.release(table)
    assert pool.num_to_copy(contents(7, 3)) == 2
    assert pool.num_free == 4
    pool.check([])


def test_too_few_blocks_change_nothing() -> None:
    pool = HostPool(3)
    table, _ = swap_out(pool, contents(7, 3))
    assert pool.swap_out(contents(7, 1, 2)) is None
    assert [pool.references(block) for block in range(3)] == [1, 1, 0]
    pool.check([table])
    assert swap_out(pool, contents(7, 1)) == ([0, 2], [(1, 2)])
    assert pool.num_free == 0
    assert swap_out(pool, contents(3)) == ([1], [])  # shares, so it needs no room


def test_freed_blocks_come_back_in_table_order_and_a_run_goes_on_past_them() -> None:
    pool = HostPool(6)
    first, _ = swap_out(pool, contents(0, 1))
    second, _ = swap_out(pool, contents(2, 3))
    pool.release(second)
    pool.release(first)
    assert swap_out(pool, contents(9))[0] == [0]
    assert swap_out(pool, contents(4, 5, 6))[0] == [1, 2, 3]


def test_nothing_but_the_empty_table_fits_a_pool_without_blocks() -> None:
    pool = HostPool(0)
    assert pool.swap_out(contents(1)) is None
    assert pool.swap_out([]) == ([], [])
    assert (pool.num_to_copy(contents(1)), pool.num_free, pool.num_used) == (1, 0, 0)
    pool.check([[]])
    with pytest.raises(ConfigError, match="swap_space"):
        HostPool(-1)


@pytest.mark.parametrize("wrong", [2, 3, 8, -7])
def test_wrong_calls_are_refused_whole(wrong: int) -> None:
    pool = HostPool(8)
    table, _ = swap_out(pool, contents(7, 3))
    with pytest.raises(InvariantError, match=f"host block {wrong} was shared but nobody holds it"):
        pool.share([0, wrong])
    with pytest.raises(InvariantError, match=f"host block {wrong} was released more often"):
        pool.release([0, wrong])
    with pytest.raises(InvariantError, match="host block 1 was released more often"):
        pool.release([0, 1, 1])
    pool.check([table])


def duplicate_place(pool: HostPool) -> None:
    pool._places[(99, 1, 16)] = 0


def lose_place(pool: HostPool) -> None:
    pool._places.pop((7, 1, 16))
    pool._places[(99, 1, 16)] = 0


def move_place(pool: HostPool) -> None:
    pool._places[(7, 1, 16)] = 1


def lose_contents(pool: HostPool) -> None:
    pool._contents[0] = None


def keep_contents(pool: HostPool) -> None:
    pool._contents[2] = (5, 1, 16)


def extra_reference(pool: HostPool) -> None:
    pool._references[0] += 1


def lost_reference(pool: HostPool) -> None:
    pool._references[1] -= 1


def queue_held(pool: HostPool) -> None:
    pool._link(0)


def lose_free(pool: HostPool) -> None:
    pool._unlink(3)


def miscount(pool: HostPool) -> None:
    pool._num_free += 1


def circle(pool: HostPool) -> None:
    pool._next[4] = 2
    pool._previous[2] = 4


def self_circle(pool: HostPool) -> None:
    pool._next[2] = 2


def tear(pool: HostPool) -> None:
    pool._previous[3] = 4


def tear_end(pool: HostPool) -> None:
    pool._previous[5] = 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (duplicate_place, "3 contents can be found but 2 host blocks are used"),
        (lose_place, r"host block 0 cannot be found by its contents \(7, 1, 16\)"),
        (move_place, "host block 0 cannot be found"),
        (lose_contents, "host block 0 is held but has no contents"),
        (keep_contents, "host block 2 is free but keeps its contents"),
        (extra_reference, "host block 0 has 3 references but is in 2 host tables"),
        (lost_reference, "host block 1 has 0 references but is in 1 host tables"),
        (queue_held, "host block 0 is held and queued as free"),
        (lose_free, "host block 3 is neither held nor queued as free"),
        (miscount, "4 free host blocks are counted but 3 are queued"),
        (circle, "the free queue (is torn before|runs in a circle at) host block 2"),
        (self_circle, "the free queue runs in a circle at host block 2"),
        (tear, "the free queue is torn before host block 3"),
        (tear_end, "the free queue of host blocks is torn at its end"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_check_finds_planted_faults(fault: Callable[[HostPool], None], message: str) -> None:
    pool = HostPool(5)
    tables = [swap_out(pool, contents(7, 3))[0], swap_out(pool, contents(7))[0]]
    pool.check(tables)
    fault(pool)
    with pytest.raises(InvariantError, match=message):
        pool.check(tables)


def test_check_finds_tables_that_are_not_what_was_given_out() -> None:
    pool = HostPool(5)
    table, _ = swap_out(pool, contents(7, 3))
    for tables, message in (
        ([[0]], "host block 1 has 1 references but is in 0"),
        ([table, [0]], "host block 0 has 1 references but is in 2"),
        ([table, [4]], "host block 4 has 0 references but is in 1"),
        ([table, [5]], "names block 5, which does not exist"),
        ([table, [-1]], "names block -1, which does not exist"),
    ):
        with pytest.raises(InvariantError, match=message):
            pool.check(tables)


content = st.tuples(st.integers(0, 4), st.integers(1, 2), st.integers(1, 2))
operation = st.one_of(
    st.tuples(st.just("out"), st.lists(content, max_size=6)),
    st.tuples(st.just("share"), st.integers(0, 7)),
    st.tuples(st.just("release"), st.integers(0, 7)),
    st.tuples(st.just("misuse"), st.integers(0, 7)),
)


@settings(derandomize=True, max_examples=300, deadline=None, database=None)
@given(size=st.integers(0, 8), operations=st.lists(operation, max_size=40))
def test_any_sequence_of_calls_keeps_what_each_table_holds(
    size: int, operations: list[tuple[str, list[Content] | int]]
) -> None:
    pool = HostPool(size)
    live: list[tuple[list[int], list[Content]]] = []
    memory: dict[int, Content] = {}  # what the copies asked for would have left in the host blocks
    for name, argument in operations:
        before = [pool.references(block) for block in range(size)]
        if isinstance(argument, list):
            needed, room = pool.num_to_copy(argument), pool.num_free
            result = pool.swap_out(argument)
            if result is None:
                assert needed > room
                assert [pool.references(block) for block in range(size)] == before
            else:
                table, copies = result
                assert len(copies) == needed == room - pool.num_free
                missing = {host: found for host, found in zip(table, argument, strict=True) if not before[host]}
                assert {host for _, host in copies} == set(missing)
                memory.update(missing)
                assert all(missing[host][0] == device for device, host in copies)
                live.append((table, argument))
        elif live:
            index = argument % len(live)
            table, held = live[index]
            if name == "share":
                pool.share(table)
                live.append((list(table), held))
            elif name == "release":
                pool.release(table)
                del live[index]
            elif table:
                with pytest.raises(InvariantError):
                    pool.release([*table, *[table[0]] * pool.references(table[0])])
        for table, held in live:
            assert [memory[host] for host in table] == held
        pool.check([table for table, _ in live])
    for table, _ in live:
        pool.release(table)
    pool.check([])
    assert pool.num_free == size
