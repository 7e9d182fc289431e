"""Any sequence of pool and index calls keeps every invariant, and a hit is always the asker's own text."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from kv_simulation import constant_hash

from engine.block_pool import BlockPool, InvariantError
from engine.prefix_index import PrefixIndex, PrefixNode

TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class Sequence:
    """One block table with what its KV says."""

    def __init__(self, root: str, tokens: list[int]) -> None:
        self.root = root
        self.tokens = tokens
        self.table: list[int] = []
        self.node: PrefixNode | None = None
        self.findable = 0
        self.computed = 0


class MemoryMachine(RuleBasedStateMachine):
    """Sequences start with a hit, grow, become findable, fork and end, in any order."""

    sequences = Bundle("sequences")
    hash_tokens: Callable[[tuple[int, ...]], int] = staticmethod(hash)

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 3))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.size = block_size
        self.pool = BlockPool(num_blocks, block_size)
        self.index = PrefixIndex(self.pool, type(self).hash_tokens)
        self.live: list[Sequence] = []
        self.contents: dict[int, tuple[str, tuple[int, ...]]] = {}  # block -> root and text up to its end

    def text(self, sequence: Sequence, depth: int) -> tuple[str, tuple[int, ...]]:
        return sequence.root, tuple(sequence.tokens[: (depth + 1) * self.size])

    @rule(target=sequences, root=st.sampled_from(["a", "b"]), tokens=TEXT)
    def begin(self, root: str, tokens: list[int]) -> Sequence:
        sequence = Sequence(root, tokens)
        sequence.node = self.index.match(root, tokens, len(tokens) - 1)
        sequence.table = self.index.blocks(sequence.node)
        self.pool.share(sequence.table)
        sequence.findable = len(sequence.table)
        sequence.computed = sequence.findable * self.size
        assert sequence.computed < len(tokens)
        for depth, block in enumerate(sequence.table):
            assert self.contents[block] == self.text(sequence, depth), "a hit on another text"
        self.live.append(sequence)
        return sequence

    @rule(sequence=sequences, tokens=st.integers(1, 6))
    def compute(self, sequence: Sequence, tokens: int) -> None:
        goal = min(len(sequence.tokens), sequence.computed + tokens)
        missing = self.pool.blocks_for(goal) - len(sequence.table)
        if missing > 0:
            before = (self.pool.num_referenced, self.pool.num_cached, self.pool.num_free)
            blocks = self.pool.allocate(missing, sequence.table[-1] if sequence.table else None)
            if blocks is None:
                assert missing > self.pool.num_available
                assert before == (self.pool.num_referenced, self.pool.num_cached, self.pool.num_free)
                return
            assert blocks == sorted(set(blocks))
            sequence.table.extend(blocks)
        for depth in range(sequence.computed // self.size, self.pool.blocks_for(goal)):
            self.contents[sequence.table[depth]] = self.text(sequence, depth)
        sequence.computed = goal

    @rule(sequence=sequences)
    def make_findable(self, sequence: Sequence) -> None:
        full = sequence.computed // self.size
        if full > sequence.findable:
            sequence.node = self.index.extend(
                sequence.root, sequence.node, sequence.tokens, sequence.table, full
            )
            sequence.findable = full
            found = self.index.match(sequence.root, sequence.tokens, full * self.size)
            assert found is sequence.node
            assert found is not None
            assert found.depth == full

    @rule(target=sequences, sequence=sequences)
    def share_full_blocks(self, sequence: Sequence) -> Sequence:
        """A child that holds its parent's full blocks, as a fork does."""
        child = Sequence(sequence.root, list(sequence.tokens))
        full = sequence.computed // self.size
        child.table = sequence.table[:full]
        self.pool.share(child.table)
        child.computed = full * self.size
        self.live.append(child)
        return child

    @rule(sequence=consumes(sequences))
    def end(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.pool.release(sequence.table)

    @rule(target=sequences)
    def end_all(self) -> object:
        for sequence in self.live:
            self.pool.release(sequence.table)
            sequence.table, sequence.node, sequence.findable = [], None, 0
            sequence.computed = 0
        return multiple()

    @rule(block=st.integers(0, 11))
    def wrong_calls_change_nothing(self, block: int) -> None:
        if block < self.pool.num_blocks and not self.pool.references(block):
            for call in (lambda: self.pool.release([block]), lambda: self.pool.key(block)):
                try:
                    call()
                except InvariantError:
                    continue
                raise AssertionError("a wrong call was taken")

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check([sequence.table for sequence in self.live])
        self.index.check()
        assert self.index.num_roots <= len(self.index) <= self.pool.num_blocks
        for sequence in self.live:
            for depth in range(sequence.computed // self.size):
                assert self.contents[sequence.table[depth]] == self.text(sequence, depth), "overwritten"


class CollidingMachine(MemoryMachine):
    """The same with a hash that tells nothing apart."""

    hash_tokens = staticmethod(constant_hash)


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None)

TestMemory = MemoryMachine.TestCase
TestMemory.settings = SETTINGS
TestColliding = CollidingMachine.TestCase
TestColliding.settings = SETTINGS
