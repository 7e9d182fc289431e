"""Hits, copies, eviction and collisions of the prefix tree."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
from kv_simulation import constant_hash

from engine.kv.block_pool import BlockPool, InvariantError
from engine.kv.prefix_index import PrefixIndex, PrefixNode

ROOT = ("model", 2, "", "")


class Tables:
    """A pool of blocks of two tokens, its index, and the tables in use."""

    def __init__(self, num_blocks: int = 8, hash_tokens: Callable[[tuple[int, ...]], int] = hash) -> None:
        self.pool = BlockPool(num_blocks, 2)
        self.index = PrefixIndex(self.pool, hash_tokens)
        self.held: list[list[int]] = []

    def compute(self, tokens: list[int], root: object = ROOT) -> tuple[list[int], PrefixNode | None]:
        """Take blocks for all tokens, sharing nothing, and make the full ones findable."""
        table = self.pool.allocate(self.pool.blocks_for(len(tokens)))
        assert table is not None
        self.held.append(table)
        node = self.index.extend(root, None, tokens, table, len(tokens) // 2)
        self.check()
        return table, node

    def release(self, table: list[int]) -> None:
        self.held.remove(table)
        self.pool.release(table)
        self.check()

    def hit(self, tokens: list[int], root: object = ROOT, most: int | None = None) -> list[int]:
        most = len(tokens) if most is None else most
        return self.index.blocks(self.index.match(root, tokens, most))

    def check(self) -> None:
        self.pool.check(self.held)
        self.index.check()


@pytest.fixture(params=[hash, constant_hash], ids=["hash", "constant"])
def tables(request: pytest.FixtureRequest) -> Tables:
    return Tables(8, request.param)


def test_longest_run_of_full_blocks(tables: Tables) -> None:
    table, _ = tables.compute([1, 2, 3, 4, 5])
    assert tables.hit([1, 2, 3, 4, 5, 6]) == table[:2]
    assert tables.hit([1, 2, 3, 9]) == table[:1]
    assert tables.hit([1, 9]) == []
    assert tables.hit([3, 4]) == []  # the tokens of a block count only after those before them
    assert tables.hit([1]) == []


@pytest.mark.parametrize(("most", "blocks"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3)])
def test_cap(tables: Tables, most: int, blocks: int) -> None:
    table, _ = tables.compute([1, 2, 3, 4, 5, 6])
    assert tables.hit([1, 2, 3, 4, 5, 6], most=most) == table[:blocks]


def test_a_colliding_key_never_gives_another_prompts_block() -> None:
    tables = Tables(8, constant_hash)
    first, _ = tables.compute([1, 1, 7, 7, 9, 9])
    second, _ = tables.compute([2, 2, 8, 8])
    assert tables.hit([2, 2, 8, 8, 9, 9]) == second
    assert tables.hit([1, 1, 7, 7, 9, 9]) == first
    assert tables.hit([1, 1, 8, 8]) == first[:1]


@pytest.mark.parametrize(
    "other", [("model", 2, "", "salt"), ("model", 2, "salt", ""), ("model", 4, "", ""), ("model2", 2, "", "")]
)
def test_roots_share_nothing(tables: Tables, other: object) -> None:
    mine, _ = tables.compute([1, 2, 3, 4])
    assert tables.hit([1, 2, 3, 4], other) == []
    theirs, _ = tables.compute([1, 2, 3, 4], other)
    assert tables.hit([1, 2, 3, 4], other) == theirs
    assert tables.hit([1, 2, 3, 4]) == mine
    assert tables.index.num_roots == 2


def test_a_match_is_a_pure_query(tables: Tables) -> None:
    first, _ = tables.compute([1, 2])
    second, _ = tables.compute([3, 4])
    tables.release(first)
    tables.release(second)
    assert tables.hit([1, 2]) == first
    assert tables.pool.num_cached == 2
    tables.held.append(tables.pool.allocate(7) or [])
    tables.check()
    assert tables.hit([1, 2]) == []  # still the least recently used, in spite of the query
    assert tables.hit([3, 4]) == second


def test_a_hint_goes_on_from_the_last_match(tables: Tables) -> None:
    table, _ = tables.compute([1, 2, 3, 4])
    node = tables.index.match(ROOT, [1, 2, 3, 4], 2)
    assert node is not None
    assert node.depth == 1
    further = tables.index.match(ROOT, [1, 2, 3, 4], 4, node)
    assert tables.index.blocks(further) == table
    tables.release(table)
    tables.held.append(tables.pool.allocate(8) or [])
    assert not node.alive
    assert tables.index.match(ROOT, [1, 2, 3, 4], 4, further) is None


def test_a_table_grows_block_by_block(tables: Tables) -> None:
    tokens = [1, 2, 3, 4, 5, 6]
    table = tables.pool.allocate(3)
    assert table is not None
    tables.held.append(table)
    node = None
    for full in range(4):
        node = tables.index.extend(ROOT, node, tokens, table, full)
        tables.check()
        assert tables.hit(tokens) == table[:full]
    assert len(tables.index) == 3


def test_equal_blocks_map_to_the_first_copy_while_it_is_held(tables: Tables) -> None:
    first, node = tables.compute([1, 2, 3, 4])
    second, same = tables.compute([1, 2, 3, 4])
    assert same is node
    assert tables.hit([1, 2, 3, 4]) == first
    assert not any(tables.pool.is_keyed(block) for block in second)
    tables.release(second)
    assert (tables.pool.num_cached, tables.pool.num_free) == (0, 6)


def test_a_node_moves_to_the_copy_in_use_and_frees_the_other(tables: Tables) -> None:
    first, node = tables.compute([1, 2, 3, 4])
    tables.release(first)
    assert tables.pool.num_cached == 2
    second, same = tables.compute([1, 2, 3, 4])
    assert same is node
    assert tables.hit([1, 2, 3, 4]) == second
    assert (tables.pool.num_referenced, tables.pool.num_cached, tables.pool.num_free) == (2, 0, 6)


def test_evicting_an_ancestor_forgets_what_hangs_below_it(tables: Tables) -> None:
    first, _ = tables.compute([1, 2])
    second, deep = tables.compute([1, 2, 3, 4])  # block 2 hangs below block 0; block 1 is a copy of that one
    third, _ = tables.compute([1, 2, 3, 4, 5, 6])  # and block 5 hangs below block 2
    assert tables.hit([1, 2, 3, 4, 5, 6]) == [first[0], second[1], third[2]]
    tables.release(first)
    tables.release(third)
    assert (tables.pool.num_cached, tables.pool.num_free) == (2, 4)
    rest = tables.pool.allocate(5)
    assert rest is not None
    tables.held.append(rest)
    tables.check()
    # Block 0 was used least recently: its node is gone, with those of block 2 (held) and of block 5 (free now).
    assert deep is not None
    assert not deep.alive
    assert (deep.parent, deep.sibling, deep.children) == (None, None, {})  # holders keep no tree in memory
    assert tables.hit([1, 2, 3, 4, 5, 6]) == []
    assert (tables.pool.num_cached, tables.pool.num_free) == (0, 1)
    assert (len(tables.index), tables.index.num_roots) == (0, 0)
    # Its holder goes on and makes the whole table findable anew.
    tokens = [1, 2, 3, 4, 7, 8]
    more = tables.pool.allocate(1)
    assert more is not None
    second.extend(more)
    tables.index.extend(ROOT, deep, tokens, second, 3)
    tables.check()
    assert tables.hit(tokens) == second


def test_roots_and_nodes_leave_no_memory_behind() -> None:
    def nodes_in_memory() -> int:
        gc.collect()
        return sum(isinstance(thing, PrefixNode) for thing in gc.get_objects())

    tables = Tables(4)
    before = nodes_in_memory()
    for salt in range(100):
        table, _ = tables.compute([1, 2, 3, 4], ("model", 2, "", str(salt)))
        tables.release(table)
    assert (len(tables.index), tables.index.num_roots) == (4, 2)
    del _
    assert nodes_in_memory() - before == 6


@pytest.mark.parametrize("count", [2, 3, 5])
def test_colliding_siblings_are_removed_one_by_one(count: int) -> None:
    tables = Tables(count, constant_hash)
    texts = [[token, token] for token in range(count)]
    for text in texts:
        table, _ = tables.compute(text)
        tables.release(table)
    for gone in range(count):
        assert [bool(tables.hit(text)) for text in texts] == [position >= gone for position in range(count)]
        tables.held.append(tables.pool.allocate(1) or [])
        tables.check()


def test_reset_forgets_everything_and_leaves_held_blocks_alone(tables: Tables) -> None:
    idle, idle_node = tables.compute([1, 2, 3, 4])
    held, node = tables.compute([1, 2, 5, 6], "other root")
    tables.release(idle)
    assert (tables.pool.num_cached, tables.pool.num_free) == (2, 4)
    assert tables.index.reset() == 2
    tables.check()
    assert (len(tables.index), tables.index.num_roots) == (0, 0)
    assert (tables.pool.num_referenced, tables.pool.num_cached, tables.pool.num_free) == (2, 0, 6)
    assert tables.hit([1, 2, 3, 4]) == tables.hit([1, 2, 5, 6], "other root") == []
    assert idle_node is not None
    assert node is not None
    assert not idle_node.alive
    assert tables.index.match(ROOT, [1, 2, 3, 4], 4, idle_node) is None
    assert tables.index.reset() == 0
    # The live table goes on, and all of it can be found again.
    held.extend(tables.pool.allocate(1) or [])
    tables.index.extend("other root", node, [1, 2, 5, 6, 7, 8], held, 3)
    tables.check()
    assert tables.hit([1, 2, 5, 6, 7, 8], "other root") == held
    tables.release(held)
    assert tables.pool.num_cached == 3


def test_without_a_window_everything_is_visible_and_nothing_hollow(tables: Tables) -> None:
    assert tables.index.visible_from(10**9) == 0
    table, _ = tables.compute([1, 2, 3, 4, 5, 6])
    tables.release(table)
    tables.held.append(tables.pool.allocate(8) or [])
    assert (len(tables.index), tables.index.num_hollow) == (0, 0)


def test_a_block_cannot_have_two_nodes() -> None:
    tables = Tables()
    table, _ = tables.compute([1, 2])
    with pytest.raises(InvariantError, match="block 0 was inserted twice"):
        tables.index.extend(ROOT, None, [3, 4], table, 1)
