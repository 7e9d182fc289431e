"""Which prefix, or which request, the cells of a block map belong to: one byte for each cell.

A byte is ``NONE``, ``SEVERAL``, or the number of a name, from 1. Any thread may call these functions; the
result may or may not include concurrent changes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from enum import StrEnum
from typing import TypeVar

from engine.kv.block_pool import NO_BLOCK
from engine.kv.prefix_node import PrefixNode

NONE, SEVERAL = 0, 255
MAX_NAMES = SEVERAL - 1
MAX_VISITS = 1 << 16
"""Nodes, or entries of block tables, that one call looks at: 20 ms at most. Cells beyond belong to none."""

Name = TypeVar("Name", bound=Hashable)


class GroupBy(StrEnum):
    """How the cells of a block map are grouped."""

    STATE = "state"
    PREFIX = "prefix"
    REQUEST = "request"


def by_prefix(nodes: Sequence[PrefixNode | None], keys: Iterable[int]) -> tuple[bytes, list[int]]:
    """The groups of the cells with these nodes, and the keys that name them.

    ``keys`` name prefixes by their last block. A block belongs to the longest of these that it continues or
    ends. If there is none, it belongs to the prefix that it begins, and otherwise to its prompt's first block.
    """
    numbers: dict[int, int] = {}
    known = {_number(numbers, key) for key in keys} - {NONE}
    groups: dict[PrefixNode, int] = {}
    ends: list[PrefixNode] = []
    left = MAX_VISITS
    for cell in nodes:
        path: list[PrefixNode] = []
        group, node = NONE, cell
        while node is not None and node.parent is not None:  # a root has no block
            if node in groups:
                group = groups[node]
                break
            if not left:
                break
            left -= 1
            path.append(node)
            key = node.block_key
            if key is not None and (node.depth == 1 or numbers.get(key) in known):
                group = _number(numbers, key)
                if group in known:
                    ends.append(node)
                break
            node = node.parent
        groups.update(dict.fromkeys(path, group))
    beginnings: dict[PrefixNode, int] = {}
    for end in ends:
        group, node = groups[end], end.parent
        while node is not None and groups.get(node) not in known:
            beginnings[node] = group if beginnings.get(node, group) == group else SEVERAL
            node = node.parent

    def group_of(cell: PrefixNode) -> int:
        group = groups.get(cell, NONE)
        return group if group in known else beginnings.get(cell, group)

    return bytes(NONE if cell is None else group_of(cell) for cell in nodes), [*numbers]


def by_holder(
    holders: Iterable[tuple[Name, Sequence[int], Sequence[int]]], each: int, device: int, host: int
) -> tuple[bytes, list[Name]]:
    """The groups of ``device`` and ``host`` cells of ``each`` blocks, and the names of those who hold them.

    ``holders`` have a name, a device table and a host table; two of one name are one holder.
    """
    cells = bytearray(device + host)
    numbers: dict[Name, int] = {}
    left = MAX_VISITS
    for name, *tables in holders:
        left -= sum(map(len, tables))
        number = _number(numbers, name) if left >= 0 else NONE
        for first, table in zip((0, device), tables, strict=True):
            for block in table if number else ():
                if block != NO_BLOCK and not block % each:
                    at = first + block // each
                    cells[at] = number if cells[at] in (NONE, number) else SEVERAL
    return bytes(cells), [*numbers]


def _number(numbers: dict[Name, int], name: Name) -> int:
    """The number of a name, a new one if it has none yet and there may be more."""
    if name not in numbers and len(numbers) < MAX_NAMES:
        numbers[name] = len(numbers) + 1
    return numbers.get(name, NONE)
