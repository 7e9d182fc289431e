"""What each KV block of an engine holds, by position, small enough to draw."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from engine.kv.block_pool import BlockPool
from engine.kv.host_pool import HostPool

MAX_CELLS = 4096


class BlockState(IntEnum):
    """The state of a device block; a host block is free, referenced, or shared."""

    FREE = 0
    CACHED = 1
    REFERENCED = 2
    SHARED = 3


class BlockMap(NamedTuple):
    """One byte for every ``each`` blocks, the state of the first of them: a sample of a large pool.

    Both maps together have at most ``MAX_CELLS`` bytes. If asked for, ``groups`` has a byte for each cell of
    both, the device's first, that says to which of the ``names`` it belongs: see
    :mod:`engine.kv.block_groups`. Of names of requests, ``tenants`` are those that sent them.
    """

    each: int
    device: bytes
    host: bytes
    groups: bytes = b""
    names: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()


def block_map(pool: BlockPool, host: HostPool) -> BlockMap:
    """Costs O(``MAX_CELLS``). Any thread may call it; the result may or may not include concurrent changes."""
    each = -(-(pool.num_blocks + host.num_blocks) // (MAX_CELLS - 1))
    device = (_state(count, keyed) for count, keyed in pool.sample(each))
    return BlockMap(each, bytes(device), bytes(_state(count, False) for count in host.sample(each)))


def _state(references: int, keyed: bool) -> BlockState:
    if references:
        return BlockState.SHARED if references > 1 else BlockState.REFERENCED
    return BlockState.CACHED if keyed else BlockState.FREE
