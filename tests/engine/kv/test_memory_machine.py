"""Any sequence of pool and index calls keeps every invariant, and a hit is always the asker's own text."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from kv_simulation import constant_hash

from engine.kv.block_pool import NO_BLOCK, BlockPool, InvariantError
from engine.kv.prefix_index import HOLLOW_PER_BLOCK, PrefixIndex, PrefixNode

# Most texts begin alike, so that there is something to find.
TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=14) | st.builds(
    lambda length, end: [0] * length + end, st.integers(1, 14), st.lists(st.integers(0, 1), max_size=2)
)


class Sequence:
    """One block table with what its KV says."""

    def __init__(self, root: str, tokens: list[int]) -> None:
        self.root = root
        self.tokens = tokens
        self.table: list[int] = []
        self.node: PrefixNode | None = None
        self.hint: PrefixNode | None = None
        self.findable = 0
        self.computed = 0


class MemoryMachine(RuleBasedStateMachine):
    """Sequences start with a hit, grow, become findable, fork and end, in any order.

    With a window they also give up blocks that they cannot see any more.
    """

    sequences = Bundle("sequences")
    hash_tokens: Callable[[tuple[int, ...]], int] = staticmethod(hash)
    windowed = False

    @initialize(num_blocks=st.integers(1, 12), block_size=st.integers(1, 3), window=st.integers(1, 9))
    def start(self, num_blocks: int, block_size: int, window: int) -> None:
        self.size = block_size
        self.pool = BlockPool(num_blocks, block_size)
        self.window = window if self.windowed else None
        self.index = PrefixIndex(self.pool, type(self).hash_tokens, self.window)
        self.live: list[Sequence] = []
        self.handed_out = [0] * num_blocks
        self.contents: dict[int, tuple[str, tuple[int, ...]]] = {}  # block -> root and text up to its end

    def text(self, sequence: Sequence, depth: int) -> tuple[str, tuple[int, ...]]:
        return sequence.root, tuple(sequence.tokens[: (depth + 1) * self.size])

    def needed(self, tokens: int) -> range:
        """Places of the full blocks that the token after so many can see."""
        first = 0 if self.window is None else max(0, tokens - self.window + 1)
        return range(first // self.size, tokens // self.size)

    def longest_hit(self, sequence: Sequence, tokens: int) -> int:
        """What a hit must be, from nothing but which texts are findable: its length in blocks."""
        findable = {self.contents[block] for block in range(self.pool.num_blocks) if self.pool.is_keyed(block)}
        for depth in range(tokens // self.size, 0, -1):
            root, text = self.text(sequence, depth - 1)
            on_the_way = any(other == root and longer[: len(text)] == text for other, longer in findable)
            if on_the_way and all(
                self.text(sequence, place) in findable for place in self.needed(depth * self.size)
            ):
                return depth
        return 0

    @rule(target=sequences, root=st.sampled_from(["a", "b"]), tokens=TEXT)
    def begin(self, root: str, tokens: list[int]) -> Sequence:
        sequence = Sequence(root, tokens)
        sequence.node = self.index.match(root, tokens, len(tokens) - 1)
        sequence.table = self.index.blocks(sequence.node)
        assert len(sequence.table) == self.longest_hit(sequence, len(tokens) - 1)
        self.pool.share(sequence.table)
        sequence.findable = len(sequence.table)
        sequence.computed = sequence.findable * self.size
        assert sequence.computed < len(tokens)
        needed = self.needed(len(sequence.table) * self.size)
        for depth, block in enumerate(sequence.table):
            assert (block != NO_BLOCK) == (depth in needed)
            if block != NO_BLOCK:
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
            for block in blocks:
                self.handed_out[block] += 1
            sequence.table.extend(blocks)
        for depth in range(sequence.computed // self.size, self.pool.blocks_for(goal)):
            self.contents[sequence.table[depth]] = self.text(sequence, depth)
        sequence.computed = goal

    @rule(sequence=sequences)
    def make_findable(self, sequence: Sequence) -> None:
        full = sequence.computed // self.size
        if full <= sequence.findable:
            return
        node = self.index.extend(sequence.root, sequence.node, sequence.tokens, sequence.table, full)
        sequence.node, sequence.findable = node, full
        found = self.index.match(sequence.root, sequence.tokens, full * self.size)
        assert (0 if found is None else found.depth) == self.longest_hit(sequence, full * self.size)
        if NO_BLOCK in sequence.table:
            assert node is None or node.depth <= full
        else:
            assert node is not None
            assert node.depth == full
        if self.window is None:
            assert found is node

    @precondition(lambda self: self.windowed)
    @rule(sequence=sequences)
    def slide(self, sequence: Sequence) -> None:
        """Give up what no later token of the sequence can see."""
        first = min(self.index.visible_from(sequence.computed), len(sequence.table))
        gone = sequence.table[:first]
        sequence.table[:first] = [NO_BLOCK] * first
        self.pool.release(gone)

    @rule(sequence=sequences)
    def run_to_the_end(self, sequence: Sequence) -> None:
        """Step by step, as a scheduler does it."""
        while sequence.computed < len(sequence.tokens):
            before = sequence.computed
            self.compute(sequence, 3)
            if sequence.computed == before:
                return
            self.make_findable(sequence)
            if self.windowed:
                self.slide(sequence)

    @rule(count=st.integers(1, 3))
    def evict(self, count: int) -> None:
        """Somebody takes blocks for a moment."""
        blocks = self.pool.allocate(min(self.pool.num_available, self.pool.num_free + count))
        assert blocks is not None
        for block in blocks:
            self.handed_out[block] += 1
        self.pool.release(blocks)

    @rule(sequence=sequences, tokens=st.integers(0, 14))
    def look(self, sequence: Sequence, tokens: int) -> None:
        """A query that goes on from an earlier one finds what it would have found without."""
        before = (self.pool.num_cached, self.pool.num_free, len(self.index), self.index.num_hollow)
        limit = min(tokens, len(sequence.tokens))
        hint = sequence.hint if sequence.hint is not None and sequence.hint.depth * self.size <= limit else None
        sequence.hint = self.index.match(sequence.root, sequence.tokens, limit, hint)
        depth = 0 if sequence.hint is None else sequence.hint.depth
        assert depth == self.longest_hit(sequence, limit)
        assert before == (self.pool.num_cached, self.pool.num_free, len(self.index), self.index.num_hollow)

    @rule(chance=st.integers(0, 7))
    def reset(self, chance: int) -> None:
        if chance != 7:  # seldom: it ends all that was being built up
            return
        cached, free = self.pool.num_cached, self.pool.num_free
        assert self.index.reset() == cached
        assert (self.pool.num_cached, self.pool.num_free) == (0, cached + free)
        assert (len(self.index), self.index.num_hollow, self.index.num_roots) == (0, 0, 0)
        for sequence in self.live:
            assert sequence.node is None or not sequence.node.alive
            assert self.index.match(sequence.root, sequence.tokens, len(sequence.tokens), sequence.node) is None

    @rule(target=sequences, sequence=sequences)
    def share_full_blocks(self, sequence: Sequence) -> object:
        """A child that holds its parent's full blocks, as a fork does."""
        child = Sequence(sequence.root, list(sequence.tokens))
        full = sequence.computed // self.size
        if any(sequence.table[place] == NO_BLOCK for place in self.needed(full * self.size)):
            return multiple()  # the parent is further and sees less
        child.table = sequence.table[:full]
        self.pool.share(child.table)
        child.computed = full * self.size
        self.live.append(child)
        return child

    @rule(sequence=consumes(sequences))
    def end(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.pool.release(sequence.table)

    @rule(target=sequences, chance=st.integers(0, 3))
    def end_all(self, chance: int) -> object:
        if chance != 3:
            return multiple()
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
        assert self.index.num_hollow <= HOLLOW_PER_BLOCK * self.pool.num_blocks * self.windowed
        assert [self.pool.generation(block) for block in range(self.pool.num_blocks)] == self.handed_out
        for sequence in self.live:
            seen = self.needed(sequence.computed)
            for depth in range(sequence.computed // self.size):
                block = sequence.table[depth]
                assert block != NO_BLOCK or depth not in seen, "a block in sight is gone"
                if block != NO_BLOCK:
                    assert self.contents[block] == self.text(sequence, depth), "overwritten"


class CollidingMachine(MemoryMachine):
    """The same with a hash that tells nothing apart."""

    hash_tokens = staticmethod(constant_hash)


class WindowMachine(MemoryMachine):
    """The same for a model whose layers all have sliding windows."""

    windowed = True

    @rule(root=st.sampled_from(["a", "b"]), tokens=TEXT)
    def pass_through(self, root: str, tokens: list[int]) -> None:
        """A sequence that comes, runs and goes: its blocks are cached in the order in which it gave them up."""
        sequence = self.begin(root, tokens)
        self.run_to_the_end(sequence)
        self.end(sequence)


class CollidingWindowMachine(WindowMachine):
    """Both."""

    hash_tokens = staticmethod(constant_hash)


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None)

TestMemory = MemoryMachine.TestCase
TestMemory.settings = SETTINGS
TestColliding = CollidingMachine.TestCase
TestColliding.settings = SETTINGS
TestWindow = WindowMachine.TestCase
TestWindow.settings = settings(SETTINGS, max_examples=150)
TestCollidingWindow = CollidingWindowMachine.TestCase
TestCollidingWindow.settings = settings(SETTINGS, max_examples=100)
