"""The checks themselves: each finds the fault that it is there for, and each condition in them is needed.

Every fault is planted in a healthy state and must be reported in words of its own. The mutation tests then
weaken each condition of the checks in turn: some fault must slip through, or nothing tests that condition.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from engine.block_pool import BlockPool, InvariantError
from engine.host_pool import HostPool
from engine.prefix_index import PrefixIndex
from engine.prefix_node import DEAD, PrefixNode, RootNode
from engine.request import Request, RequestState
from engine.request_table import Entry, RequestTable
from engine.sampling_params import SamplingParams
from engine.step_plan import Candidates

Check = Callable[[], None]
Fault = Callable[[], Check]  # plants itself in a new state; returns the check that must find it


def pool_with_all_states() -> tuple[BlockPool, list[list[int]]]:
    """Blocks 0 and 1 held (0 keyed), 2 and 3 cached, 4 and 5 free."""
    pool = BlockPool(6, 16)
    held, cached = pool.allocate(2), pool.allocate(2)
    assert held is not None
    assert cached is not None
    for block in (0, 2, 3):
        pool.key(block)
    pool.release(cached)
    pool.check([held])
    return pool, [held]


def pool_fault(plant: Callable[[BlockPool, list[list[int]]], object]) -> Fault:
    def build() -> Check:
        pool, tables = pool_with_all_states()
        plant(pool, tables)
        return lambda: pool.check(tables)

    return build


def circle(pool: BlockPool, tables: list[list[int]]) -> None:
    """The queue of free blocks leads from 5 back to 4."""
    pool._next[pool._free_end], pool._previous[4] = 4, pool._free_end
    pool._next[4], pool._previous[5] = 5, 4
    pool._next[5] = 4


def into_the_other_queue(pool: BlockPool, tables: list[list[int]]) -> None:
    """The queue of free blocks leads to the end of the queue of cached ones."""
    pool._next[pool._free_end] = pool._cached_end


POOL_FAULTS: dict[str, tuple[Fault, str]] = {
    "a reference too many": (
        pool_fault(lambda pool, tables: pool._references.__setitem__(0, 2)),
        "block 0 has 2 references but is in 1 block tables",
    ),
    "a negative count": (
        pool_fault(lambda pool, tables: pool._references.__setitem__(4, -1)),
        "block 4 has -1 references but is in 0 block tables",
    ),
    "a table too many": (
        pool_fault(lambda pool, tables: tables.append([1])),
        "block 1 has 1 references but is in 2 block tables",
    ),
    "a table lost": (
        pool_fault(lambda pool, tables: tables.clear()),
        "block 0 has 1 references but is in 0 block tables",
    ),
    "a free block in a table": (
        pool_fault(lambda pool, tables: tables.append([4])),
        "block 4 has 0 references but is in 1 block tables",
    ),
    "a block past the end": (
        pool_fault(lambda pool, tables: tables.append([6])),
        "names block 6, which does not exist",
    ),
    "a negative block": (
        pool_fault(lambda pool, tables: tables.append([-2])),
        "names block -2, which does not exist",
    ),
    "absent blocks held": (
        pool_fault(lambda pool, tables: pool._references.__setitem__(-1, 1)),
        "the place of absent blocks is held or keyed",
    ),
    "absent blocks keyed": (
        pool_fault(lambda pool, tables: pool._keyed.__setitem__(-1, 1)),
        "the place of absent blocks is held or keyed",
    ),
    "held and free": (
        pool_fault(lambda pool, tables: pool._link(1)),
        "block 1 is in 2 states; it must be in one",
    ),
    "held and cached": (
        pool_fault(lambda pool, tables: pool._link(0)),
        "block 0 is in 2 states; it must be in one",
    ),
    "in no queue": (
        pool_fault(lambda pool, tables: pool._unlink(4)),
        "block 4 is in 0 states; it must be in one",
    ),
    "keyed among free ones": (
        pool_fault(lambda pool, tables: pool._keyed.__setitem__(5, 1)),
        "block 5 is keyed but queued as free",
    ),
    "unkeyed among cached ones": (
        pool_fault(lambda pool, tables: pool._keyed.__setitem__(2, 0)),
        "block 2 is not keyed but queued as cached",
    ),
    "free ones miscounted": (
        pool_fault(lambda pool, tables: setattr(pool, "_num_free", 3)),
        "3 free and 2 cached blocks are counted but 2 and 2 are queued",
    ),
    "cached ones miscounted": (
        pool_fault(lambda pool, tables: setattr(pool, "_num_cached", 1)),
        "2 free and 1 cached blocks are counted but 2 and 2 are queued",
    ),
    "a queue torn in its middle": (
        pool_fault(lambda pool, tables: pool._previous.__setitem__(5, 0)),
        "the free queue is torn before block 5",
    ),
    "a queue torn at its end": (
        pool_fault(lambda pool, tables: pool._previous.__setitem__(pool._cached_end, 3)),
        "the cached queue is torn at its end",
    ),
    "a queue in a circle": (pool_fault(circle), "the free queue runs in a circle at block 4"),
    "a queue into the other": (
        pool_fault(into_the_other_queue),
        "the free queue leads to 7, which is no block",
    ),
    "a queue to nowhere": (
        pool_fault(lambda pool, tables: pool._next.__setitem__(5, -8)),
        "the free queue leads to -8, which is no block",
    ),
}


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


INDEX_FAULTS: dict[str, tuple[Fault, str]] = {
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


class Sequences:
    """Blocks of two tokens. ``first`` and ``second`` run, the others wait.

    ``first`` has computed 2 of 6 tokens and has 3 blocks; ``second`` has computed all and offers candidates.
    """

    def __init__(self) -> None:
        self.pool = BlockPool(16, 2)
        self.host = HostPool(4)
        self.table = RequestTable(self.pool, self.host)
        self.first = self.run("a", 6, computed=2)
        self.first.writable = 6
        self.second = self.run("b", 3, computed=3)
        self.second.candidates = Candidates((1,), (0.0,))
        self.preempted = self.run("c", 4, computed=2)
        self.table.preempt(2, None)
        self.swapped = self.run("d", 4, computed=3)
        contents = [(block, self.pool.generation(block), 1) for block in self.swapped.request.block_table]
        swap = self.host.swap_out(contents)
        assert swap is not None
        self.table.preempt(2, swap[0])
        self.table.settle()
        self.waiting = self.queue("e", 4)
        self.table.check()

    def queue(self, name: str, tokens: int) -> Entry:
        request = Request(name, list(range(tokens)), SamplingParams())
        entry = Entry(request, ("root",), (0.0, 0.0, name, 0), frozenset(), 0)
        self.table.queue(entry)
        return entry

    def run(self, name: str, tokens: int, computed: int) -> Entry:
        """The last of the waiting sequences by order, so at any time the only one that has not run."""
        entry = self.queue(name, tokens)
        self.table.start(self.table.waiting.index(entry))
        blocks = self.pool.allocate(self.pool.blocks_for(tokens))
        assert blocks is not None
        entry.request.block_table, entry.request.computed = blocks, computed
        return entry


def table_fault(plant: Callable[[Sequences], object]) -> Fault:
    def build() -> Check:
        sequences = Sequences()
        plant(sequences)
        return sequences.table.check

    return build


def state_fault(name: str, state: RequestState, message: str) -> tuple[Fault, str]:
    return table_fault(lambda it: setattr(getattr(it, name).request, "state", state)), message


def another_key(it: Sequences) -> None:
    it.table.entries["x", 0] = it.table.entries.pop(("a", 0))


def one_in_a_later_block(it: Sequences) -> None:
    """Somebody shares a block that is written after the next one."""
    it.pool.share(it.first.request.block_table[2:])
    it.first.writable = 2


TABLE_FAULTS: dict[str, tuple[Fault, str]] = {
    "a sequence in no list": (
        table_fault(lambda it: it.table.running.pop()),
        "a live sequence is in no list or in two",
    ),
    "a sequence in two lists": (
        table_fault(lambda it: it.table.waiting.insert(0, it.first)),
        "a live sequence is in no list or in two",
    ),
    "running ones out of order": (
        table_fault(lambda it: it.table.running.reverse()),
        "a list of sequences is out of order",
    ),
    "waiting ones out of order": (
        table_fault(lambda it: it.table.waiting.reverse()),
        "a list of sequences is out of order",
    ),
    "preempted ones miscounted": (
        table_fault(lambda it: setattr(it.table, "num_preempted", 2)),
        "2 preempted sequences are counted, wrongly",
    ),
    "swapped ones miscounted": (
        table_fault(lambda it: setattr(it.table, "num_swapped", 0)),
        "0 swapped sequences are counted, but 1 wait",
    ),
    "seats miscounted": (
        table_fault(lambda it: setattr(it.table, "seats", 3)),
        "3 seats are counted, wrongly",
    ),
    "another key": (table_fault(another_key), "the sequence ('a', 0) is known as ('x', 0)"),
    "host blocks of one that runs": (
        table_fault(lambda it: setattr(it.first, "host_table", [0])),
        "request 'a' is running but holds host blocks",
    ),
    "host blocks of one that is preempted": (
        table_fault(lambda it: setattr(it.preempted, "host_table", [0])),
        "request 'c' is preempted but holds host blocks",
    ),
    "one that runs is waiting": state_fault("first", RequestState.WAITING, "request 'a' runs in state waiting"),
    "one that runs has finished": state_fault(
        "first", RequestState.FINISHED, "request 'a' runs in state finished"
    ),
    "one that waits is running": state_fault(
        "waiting", RequestState.RUNNING, "request 'e' waits in state running"
    ),
    "one that waits has finished": state_fault(
        "waiting", RequestState.FINISHED, "request 'e' waits in state finished"
    ),
    "blocks of one that waits": (
        table_fault(lambda it: it.preempted.request.block_table.append(0)),
        "request 'c' does not run but holds blocks",
    ),
    "computed tokens of one that waits": (
        table_fault(lambda it: setattr(it.waiting.request, "computed", 1)),
        "request 'e' waits with more computed tokens than it has host blocks",
    ),
    "host blocks missing": (
        table_fault(lambda it: it.swapped.host_table.pop()),
        "request 'd' waits with more computed tokens than it has host blocks",
    ),
    "a host block held twice": (
        table_fault(lambda it: it.host.share([0])),
        "host block 0 has 2 references but is in 1 host tables",
    ),
    "more computed than blocks": (
        table_fault(lambda it: it.second.request.block_table.pop()),
        "request 'b' has computed more tokens than it has blocks",
    ),
    "candidates too early": (
        table_fault(lambda it: setattr(it.first, "candidates", Candidates((1,), (0.0,)))),
        "request 'a' has computed all its tokens, or offers candidates before it has",
    ),
    "no candidates": (
        table_fault(lambda it: setattr(it.second, "candidates", None)),
        "request 'b' has computed all its tokens, or offers candidates before it has",
    ),
    "writable past the end": (
        table_fault(lambda it: setattr(it.first, "writable", 7)),
        "request 'a' may write further than its blocks reach",
    ),
    "a findable block about to be written": (
        table_fault(lambda it: it.pool.key(2)),
        "request 'a' is about to write block 2, which others can see",
    ),
    "a shared block declared writable": (
        table_fault(lambda it: it.pool.share([1])),
        "request 'a' is about to write block 1, which others can see",
    ),
    "a shared block further on": (
        table_fault(one_in_a_later_block),
        "request 'a' is about to write block 2, which others can see",
    ),
}

FAULTS = {"pool": POOL_FAULTS, "index": INDEX_FAULTS, "table": TABLE_FAULTS}
CHECKS: dict[str, list[tuple[type, str]]] = {
    "pool": [(BlockPool, "check"), (BlockPool, "_walk")],
    "index": [(PrefixIndex, "check"), (PrefixIndex, "_check_block"), (PrefixNode, "check_children")],
    "table": [(RequestTable, "check"), (RequestTable, "_check_running")],
}


def reported(fault: Fault, message: str) -> bool:
    """Whether the fault is found, and called what it is."""
    check = fault()
    try:
        check()
    except InvariantError as error:
        return message in str(error)
    except (IndexError, KeyError, TypeError):  # what a weakened check may run into
        return False
    return False


@pytest.mark.parametrize(("part", "name"), [(part, name) for part in FAULTS for name in FAULTS[part]])
def test_each_planted_fault_is_found(part: str, name: str) -> None:
    fault, message = FAULTS[part][name]
    check = fault()
    with pytest.raises(InvariantError, match=re.escape(message)):
        check()


def conditions(function: Callable[..., object]) -> Iterator[tuple[str, Callable[..., object]]]:
    """Each condition that leads straight to an error, with the function in which it never holds."""
    source = textwrap.dedent(inspect.getsource(function))
    for place in range(len(_alternatives(ast.parse(source)))):
        tree = ast.parse(source)
        words, weaken = _alternatives(tree)[place]
        weaken(ast.Constant(False))
        made: dict[str, Callable[..., object]] = {}
        code = compile(ast.fix_missing_locations(tree), f"weakened {function.__qualname__}", "exec")
        exec(code, function.__globals__, made)
        yield words, made[function.__name__]


def _alternatives(tree: ast.Module) -> list[tuple[str, Callable[[ast.expr], None]]]:
    """Whole conditions, and each part of one that is joined to the others by ``or``."""
    found: list[tuple[str, Callable[[ast.expr], None]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
            found.append((ast.unparse(node.test), partial(setattr, node, "test")))
            for part in ast.walk(node.test):
                if isinstance(part, ast.BoolOp) and isinstance(part.op, ast.Or):
                    for place, value in enumerate(part.values):
                        found.append((ast.unparse(value), partial(part.values.__setitem__, place)))
    return found


@pytest.mark.parametrize(
    ("part", "owner", "name"), [(part, *check) for part in CHECKS for check in CHECKS[part]]
)
def test_no_condition_can_be_left_out(
    part: str, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weakened = list(conditions(getattr(owner, name)))
    assert weakened, "no condition was found"
    for words, function in weakened:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, function)
            # Stops at the first one that slips through: a later one might run for ever (siblings in a circle).
            missed = any(not reported(*fault) for fault in FAULTS[part].values())
        assert missed, f"no planted fault needs the condition {words!r} of {owner.__name__}.{name}"
