"""The check of the prefix index finds each fault that it is there for, and needs each of its conditions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from faulty_states import Check, Fault, Faults, assert_all_needed, assert_found

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_index import PrefixIndex
from engine.kv.prefix_node import DEAD, PrefixNode, RootNode


class Trees:
    """One tree over blocks of two tokens: block 1 under block 0, both held; block 2 is held, not findable."""

    def __init__(self) -> None:
        self.pool = BlockPool(8, 2)
        self.index = PrefixIndex(self.pool)
        self.pool.allocate(3)
        leaf = self.index.extend("root", None, [1, 2, 3, 4], [0, 1], 2)
        assert leaf is not None
        self.leaf = leaf
        self.place(leaf)
        self.index.check()

    def place(self, node: PrefixNode) -> None:
        assert node.parent is not None
        assert isinstance(node.parent.parent, RootNode)
        self.parent, self.root = node.parent, node.parent.parent


class WindowedTrees(Trees):
    """The same with a window of two tokens, and block 0 evicted: its node is hollow."""

    def __init__(self) -> None:
        self.pool = BlockPool(8, 2)
        self.index = PrefixIndex(self.pool, window=2)
        self.pool.allocate(3)
        leaf = self.index.extend("root", None, [1, 2, 3, 4], [0, 1], 2)
        assert leaf is not None
        self.leaf = leaf
        self.place(leaf)
        self.pool.release([0])
        self.pool.allocate(6)
        assert self.index.num_hollow == 1
        self.index.check()


def index_fault(plant: Callable[[Trees], object], make: type[Trees] = Trees) -> Fault:
    def build() -> Check:
        trees = make()
        plant(trees)
        return trees.index.check

    return build


def stranger(trees: Trees) -> None:
    """The index knows a block whose node is in no tree."""
    trees.pool.key(2)
    trees.index._nodes[2] = PrefixNode(trees.leaf, hash((5, 6)), (5, 6), 2)


def twin(trees: Trees) -> None:
    trees.leaf.sibling = PrefixNode(trees.parent, trees.leaf.key, trees.leaf.tokens, 2)


def misfiled(trees: Trees) -> None:
    trees.parent.children = {trees.leaf.key + 1: trees.leaf}


def cut_off(trees: Trees) -> None:
    trees.parent.children = {}


INDEX_FAULTS: Faults = {
    "a block of the trees not keyed": (
        index_fault(lambda trees: trees.pool.unkey(0)),
        "blocks in the trees, known and keyed differ: [0, 1], [0, 1], [1]",
    ),
    "a keyed block without a node": (
        index_fault(lambda trees: trees.pool.key(2)),
        "blocks in the trees, known and keyed differ: [0, 1], [0, 1], [0, 1, 2]",
    ),
    "a node outside the trees": (
        index_fault(stranger),
        "blocks in the trees, known and keyed differ: [0, 1], [0, 1, 2], [0, 1, 2]",
    ),
    "a node cut off": (
        index_fault(cut_off),
        "blocks in the trees, known and keyed differ: [0], [0, 1], [0, 1]",
    ),
    "a node forgotten": (
        index_fault(lambda trees: trees.index._nodes.__setitem__(1, None)),
        "the trees hold a node of block 1 that the index does not know",
    ),
    "a block with two nodes": (
        index_fault(lambda trees: setattr(trees.leaf, "block", 0)),
        "the trees hold a node of block 0 that the index does not know",
    ),
    "a dead node": (
        index_fault(lambda trees: setattr(trees.leaf, "block", DEAD)),
        "a node of the trees is dead or names block -2",
    ),
    "a block past the end": (
        index_fault(lambda trees: setattr(trees.leaf, "block", 8)),
        "a node of the trees is dead or names block 8",
    ),
    "other tokens": (
        index_fault(lambda trees: setattr(trees.leaf, "tokens", (3, 5))),
        "the node of block 1 has a wrong key",
    ),
    "a node under another key": (index_fault(misfiled), "the node of block 1 has a wrong key"),
    "tokens missing": (
        index_fault(lambda trees: setattr(trees.leaf, "tokens", (3,))),
        "the node of block 1 has 1 tokens",
    ),
    "a wrong depth": (
        index_fault(lambda trees: setattr(trees.leaf, "depth", 1)),
        "the node of block 1 has a wrong parent or depth",
    ),
    "a wrong parent": (
        index_fault(lambda trees: setattr(trees.leaf, "parent", trees.root)),
        "the node of block 1 has a wrong parent or depth",
    ),
    "equal siblings": (index_fault(twin), "two nodes under one parent hold equal tokens: (3, 4)"),
    "siblings in a circle": (
        index_fault(lambda trees: setattr(trees.leaf, "sibling", trees.leaf)),
        "two nodes under one parent hold equal tokens: (3, 4)",
    ),
    "a dead root": (
        index_fault(lambda trees: setattr(trees.root, "block", DEAD)),
        "the root 'root' is dead or has a wrong depth",
    ),
    "a deep root": (
        index_fault(lambda trees: setattr(trees.root, "depth", 1)),
        "the root 'root' is dead or has a wrong depth",
    ),
    "an empty root": (
        index_fault(lambda trees: trees.root.children.clear()),
        "the root 'root' is misnamed or empty",
    ),
    "a root of another name": (
        index_fault(lambda trees: setattr(trees.root, "name", "other")),
        "the root 'root' is misnamed or empty",
    ),
    "nodes miscounted": (
        index_fault(lambda trees: setattr(trees.index, "_num_nodes", 3)),
        "3 nodes are counted but 2 are in the trees",
    ),
    "hollow nodes miscounted": (
        index_fault(lambda trees: setattr(trees.index, "_num_hollow", 0), WindowedTrees),
        "0 hollow nodes are counted but 1 are in the trees",
    ),
    "too many hollow nodes": (
        index_fault(lambda trees: setattr(trees.index, "_max_hollow", 0), WindowedTrees),
        "1 hollow nodes are in the trees, above 0",
    ),
    "a hollow node without a window": (
        index_fault(lambda trees: setattr(trees.index, "window", None), WindowedTrees),
        "the node of tokens (1, 2) is hollow, but there is no window",
    ),
    "a hollow leaf": (
        index_fault(cut_off, WindowedTrees),
        "the node of tokens (1, 2) is hollow and leads nowhere",
    ),
}


@pytest.mark.parametrize("name", INDEX_FAULTS)
def test_each_planted_fault_is_found(name: str) -> None:
    assert_found(*INDEX_FAULTS[name])


@pytest.mark.parametrize(
    ("owner", "check"),
    [(PrefixIndex, "check"), (PrefixIndex, "_check_block"), (PrefixNode, "check_children")],
)
def test_no_condition_can_be_left_out(owner: type, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_all_needed(owner, check, INDEX_FAULTS, monkeypatch)
