"""KV events: which blocks became findable in a replica, and which no longer are, by block key.

The prefix index reports each change as it happens; once per step, the changes are drained as a batch. A
snapshot and all later batches give the resident keys exactly; a digest in each batch proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from engine.kv.block_keys import BlockHash, KeyScheme
from engine.kv.block_pool import InvariantError
from engine.kv.prefix_node import PrefixNode, RootNode
from engine.request import CacheNamespace


@dataclass(frozen=True, slots=True)
class KvBatch:
    """All changes since the previous batch. If ``cleared``, all earlier keys are removed first.

    No key is in both lists. ``xor`` and ``count`` are of all resident keys after this batch.
    """

    sequence: int  # one more than the batch before
    stored: list[int]
    removed: list[int]
    cleared: bool
    xor: int
    count: int

    def __len__(self) -> int:
        return len(self.stored) + len(self.removed)


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """All resident keys as of batch ``sequence``: what follows are the batches after it."""

    sequence: int
    keys: list[int]
    xor: int
    count: int


class KvEvents:
    """Observes a :class:`engine.kv.prefix_index.PrefixIndex`; used by the engine's thread alone.

    A key is resident while at least one node of that key has a block: 64-bit keys of two nodes may collide.

    Args:
        block_size: tokens of a block.
        root_key: the key of a root, by its name in the index.
    """

    def __init__(self, block_size: int, root_key: Callable[[Hashable], int]) -> None:
        self._hash = BlockHash(block_size)
        self._root_key = root_key
        self._nodes: dict[int, int] = {}  # resident keys, with the number of their nodes
        self._xor = 0
        self._sequence = 0
        # Changes since the last batch; in insertion order, so that a path's keys come from its root on.
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._cleared = False

    @property
    def pending(self) -> bool:
        """Whether anything has changed since the last batch."""
        return bool(self._stored or self._removed or self._cleared)

    def stored(self, node: PrefixNode) -> None:
        """A node got a block."""
        key = node.block_key
        if key is None:
            key = self._name(node)
        nodes = self._nodes.get(key, 0)
        self._nodes[key] = nodes + 1
        if nodes:
            return
        self._xor ^= key
        if key in self._removed:
            del self._removed[key]
        else:
            self._stored[key] = None

    def removed(self, node: PrefixNode) -> None:
        """A node lost its block, or was forgotten."""
        key = node.block_key
        nodes = 0 if key is None else self._nodes.get(key, 0)
        if key is None or not nodes:
            raise InvariantError(f"a node of tokens {node.tokens} lost a block that was never reported")
        if nodes > 1:
            self._nodes[key] = nodes - 1
            return
        del self._nodes[key]
        self._xor ^= key
        if key in self._stored:
            del self._stored[key]
        else:
            self._removed[key] = None

    def cleared(self) -> None:
        """All nodes were forgotten."""
        self._nodes.clear()
        self._stored.clear()
        self._removed.clear()
        self._xor = 0
        self._cleared = True

    def drain(self) -> KvBatch | None:
        """The changes since the last call as the next batch; ``None`` if there are none."""
        if not self.pending:
            return None
        self._sequence += 1
        batch = KvBatch(
            self._sequence,
            list(self._stored),
            list(self._removed),
            self._cleared,
            self._xor,
            len(self._nodes),
        )
        self._stored.clear()
        self._removed.clear()
        self._cleared = False
        return batch

    def snapshot(self) -> KvSnapshot:
        """Everything that is resident; O(blocks).

        Raises:
            InvariantError: changes are pending that no batch has yet.
        """
        if self.pending:
            raise InvariantError("a snapshot was taken between two batches")
        return KvSnapshot(self._sequence, list(self._nodes), self._xor, len(self._nodes))

    def _name(self, node: PrefixNode) -> int:
        """Give ``node`` its key, and those above it that have none because they never had a block."""
        if node.parent is not None and node.parent.block_key is not None:  # as nearly always
            key = node.block_key = self._hash(node.parent.block_key, node.tokens)
            return key
        unnamed = []
        above: PrefixNode | None = node
        while above is not None and above.block_key is None:
            unnamed.append(above)
            above = above.parent
        key = 0 if above is None or above.block_key is None else above.block_key
        for below in reversed(unnamed):
            key = self._root_key(below.name) if isinstance(below, RootNode) else self._hash(key, below.tokens)
            below.block_key = key
        return key


def root_key_of(root: Hashable) -> int:
    """The key of a root as the scheduler names it: (model key, block size, adapter, tenant, salt).

    The model key is the runner's: (model revision, dtype, block size).
    """
    assert isinstance(root, tuple)
    model_key, block_size, adapter, tenant, salt = root
    scheme = KeyScheme(*model_key)
    if scheme.block_size != block_size:
        raise InvariantError(f"the model key says blocks of {scheme.block_size} tokens, the root {block_size}")
    return scheme.root(CacheNamespace(adapter=adapter, tenant=tenant, salt=salt))
