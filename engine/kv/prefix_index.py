"""Finds the blocks that already hold the beginning of a prompt: a trie by identity."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from engine.kv.block_pool import NO_BLOCK, BlockPool, InvariantError
from engine.kv.prefix_node import DEAD, HOLLOW, ROOT, IndexObserver, PrefixNode, RootNode

__all__ = ["HOLLOW_PER_BLOCK", "PrefixIndex", "PrefixNode"]

HOLLOW_PER_BLOCK = 4  # maximum of hollow nodes per block of the pool: bounds a windowed model's trees


class PrefixIndex:
    """Knows which block holds the KV of which tokens, after which tokens.

    A child is looked up under its parent *node* by the hash of its tokens, and then the stored tokens are
    compared. The hash only makes the lookup fast, so a collision cannot give one prompt another's KV. Different
    roots have separate trees. The pool owns the blocks; the index only keys them. When the pool evicts a block,
    the index forgets it and all blocks below it, which can no longer be found and become free. The index's
    memory is bounded by the pool: one node for each keyed block; a root is removed with its last child.

    If a block is computed twice, both copies map to one node, which points to the first copy while a table
    holds it; the second request keeps its own copy, unkeyed. Once the first copy is merely cached, the node
    moves to the copy in use.

    **Sliding windows.** If no layer sees more than ``window`` tokens (a position sees itself and the
    ``window - 1`` before it), a hit needs only the blocks that the token after it can see. So the node of an
    evicted block stays, *hollow*, as long as there are nodes below it. If the block is computed again, the node
    gets it back. At most ``HOLLOW_PER_BLOCK`` hollow nodes per block of the pool are kept; beyond that,
    eviction forgets nodes as above.
    """

    def __init__(
        self,
        pool: BlockPool,
        hash_tokens: Callable[[tuple[int, ...]], int] = hash,
        window: int | None = None,
        observer: IndexObserver | None = None,
    ) -> None:
        self.window = window
        self._observer = observer
        self._pool = pool
        self._hash = hash_tokens
        self._roots: dict[Hashable, RootNode] = {}
        self._nodes: list[PrefixNode | None] = [None] * pool.num_blocks
        self._num_nodes = self._num_hollow = 0
        self._max_hollow = HOLLOW_PER_BLOCK * pool.num_blocks
        pool.on_evict = self._forget

    def __len__(self) -> int:
        """Findable blocks, cached and referenced."""
        return self._num_nodes

    @property
    def num_hollow(self) -> int:
        """Nodes whose block is gone; 0 without a window."""
        return self._num_hollow

    @property
    def num_roots(self) -> int:
        """Trees that hold at least one block."""
        return len(self._roots)

    def sample(self, each: int) -> list[PrefixNode | None]:
        """The node of every ``each``-th block. Any thread may call it; a node may die meanwhile."""
        return self._nodes[::each]

    def visible_from(self, position: int) -> int:
        """Index in a block table of the first block that a token at ``position`` or later can see."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self._pool.block_size

    def match(
        self, root: Hashable, token_ids: Sequence[int], max_tokens: int, hint: PrefixNode | None = None
    ) -> PrefixNode | None:
        """Find the longest run of whole blocks that holds the first tokens, at most ``max_tokens``.

        ``hint`` is what an earlier call returned for the same root and a prefix of the same tokens: the walk
        continues from there if it is still alive. The hit has ``node.depth`` blocks; ``None`` means no hit.
        With a window, only the blocks that the token after the hit can see must be present. The call does not
        change the eviction order.
        """
        if self.window is not None:
            return self._match_in_window(root, token_ids, max_tokens, hint)
        node = hint if hint is not None and hint.alive else self._roots.get(root)
        if node is None:
            return None
        size, hash_tokens = self._pool.block_size, self._hash
        for start in range(node.depth * size, max_tokens - size + 1, size):
            # ``_child``, inlined: half of the time of an admission was spent here.
            tokens = tuple(token_ids[start : start + size])
            child = node.children.get(hash_tokens(tokens))
            while child is not None and child.tokens != tokens:
                child = child.sibling
            if child is None:
                break
            node = child
        return node if node.depth else None

    def _match_in_window(
        self, root: Hashable, token_ids: Sequence[int], max_tokens: int, hint: PrefixNode | None
    ) -> PrefixNode | None:
        # A hint that has become hollow where it matters says nothing about what lies above it.
        best = hint if hint is not None and self._is_hit(hint) else None
        node = self._roots.get(root) if best is None else best
        if node is None:
            return None
        size = self._pool.block_size
        hollow = -1  # last place without a block; those above a hit are out of sight for all below it
        for depth in range(node.depth, max_tokens // size):
            child = self._child(node, tuple(token_ids[depth * size : (depth + 1) * size]))
            if child is None:
                break
            node = child
            if node.block == HOLLOW:
                hollow = depth
            if hollow < self.visible_from((depth + 1) * size):
                best = node
        return best

    def _is_hit(self, node: PrefixNode) -> bool:
        """Whether ``node`` is alive and no block that the token after it can see is gone."""
        if not node.alive:
            return False
        first = self.visible_from(node.depth * self._pool.block_size)
        above: PrefixNode | None = node
        while above is not None and above.depth > first:
            if above.block == HOLLOW:
                return False
            above = above.parent
        return True

    def blocks(self, node: PrefixNode | None) -> list[int]:
        """Blocks from the root to ``node``: the block table of a hit.

        It has ``NO_BLOCK`` where the token after the hit sees nothing, and where a block is gone.
        """
        blocks = []
        while node is not None and node.parent is not None:
            blocks.append(node.block)
            node = node.parent
        blocks.reverse()
        if self.window is not None:
            hidden = self.visible_from(len(blocks) * self._pool.block_size)
            blocks[:hidden] = [NO_BLOCK] * hidden
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

        With a window, entries may be ``NO_BLOCK``: they become hollow nodes. If the last block is absent, too,
        or if there would be too many hollow nodes, the returned node is one above the last block's; later
        calls continue from there. ``None`` means that nothing could be inserted.
        """
        if num_blocks == 0:
            return None
        top: RootNode | None = None
        if node is None or not node.alive:
            node = top = self._roots.get(root) or RootNode(root)
        if self.window is not None:
            num_blocks = self._insertable(node, token_ids, block_table, num_blocks)
            if num_blocks == 0:
                return None
        if top is not None:
            self._roots[root] = top
        size = self._pool.block_size
        for depth in range(node.depth, num_blocks):
            tokens = tuple(token_ids[depth * size : (depth + 1) * size])
            node = self._insert(node, tokens, block_table[depth])
        return node

    def _insertable(
        self, node: PrefixNode, token_ids: Sequence[int], block_table: Sequence[int], num_blocks: int
    ) -> int:
        """How many blocks of a table, the last of which is no hollow one, can go into the tree."""
        depth, size = node.depth, self._pool.block_size
        while num_blocks > depth and block_table[num_blocks - 1] == NO_BLOCK:
            num_blocks -= 1
        if self._num_hollow + block_table[depth:num_blocks].count(NO_BLOCK) <= self._max_hollow:
            return num_blocks
        while depth < num_blocks:
            child = self._child(node, tuple(token_ids[depth * size : (depth + 1) * size]))
            if child is None:
                break
            node = child
            depth += 1
        missing = block_table[depth:num_blocks].count(NO_BLOCK)
        return num_blocks if self._num_hollow + missing <= self._max_hollow else depth

    def _child(self, parent: PrefixNode, tokens: tuple[int, ...]) -> PrefixNode | None:
        child = parent.children.get(self._hash(tokens))
        while child is not None and child.tokens != tokens:
            child = child.sibling
        return child

    def _insert(self, parent: PrefixNode, tokens: tuple[int, ...], block: int) -> PrefixNode:
        node = self._child(parent, tokens)
        if node is not None:
            if node.block != block and not self._pool.references(node.block):
                self._move(node, block)
            return node
        node = PrefixNode(parent, self._hash(tokens), tokens, block)
        if block == NO_BLOCK:
            self._num_hollow += 1
        else:
            self._attach(node)
            self._num_nodes += 1
        node.sibling = parent.children.get(node.key)
        parent.children[node.key] = node
        if self._observer is not None and block != NO_BLOCK:
            self._observer.stored(node)
        return node

    def _move(self, node: PrefixNode, block: int) -> None:
        """Point a node whose block is idle or gone to ``block``, unless that is ``NO_BLOCK``."""
        if block == NO_BLOCK:
            return
        before, node.block = node.block, block
        if before == HOLLOW:
            self._num_hollow -= 1
            self._num_nodes += 1
            if self._observer is not None:
                self._observer.stored(node)
        else:
            self._nodes[before] = None
        self._attach(node)
        self._pool.unkey(before)

    def _attach(self, node: PrefixNode) -> None:
        if self._nodes[node.block] is not None:
            raise InvariantError(f"block {node.block} was inserted twice")
        self._pool.key(node.block)
        self._nodes[node.block] = node

    def reset(self) -> int:
        """Forget everything; return how many blocks became free. Held blocks stay with their holders."""
        before = self._pool.num_free
        observer, self._observer = self._observer, None  # told once for all
        for root in self._roots.values():
            self._drop(root.all_children())
            root.children = {}
            root.block = DEAD
        self._roots.clear()
        self._observer = observer
        if observer is not None:
            observer.cleared()
        return self._pool.num_free - before

    def _forget(self, block: int) -> None:
        """Drop the node of an evicted block and all nodes below it, or leave it hollow."""
        top = self._nodes[block]
        if top is None or top.parent is None:
            raise InvariantError(f"block {block} was evicted but the index does not know it")
        if self.window is not None and top.children and self._num_hollow < self._max_hollow:
            self._nodes[block] = None
            top.block = HOLLOW
            self._num_nodes -= 1
            self._num_hollow += 1
            if self._observer is not None:
                self._observer.removed(top)
            return
        parent = top.parent
        self._detach(top, parent)
        self._drop([top])
        # A hollow node without children is useless.
        while parent.block == HOLLOW and not parent.children and parent.parent is not None:
            leaf, parent = parent, parent.parent
            self._detach(leaf, parent)
            self._drop([leaf])

    def _drop(self, nodes: Iterable[PrefixNode]) -> None:
        """Mark nodes that were taken out of the tree as dead, and all nodes below them."""
        doomed = list(nodes)
        while doomed:
            node = doomed.pop()
            doomed.extend(node.all_children())
            if node.block == HOLLOW:
                self._num_hollow -= 1
            else:
                self._nodes[node.block] = None
                self._pool.unkey(node.block)
                self._num_nodes -= 1
                if self._observer is not None:
                    self._observer.removed(node)
            # Holders of a reference see that the node is dead; no link keeps the rest of the tree in memory.
            node.block = DEAD
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
            if isinstance(parent, RootNode) and not parent.children:
                del self._roots[parent.name]
                parent.block = DEAD

    def check(self) -> None:
        """Verify every invariant of the trees against the pool; O(blocks), for tests and debugging.

        Raises:
            InvariantError: says what is wrong.
        """
        seen: set[int] = set()
        hollow = 0
        for name, root in self._roots.items():
            if root.block != ROOT or root.depth != 0:
                raise InvariantError(f"the root {name!r} is dead or has a wrong depth")
            if root.name != name or not root.children:
                raise InvariantError(f"the root {name!r} is misnamed or empty")
            pending: list[PrefixNode] = [root]
            while pending:
                for child in pending.pop().check_children(self._pool.block_size, self._hash):
                    self._check_block(child)
                    if child.children:
                        pending.append(child)
                    if child.block == HOLLOW:
                        hollow += 1
                    else:
                        seen.add(child.block)
        known = {block for block, node in enumerate(self._nodes) if node is not None}
        keyed = self._pool.keyed_blocks()
        if seen != known or known != keyed:
            raise InvariantError(
                f"blocks in the trees, known and keyed differ: {sorted(seen)}, {sorted(known)}, {sorted(keyed)}"
            )
        if len(seen) != self._num_nodes:
            raise InvariantError(f"{self._num_nodes} nodes are counted but {len(seen)} are in the trees")
        if hollow != self._num_hollow:
            raise InvariantError(f"{self._num_hollow} hollow nodes are counted but {hollow} are in the trees")
        if hollow > self._max_hollow:
            raise InvariantError(f"{hollow} hollow nodes are in the trees, above {self._max_hollow}")

    def _check_block(self, node: PrefixNode) -> None:
        if node.block == HOLLOW:
            if self.window is None:
                raise InvariantError(f"the node of tokens {node.tokens} is hollow, but there is no window")
            if not node.children:
                raise InvariantError(f"the node of tokens {node.tokens} is hollow and leads nowhere")
        elif node.block < 0 or node.block >= self._pool.num_blocks:
            raise InvariantError(f"a node of the trees is dead or names block {node.block}")
        elif self._nodes[node.block] is not node:
            raise InvariantError(f"the trees hold a node of block {node.block} that the index does not know")
