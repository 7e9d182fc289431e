"""A node of the prefix trees: the tokens of one block, after those of its ancestors, and the block's number."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

from engine.kv.block_pool import NO_BLOCK, InvariantError

# What ``PrefixNode.block`` says besides a block. A hollow node's is what a block table holds in its place.
HOLLOW = NO_BLOCK
DEAD = -2
ROOT = -3


class PrefixNode:
    """One findable block: ``tokens`` after those of all nodes from the root to ``parent``.

    A *hollow* node has lost its block and only leads to the nodes below it.
    """

    __slots__ = ("block", "block_key", "children", "depth", "key", "parent", "sibling", "tokens")

    def __init__(self, parent: PrefixNode | None, key: int, tokens: tuple[int, ...], block: int) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.block = block
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.sibling: PrefixNode | None = None  # next child of the same parent with an equal key
        self.children: dict[int, PrefixNode] = {}
        self.block_key: int | None = None  # the key that names it in other processes, once computed

    @property
    def alive(self) -> bool:
        """Whether the node is still in the tree, and so all nodes above it."""
        return self.block != DEAD

    def all_children(self) -> Iterator[PrefixNode]:
        """Children of every key."""
        for first in self.children.values():
            child: PrefixNode | None = first
            while child is not None:
                yield child
                child = child.sibling

    def check_children(
        self, block_size: int, hash_tokens: Callable[[tuple[int, ...]], int]
    ) -> list[PrefixNode]:
        """Verify that every child is in its place; return them.

        Raises:
            InvariantError: says what is wrong.
        """
        children: dict[tuple[int, ...], PrefixNode] = {}
        for key, first in self.children.items():
            child: PrefixNode | None = first
            while child is not None:
                if child.tokens in children:  # a circle of siblings is found here, too
                    raise InvariantError(f"two nodes under one parent hold equal tokens: {child.tokens}")
                if child.parent is not self or child.depth != self.depth + 1:
                    raise InvariantError(f"the node of block {child.block} has a wrong parent or depth")
                if len(child.tokens) != block_size:
                    raise InvariantError(f"the node of block {child.block} has {len(child.tokens)} tokens")
                if child.key != key or child.key != hash_tokens(child.tokens):
                    raise InvariantError(f"the node of block {child.block} has a wrong key")
                children[child.tokens] = child
                child = child.sibling
        return list(children.values())


class RootNode(PrefixNode):
    """The top of one tree; it has no block."""

    __slots__ = ("name",)

    def __init__(self, name: Hashable) -> None:
        super().__init__(None, 0, (), ROOT)
        self.name = name


class IndexObserver(Protocol):
    """Is told, in order, of each node that gets a block or loses one."""

    def stored(self, node: PrefixNode) -> None:
        """The node has got a block; it is in its place in the tree."""

    def removed(self, node: PrefixNode) -> None:
        """The node has lost its block."""

    def cleared(self) -> None:
        """All nodes have lost their blocks."""
