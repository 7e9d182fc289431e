"""Hits, hollow nodes and bounds of the prefix tree of a model with sliding windows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kv_simulation import constant_hash

from engine.kv.block_pool import NO_BLOCK, BlockPool
from engine.kv.prefix_index import HOLLOW_PER_BLOCK, PrefixIndex, PrefixNode

ROOT = ("model", 2, "", "")
TEXT = list(range(1, 17))  # eight blocks of two tokens


class Windows:
    """A pool of blocks of two tokens, its windowed index, and the tables in use."""

    def __init__(
        self, num_blocks: int, window: int, hash_tokens: Callable[[tuple[int, ...]], int] = hash
    ) -> None:
        self.pool = BlockPool(num_blocks, 2)
        self.index = PrefixIndex(self.pool, hash_tokens, window)
        self.held: list[list[int]] = []

    def compute(self, tokens: list[int]) -> tuple[list[int], PrefixNode | None]:
        """Take blocks for all tokens, sharing nothing, and make the full ones findable."""
        table = self.take(self.pool.blocks_for(len(tokens)))
        node = self.index.extend(ROOT, None, tokens, table, len(tokens) // 2)
        self.check()
        return table, node

    def take(self, count: int) -> list[int]:
        table = self.pool.allocate(count)
        assert table is not None
        self.held.append(table)
        self.check()
        return table

    def release(self, table: list[int]) -> None:
        self.held = [other for other in self.held if other is not table]
        self.pool.release(table)
        self.check()

    def drop(self, table: list[int], *places: int) -> list[int]:
        """Give up some blocks of a table and let them be evicted; returns what they went to."""
        for place in places:
            self.pool.release([table[place]])
            table[place] = NO_BLOCK
        return self.take(self.pool.num_free + len(places))

    def depth(self, tokens: list[int], hint: PrefixNode | None = None) -> int:
        node = self.index.match(ROOT, tokens, len(tokens), hint)
        return 0 if node is None else node.depth

    def check(self) -> None:
        self.pool.check(self.held)
        self.index.check()


@pytest.mark.parametrize(
    ("window", "position", "block"),
    [
        (None, 100, 0),
        (1, 0, 0),
        (1, 1, 0),
        (1, 2, 1),
        (2, 2, 0),
        (2, 3, 1),
        (3, 3, 0),
        (3, 4, 1),
        (5, 4, 0),
        (5, 8, 2),
        (5, 9, 2),
        (5, 10, 3),
    ],
)
def test_first_visible_block(window: int | None, position: int, block: int) -> None:
    assert PrefixIndex(BlockPool(4, 2), window=window).visible_from(position) == block


@pytest.mark.parametrize("hash_tokens", [hash, constant_hash], ids=["hash", "constant"])
@pytest.mark.parametrize(
    ("window", "gone", "depths"),
    [
        # depths: of the hits on the first 1, 2, ... 6 blocks when the block at place `gone` is evicted
        (1, 0, [1, 2, 3, 4, 5, 6]),  # a token sees only itself
        (2, 1, [1, 1, 3, 4, 5, 6]),
        (3, 1, [1, 1, 3, 4, 5, 6]),
        (4, 1, [1, 1, 1, 4, 5, 6]),
        (5, 1, [1, 1, 1, 4, 5, 6]),
        (6, 2, [1, 2, 2, 2, 2, 6]),
        (7, 2, [1, 2, 2, 2, 2, 6]),
        (4, 0, [0, 0, 3, 4, 5, 6]),
        (100, 0, [0] * 6),
        (100, 4, [1, 2, 3, 4, 4, 4]),
    ],
)
def test_a_hit_needs_only_what_the_next_token_sees(
    window: int, gone: int, depths: list[int], hash_tokens: Callable[[tuple[int, ...]], int]
) -> None:
    windows = Windows(8, window, hash_tokens)
    table, _ = windows.compute(TEXT[:12])
    whole = [*table]
    windows.drop(table, gone)
    assert windows.index.num_hollow == 1
    for blocks, depth in enumerate(depths, start=1):
        node = windows.index.match(ROOT, TEXT, 2 * blocks)
        found = windows.index.blocks(node)
        assert len(found) == depth
        first = windows.index.visible_from(2 * depth)
        assert found == [NO_BLOCK] * first + whole[first:depth]


def test_a_block_in_sight_of_another_hit_only_is_not_given_out() -> None:
    windows = Windows(8, 3)
    table, node = windows.compute(TEXT[:8])
    assert windows.index.blocks(node) == [NO_BLOCK] * 3 + table[3:]  # position 8 sees 6 and 7
    assert windows.index.blocks(windows.index.match(ROOT, TEXT, 4)) == [NO_BLOCK, table[1]]


def test_a_hollow_node_computed_again_gets_its_block_back() -> None:
    windows = Windows(8, 5)
    table, deep = windows.compute(TEXT[:12])
    other = windows.drop(table, 0)
    assert (windows.depth(TEXT[:4]), len(windows.index), windows.index.num_hollow) == (0, 5, 1)
    windows.release(other)
    again, node = windows.compute(TEXT[:4])
    assert (len(windows.index), windows.index.num_hollow) == (6, 0)
    assert node is not None
    assert deep is not None
    assert node.parent is not None
    assert node.parent.block == again[0]
    # The second block is the other table's as long as that one is held.
    assert windows.index.blocks(node) == [again[0], table[1]]
    assert windows.depth(TEXT) == 6


def test_a_hollow_node_goes_with_the_last_one_below_it() -> None:
    windows = Windows(4, 2)
    table, node = windows.compute(TEXT[:8])
    windows.drop(table, 0)
    windows.drop(table, 1)
    assert (len(windows.index), windows.index.num_hollow) == (2, 2)
    assert windows.depth(TEXT) == 4
    windows.drop(table, 3)  # a leaf
    assert (len(windows.index), windows.index.num_hollow) == (1, 2)
    assert node is not None
    assert not node.alive
    windows.drop(table, 2)
    assert (len(windows.index), windows.index.num_hollow, windows.index.num_roots) == (0, 0, 0)


def test_hollow_nodes_go_only_as_far_up_as_they_lead_nowhere() -> None:
    windows = Windows(6, 2)
    table, _ = windows.compute(TEXT[:6])
    windows.drop(table, 0, 1)
    fork = windows.held[-1]
    windows.release(fork)
    branch = [NO_BLOCK, *windows.take(1)]
    windows.held[-1] = branch
    windows.index.extend(ROOT, None, [1, 2, 9, 9], branch, 2)  # also under the first, hollow node
    windows.check()
    assert (len(windows.index), windows.index.num_hollow) == (2, 2)
    windows.drop(table, 2)
    assert (len(windows.index), windows.index.num_hollow) == (1, 1)
    assert windows.depth([1, 2, 9, 9]) == 2
    assert windows.depth(TEXT) == 0


def test_a_table_whose_beginning_is_gone_is_inserted_behind_hollow_nodes() -> None:
    windows = Windows(8, 4)
    table, node = windows.compute(TEXT[:8])
    table[:2], behind = [NO_BLOCK] * 2, table[:2]
    windows.pool.release(behind)
    assert windows.index.reset() == 2
    windows.check()
    table.extend(windows.pool.allocate(1) or [])
    node = windows.index.extend(ROOT, node, TEXT[:10], table, 5)
    windows.check()
    assert node is not None
    assert node.depth == 5
    assert (len(windows.index), windows.index.num_hollow) == (3, 2)
    assert [windows.depth(TEXT[: 2 * blocks]) for blocks in range(1, 6)] == [0, 0, 0, 4, 5]
    assert windows.index.blocks(node) == [NO_BLOCK] * 3 + table[3:]


@pytest.mark.parametrize("table", [[NO_BLOCK], [NO_BLOCK, NO_BLOCK]])
def test_a_table_of_absent_blocks_inserts_nothing(table: list[int]) -> None:
    windows = Windows(4, 1)
    assert windows.index.extend(ROOT, None, TEXT, table, len(table)) is None
    assert windows.index.num_roots == 0
    windows.check()


def test_a_table_that_ends_in_absent_blocks_is_inserted_up_to_them() -> None:
    windows = Windows(4, 1)
    table = windows.take(1)
    table.extend([NO_BLOCK, NO_BLOCK])
    node = windows.index.extend(ROOT, None, TEXT, table, 3)
    windows.check()
    assert node is not None
    assert node.depth == 1
    assert windows.index.extend(ROOT, node, TEXT, table, 3) is node
    table.extend(windows.pool.allocate(1) or [])
    node = windows.index.extend(ROOT, node, TEXT, table, 4)
    windows.check()
    assert node is not None
    assert node.depth == 4
    assert windows.index.num_hollow == 2


def test_a_hint_is_dropped_when_a_block_that_it_needs_is_gone() -> None:
    windows = Windows(8, 3)
    table, _ = windows.compute(TEXT[:10])
    hint = windows.index.match(ROOT, TEXT, 6)
    assert hint is not None
    assert hint.depth == 3
    windows.drop(table, 2)
    assert hint.alive  # but hollow
    assert windows.depth(TEXT[:6], hint) == 2
    assert windows.depth(TEXT[:10], hint) == 5
    hint = windows.index.match(ROOT, TEXT, 8)
    windows.drop(table, 1)  # out of its sight
    assert windows.depth(TEXT[:8], hint) == 4
    assert windows.depth(TEXT[:10], hint) == 5


def test_absent_blocks_never_displace_a_cached_one() -> None:
    windows = Windows(4, 2)
    table, node = windows.compute(TEXT[:2])
    windows.release(table)
    other = [NO_BLOCK, *windows.take(1)]
    windows.held[-1] = other
    windows.index.extend(ROOT, None, TEXT[:4], other, 2)
    windows.check()
    assert node is not None
    assert node.block == table[0]
    assert windows.depth(TEXT[:2]) == 1


def test_hollow_nodes_are_bounded() -> None:
    windows = Windows(3, 2)
    limit = HOLLOW_PER_BLOCK * 3
    tokens = list(range(2 * (limit + 4)))
    node = None
    table: list[int] = []
    # One long text that keeps only its last two blocks: the tree grows until its beginning is forgotten.
    for full in range(1, limit + 5):
        table.append(windows.take(1)[0])
        windows.held = [table]
        node = windows.index.extend(ROOT, node, tokens, table, full)
        if full > 2:
            windows.pool.release([table[full - 3]])
            table[full - 3] = NO_BLOCK
        windows.check()
        assert windows.index.num_hollow <= limit
    # At the bound an eviction took the whole tree with it, and a table with more blocks gone is not inserted.
    assert table.count(NO_BLOCK) > limit
    assert node is None
    assert (len(windows.index), windows.index.num_hollow, windows.index.num_roots) == (0, 0, 0)
    # A text that fits is still found.
    windows.release(table)
    windows.compute(TEXT[:4])
    assert windows.depth(TEXT[:4]) == 2


def test_reset_forgets_hollow_nodes() -> None:
    windows = Windows(6, 2)
    table, node = windows.compute(TEXT[:8])
    filler = windows.drop(table, 0)
    windows.release(filler)
    windows.pool.release([table[1]])
    table[1] = NO_BLOCK
    assert windows.index.reset() == 1
    windows.check()
    assert (len(windows.index), windows.index.num_hollow, windows.index.num_roots) == (0, 0, 0)
    assert windows.index.match(ROOT, TEXT, 8, node) is None


def test_hollow_nodes_that_are_there_already_do_not_count_against_the_bound() -> None:
    windows = Windows(3, 2)
    limit = HOLLOW_PER_BLOCK * 3
    tokens = list(range(2 * (limit + 2)))
    table = [NO_BLOCK] * limit + windows.take(1)
    windows.held = [table]
    windows.index.extend(ROOT, None, tokens, table, limit + 1)
    assert windows.index.num_hollow == limit
    copy = [NO_BLOCK] * limit + windows.take(2)
    windows.held[-1] = copy
    node = windows.index.extend(ROOT, None, tokens, copy, limit + 2)
    windows.check()
    assert node is not None
    assert node.depth == limit + 2
    # One more would be too many: only what is there already is found again.
    other = [*tokens[:2], *([99] * 2 * limit)]
    node = windows.index.extend(ROOT, None, other, copy, limit + 2)
    windows.check()
    assert node is not None
    assert node.depth == 1
