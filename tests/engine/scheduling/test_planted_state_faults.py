"""The check of the sequences finds each fault that it is there for, and needs each of its conditions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from faulty_states import Check, Fault, Faults, assert_all_needed, assert_found
from sequences import make_sequence

from engine.kv.block_pool import BlockPool
from engine.kv.host_pool import HostPool
from engine.kv.prefix_index import PrefixIndex
from engine.scheduling.candidates import Candidates
from engine.scheduling.recovery import Rates, RecoveryMode, RecoveryPolicy
from engine.scheduling.scheduler_config import SchedulerConfig
from engine.scheduling.sequence import Sequence, SequenceState
from engine.scheduling.state import SchedulerState


class Sequences:
    """Blocks of two tokens. ``first`` and ``second`` run, the others wait.

    ``first`` has computed 2 of 6 tokens and has 3 blocks; ``second`` has computed all and has candidates.
    """

    def __init__(self) -> None:
        self.pool = BlockPool(16, 2)
        self.host = HostPool(4)
        self.state = SchedulerState(
            self.pool,
            PrefixIndex(self.pool),
            self.host,
            RecoveryPolicy(RecoveryMode.RECOMPUTE, 2, Rates()),
            SchedulerConfig(max_num_seqs=8, token_budget=8),
        )
        self.first = self.run("a", 6, computed=2)
        self.first.writable = 6
        self.second = self.run("b", 3, computed=3)
        self.second.candidates = Candidates((1,), (0.0,))
        self.preempted = self.run("c", 4, computed=2)
        self.state.preempt_to_recompute(2)
        self.swapped = self.run("d", 4, computed=3)
        contents = [(block, self.pool.generation(block), 1) for block in self.swapped.block_table]
        swap = self.host.swap_out(contents)
        assert swap is not None
        self.state.preempt_to_swap(2, swap[0])
        self.state.settle_swaps()
        self.waiting = self.queue("e", 4)
        self.state.check()

    def queue(self, name: str, tokens: int) -> Sequence:
        sequence = make_sequence(list(range(tokens)), name=name)
        self.state.queue(sequence)
        return sequence

    def run(self, name: str, tokens: int, computed: int) -> Sequence:
        """The last of the waiting sequences by order, so at any time the only one that has not run."""
        sequence = self.queue(name, tokens)
        self.state.start(self.state.waiting.index(sequence), 1)
        blocks = self.pool.allocate(self.pool.blocks_for(tokens))
        assert blocks is not None
        sequence.block_table, sequence.computed = blocks, computed
        return sequence


def planted(plant: Callable[[Sequences], object]) -> Fault:
    def build() -> Check:
        sequences = Sequences()
        plant(sequences)
        return sequences.state.check

    return build


def state_fault(name: str, state: SequenceState, message: str) -> tuple[Fault, str]:
    return planted(lambda it: setattr(getattr(it, name), "state", state)), message


def another_key(it: Sequences) -> None:
    it.state.sequences["x", 0] = it.state.sequences.pop(("a", 0))


def one_in_a_later_block(it: Sequences) -> None:
    """Somebody shares a block that is written after the next one."""
    it.pool.share(it.first.block_table[2:])
    it.first.writable = 2


def miscounted_slots(it: Sequences) -> None:
    it.waiting.num_seqs += 1
    it.state.num_waiting += 1


STATE_FAULTS: Faults = {
    "a sequence in no list": (
        planted(lambda it: it.state.running.pop()),
        "a live sequence is in no list or in two",
    ),
    "a sequence in two lists": (
        planted(lambda it: it.state.waiting.insert(0, it.first)),
        "a live sequence is in no list or in two",
    ),
    "running ones out of order": (
        planted(lambda it: it.state.running.reverse()),
        "a list of sequences is out of order",
    ),
    "waiting ones out of order": (
        planted(lambda it: it.state.waiting.reverse()),
        "a list of sequences is out of order",
    ),
    "preempted ones miscounted": (
        planted(lambda it: setattr(it.state, "num_preempted", 2)),
        "2 preempted sequences are counted, wrongly",
    ),
    "swapped ones miscounted": (
        planted(lambda it: setattr(it.state, "num_swapped", 0)),
        "0 swapped sequences are counted, but 1 wait",
    ),
    "running ones miscounted": (
        planted(lambda it: setattr(it.state, "num_seqs", 3)),
        "3 running sequences are counted, wrongly",
    ),
    "waiting ones miscounted": (
        planted(lambda it: setattr(it.state, "num_waiting", 5)),
        "5 waiting sequences are counted, wrongly",
    ),
    "tokens of running ones miscounted": (
        planted(lambda it: setattr(it.state, "running_limit", 3)),
        "running sequences are taken to reach 3 tokens, wrongly",
    ),
    "another key": (planted(another_key), "the sequence ('a', 0) is known as ('x', 0)"),
    "host blocks of one that runs": (
        planted(lambda it: setattr(it.first, "host_table", [0])),
        "request 'a' is running but holds host blocks",
    ),
    "host blocks of one that is preempted": (
        planted(lambda it: setattr(it.preempted, "host_table", [0])),
        "request 'c' is preempted but holds host blocks",
    ),
    "one that runs is waiting": state_fault(
        "first", SequenceState.WAITING, "request 'a' runs in state waiting"
    ),
    "one that runs has finished": state_fault(
        "first", SequenceState.FINISHED, "request 'a' runs in state finished"
    ),
    "one that waits is running": state_fault(
        "waiting", SequenceState.RUNNING, "request 'e' waits in state running"
    ),
    "one that waits has finished": state_fault(
        "waiting", SequenceState.FINISHED, "request 'e' waits in state finished"
    ),
    "blocks of one that waits": (
        planted(lambda it: it.preempted.block_table.append(0)),
        "request 'c' does not run but holds blocks",
    ),
    "slots of one that waits": (
        planted(miscounted_slots),
        "request 'e' waits for 2 slots, wrongly",
    ),
    "computed tokens of one that waits": (
        planted(lambda it: setattr(it.waiting, "computed", 1)),
        "request 'e' waits with more computed tokens than it has host blocks",
    ),
    "host blocks missing": (
        planted(lambda it: it.swapped.host_table.pop()),
        "request 'd' waits with more computed tokens than it has host blocks",
    ),
    "a host block held twice": (
        planted(lambda it: it.host.share([0])),
        "host block 0 has 2 references but is in 1 host tables",
    ),
    "more computed than blocks": (
        planted(lambda it: it.second.block_table.pop()),
        "request 'b' has computed more tokens than it has blocks",
    ),
    "candidates too early": (
        planted(lambda it: setattr(it.first, "candidates", Candidates((1,), (0.0,)))),
        "request 'a' has computed all its tokens, or has candidates before it has",
    ),
    "no candidates": (
        planted(lambda it: setattr(it.second, "candidates", None)),
        "request 'b' has computed all its tokens, or has candidates before it has",
    ),
    "writable past the end": (
        planted(lambda it: setattr(it.first, "writable", 7)),
        "request 'a' may write further than its blocks reach",
    ),
    "a findable block about to be written": (
        planted(lambda it: it.pool.key(2)),
        "request 'a' is about to write block 2, which others can see",
    ),
    "a shared block declared writable": (
        planted(lambda it: it.pool.share([1])),
        "request 'a' is about to write block 1, which others can see",
    ),
    "a shared block further on": (
        planted(one_in_a_later_block),
        "request 'a' is about to write block 2, which others can see",
    ),
}


@pytest.mark.parametrize("name", STATE_FAULTS)
def test_each_planted_fault_is_found(name: str) -> None:
    assert_found(*STATE_FAULTS[name])


@pytest.mark.parametrize("check", ["check", "_check_running"])
def test_no_condition_can_be_left_out(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_all_needed(SchedulerState, check, STATE_FAULTS, monkeypatch)
