"""Finds the blocks that already hold the beginning of a prompt: a trie by identity."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

from engine.block_pool import BlockPool, InvariantError

_ROOT = -1
_DEAD = -2


class PrefixNode:
    """One findable block: ``tokens`` after everything on the way from the root to ``parent``."""

    __slots__ = ("block", "children", "depth", "key", "parent", "sibling", "tokens")

    def __init__(self, parent: PrefixNode | None, key: int, tokens: tuple[int, ...], block: int) -> None:
        self.parent = parent
        self.key = key
        self.tokens = tokens
        self.block = block
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.sibling: PrefixNode | None = None  # next child of the same parent with an equal key
        self.children: dict[int, PrefixNode] = {}

    @property
    def alive(self) -> bool:
        """Whether the node is still in the tree, and so all nodes above it."""
        return self.block != _DEAD


class _Root(PrefixNode):
    __slots__ = ("name",)

    def __init__(self, name: Hashable) -> None:
        super().__init__(None, 0, (), _ROOT)
        self.name = name


class PrefixIndex:
    """Which block holds the KV of which tokens, after which tokens.

    A child is looked up under its parent *node* by the hash of its tokens, and the stored tokens are compared:
    the hash makes it fast and never decides, so no collision can give one prompt another's KV. Trees of
    different roots never meet. The pool owns the blocks; the index only keys them, and forgets a block together
    with everything below it when the pool evicts it (blocks below it could not be found any more: they become
    free). Its memory is bounded by the pool: one node for each keyed block; a root goes with its last child.

    A block computed twice maps to one node, which points to the first copy while anybody holds that one; the
    second request keeps its own, unkeyed. Once the first is merely cached, the node moves to the copy in use.
    """

    def __init__(self, pool: BlockPool, hash_tokens: Callable[[tuple[int, ...]], int] = hash) -> None:
        self._pool = pool
        self._hash = hash_tokens
        self._roots: dict[Hashable, _Root] = {}
        self._nodes: list[PrefixNode | None] = [None] * pool.num_blocks
        self._num_nodes = 0
        pool.on_evict = self._forget

    def __len__(self) -> int:
        """Findable blocks, cached and referenced."""
        return self._num_nodes

    @property
    def num_roots(self) -> int:
        """Trees that hold at least one block."""
        return len(self._roots)

    def match(
        self, root: Hashable, token_ids: Sequence[int], max_tokens: int, hint: PrefixNode | None = None
    ) -> PrefixNode | None:
        """Find the longest run of whole blocks that holds the first tokens, at most ``max_tokens``.

        ``hint`` is what an earlier call returned for the same root and a beginning of the same tokens: the walk
        goes on from there while it is alive. The hit has ``node.depth`` blocks; ``None`` is no hit.
        Nothing changes, not even the order of eviction.
        """
        node = hint if hint is not None and hint.alive else self._roots.get(root)
        if node is None:
            return None
        size = self._pool.block_size
        for start in range(node.depth * size, max_tokens - size + 1, size):
            child = self._child(node, tuple(token_ids[start : start + size]))
            if child is None:
                break
            node = child
        return node if node.depth else None

    @staticmethod
    def blocks(node: PrefixNode | None) -> list[int]:
        """Blocks from the root to ``node``: the block table of a hit."""
        blocks = []
        while node is not None and node.parent is not None:
            blocks.append(node.block)
            node = node.parent
        blocks.reverse()
        return blocks

    def extend(
        self,
        root: Hashable,
        node: PrefixNode | None,
        token_ids: Sequence[int],
        block_table: Sequence[int],
        num_blocks: int,
    ) -> PrefixNode | None:
        """Make the first ``num_blocks`` blocks of a table findable; their KV must be computed and held.

        ``node`` is what the last call for this table returned (or its hit), so only new blocks are inserted; if
        it has been forgotten since, the whole table is inserted again. Returns the node of the last block.
        """
        if num_blocks == 0:
            return None
        if node is None or not node.alive:
            node = self._roots.get(root)
            if node is None:
                node = self._roots[root] = _Root(root)
        size = self._pool.block_size
        for depth in range(node.depth, num_blocks):
            tokens = tuple(token_ids[depth * size : (depth + 1) * size])
            node = self._insert(node, tokens, block_table[depth])
        return node

    def _child(self, parent: PrefixNode, tokens: tuple[int, ...]) -> PrefixNode | None:
        child = parent.children.get(self._hash(tokens))
        while child is not None and child.tokens != tokens:
            child = child.sibling
        return child

    def _insert(self, parent: PrefixNode, tokens: tuple[int, ...], block: int) -> PrefixNode:
        node = self._child(parent, tokens)
        if node is not None:
            if node.block != block and not self._pool.references(node.block):
                copy, node.block = node.block, block
                self._nodes[copy] = None
                self._attach(node)
                self._pool.unkey(copy)
            return node
        node = PrefixNode(parent, self._hash(tokens), tokens, block)
        self._attach(node)
        node.sibling = parent.children.get(node.key)
        parent.children[node.key] = node
        self._num_nodes += 1
        return node

    def _attach(self, node: PrefixNode) -> None:
        if self._nodes[node.block] is not None:
            raise InvariantError(f"block {node.block} was inserted twice")
        self._pool.key(node.block)
        self._nodes[node.block] = node

    def _forget(self, block: int) -> None:
        """Drop the node of an evicted block and all nodes below it."""
        top = self._nodes[block]
        if top is None or top.parent is None:
            raise InvariantError(f"block {block} was evicted but the index does not know it")
        self._detach(top, top.parent)
        doomed = [top]
        while doomed:
            node = doomed.pop()
            doomed.extend(_children(node))
            self._nodes[node.block] = None
            self._pool.unkey(node.block)
            self._num_nodes -= 1
            # Whoever still keeps the node sees that it is dead; no link keeps the rest of the tree in memory.
            node.block = _DEAD
            node.parent = node.sibling = None
            node.children = {}

    def _detach(self, node: PrefixNode, parent: PrefixNode) -> None:
        first = parent.children[node.key]
        if first is not node:
            while first.sibling is not node:
                if first.sibling is None:
                    raise InvariantError(f"the node of block {node.block} is not under its parent")
                first = first.sibling
            first.sibling = node.sibling
        elif node.sibling is not None:
            parent.children[node.key] = node.sibling
        else:
            del parent.children[node.key]
            if isinstance(parent, _Root) and not parent.children:
                del self._roots[parent.name]
                parent.block = _DEAD

    def check(self) -> None:
        """Verify every invariant of the trees against the pool; O(blocks), for tests and debugging.

        Raises:
            InvariantError: says what is wrong.
        """
        seen: set[int] = set()
        for name, root in self._roots.items():
            if root.block != _ROOT or root.name != name or not root.children:
                raise InvariantError(f"root {name!r} is dead, misnamed or empty")
            pending: list[PrefixNode] = [root]
            while pending:
                node = pending.pop()
                children = list(_children(node))
                if len({child.tokens for child in children}) != len(children):
                    raise InvariantError("two nodes under one parent hold equal tokens")
                for child in children:
                    self._check_node(child, node)
                    if child.block in seen:
                        raise InvariantError(f"block {child.block} has two nodes")
                    seen.add(child.block)
                pending.extend(children)
        known = {block for block, node in enumerate(self._nodes) if node is not None}
        keyed = {block for block in range(self._pool.num_blocks) if self._pool.is_keyed(block)}
        if not seen == known == keyed:
            raise InvariantError(
                f"blocks in the trees, known and keyed differ: {sorted(seen)}, {sorted(known)}, {sorted(keyed)}"
            )
        if len(seen) != self._num_nodes:
            raise InvariantError(f"{self._num_nodes} nodes are counted but {len(seen)} are in the trees")

    def _check_node(self, node: PrefixNode, parent: PrefixNode) -> None:
        if node.block < 0 or self._nodes[node.block] is not node:
            raise InvariantError(f"the trees hold a node of block {node.block} that the index does not know")
        if node.parent is not parent or node.depth != parent.depth + 1:
            raise InvariantError(f"the node of block {node.block} has a wrong parent or depth")
        if len(node.tokens) != self._pool.block_size or node.key != self._hash(node.tokens):
            raise InvariantError(f"the node of block {node.block} has wrong tokens or a wrong key")


def _children(node: PrefixNode) -> Iterator[PrefixNode]:
    for first in node.children.values():
        child: PrefixNode | None = first
        while child is not None:
            yield child
            child = child.sibling
