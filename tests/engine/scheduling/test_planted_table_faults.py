"""The check of the sequences finds each fault that it is there for, and needs each of its conditions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from planted_faults import Check, Fault, Faults, assert_all_needed, assert_found

from engine.kv.block_pool import BlockPool
from engine.kv.host_pool import HostPool
from engine.request import Request, RequestState
from engine.sampling_params import SamplingParams
from engine.scheduling.request_table import Entry, RequestTable
from engine.scheduling.step_plan import Candidates


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


TABLE_FAULTS: Faults = {
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
    "tokens of running ones miscounted": (
        table_fault(lambda it: setattr(it.table, "running_limit", 3)),
        "running sequences are taken to come to 3 tokens, wrongly",
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


@pytest.mark.parametrize("name", TABLE_FAULTS)
def test_each_planted_fault_is_found(name: str) -> None:
    assert_found(*TABLE_FAULTS[name])


@pytest.mark.parametrize("check", ["check", "_check_running"])
def test_no_condition_can_be_left_out(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_all_needed(RequestTable, check, TABLE_FAULTS, monkeypatch)
