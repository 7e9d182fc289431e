"""The block map: each block's state at its place, and never more cells than may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.block_map import MAX_CELLS, block_map
from engine.kv.block_pool import BlockPool
from engine.kv.host_pool import HostPool


def test_each_block_is_shown_where_it_is() -> None:
    pool, host = BlockPool(6, 16), HostPool(3)
    table = pool.allocate(4)
    assert table == [0, 1, 2, 3]
    pool.share([1])
    pool.key(2)
    pool.release([2])
    pool.release([3])
    assert host.swap_out([(0, 1, 16), (1, 1, 16)]) is not None
    host.share([1])
    assert block_map(pool, host)[:3] == (1, bytes([2, 3, 1, 0, 0, 0]), bytes([2, 3, 0]))


@given(st.integers(1, 3 * MAX_CELLS), st.integers(0, 3 * MAX_CELLS))
def test_a_map_has_few_cells_whatever_the_pools(blocks: int, host_blocks: int) -> None:
    each, device, host = block_map(BlockPool(blocks, 16), HostPool(host_blocks))[:3]
    assert len(device) == -(-blocks // each)
    assert len(host) == -(-host_blocks // each)
    assert len(device) + len(host) <= MAX_CELLS


@pytest.mark.parametrize("first", [0, 3])
def test_a_cell_of_several_blocks_shows_the_first(first: int) -> None:
    pool = BlockPool(3 * (MAX_CELLS - 1), 16)
    table = pool.allocate(first + 1)
    assert table is not None
    pool.release(table[:first])
    each, device, host = block_map(pool, HostPool(0))[:3]
    assert (each, host) == (3, b"")
    assert [at for at, state in enumerate(device) if state] == [first // 3]
