"""The prefill tokens that an engine still has to compute; a block that several sequences need counts once."""

from __future__ import annotations

from dataclasses import dataclass

from engine.scheduling.sequence import RUNS, Sequence
from engine.scheduling.state import SchedulerState

MAX_REMATCHED = 32
"""Waiting sequences whose prefixes are matched again at each reading: blocks come and go meanwhile."""

MAX_CHANGED_BLOCKS = 1024
"""Blocks found or lost after which the other rematches wait for the next reading: about a millisecond."""

MAX_NEW_BLOCKS = 2048
"""Blocks of new sequences after which the others wait for the next reading: one or two milliseconds."""


@dataclass(slots=True, eq=False)
class Share:
    """What one sequence has to compute: ``own`` tokens, and the blocks ``keys[first:end]``.

    A sequence that ``reuses`` has no blocks yet: it computes those of the range that no other sequence
    computes, in addition to ``own``. Any other sequence computes the range in any case, so that ``own``
    includes it.
    """

    keys: list[int]
    reuses: bool
    first: int
    end: int
    own: int


class PendingPrefill:
    """Follows the sequences that wait or compute a prompt; belongs to the engine's thread.

    The order of sequences is ignored: a block that only waiting sequences lack counts once, and a block that a
    running or swapped-out sequence computes counts for that sequence. The last block of a text always counts
    for its own sequence, because its last token must be run to get logits. The figure is exact while at most
    ``MAX_REMATCHED`` sequences wait and few blocks change. Beyond that, cached and evicted blocks are noticed
    some steps later, and new sequences count as if they shared nothing until it is their turn.

    Changes are recorded as they happen and applied when the figure is read, so a sequence that starts and
    ends in one step costs nothing. Keys are chains of hashes, equal for equal texts under one root. A collision
    only makes the figure one block too small.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._size = state.pool.block_size
        self._prefix_caching = state.prefix_caching
        self._shares: dict[Sequence, Share] = {}
        self._computing: dict[Sequence, Share] = {}  # of those, the ones that run
        self._held: dict[Sequence, None] = {}  # wait with candidates: they get one more token before they run
        self._changed: dict[Sequence, None] = {}
        self._own = 0
        self._wanted: dict[int, int] = {}  # blocks that sequences want to reuse, and how many do
        self._computed: dict[int, int] = {}  # blocks that sequences are going to compute, and how many are
        self._both = 0  # blocks in either
        self._next = 0  # place in the waiting list of the next sequence to match again
        state.observer = self

    def moved(self, sequence: Sequence) -> None:
        """A sequence has begun to wait or to run."""
        self._changed[sequence] = None

    def ended(self, sequence: Sequence) -> None:
        """A sequence is gone."""
        self._changed.pop(sequence, None)
        self._held.pop(sequence, None)
        self._remove(sequence)

    def tokens(self) -> int:
        """Tokens to compute before all live sequences decode."""
        self._apply_changes()
        self._advance()
        self._rematch()
        uncounted = sum(len(sequence.token_ids) - sequence.computed for sequence in self._changed)
        return self._own + (len(self._wanted) - self._both) * self._size + uncounted

    def _apply_changes(self) -> None:
        changed = [*self._changed, *self._held]
        self._changed.clear()
        self._held.clear()
        blocks = 0
        for sequence in changed:
            if sequence not in self._shares:  # its keys are yet to be made
                if blocks >= MAX_NEW_BLOCKS:
                    self._changed[sequence] = None
                    continue
                blocks += len(sequence.token_ids) // self._size
            self._put(sequence)

    def _put(self, sequence: Sequence) -> None:
        """Count a sequence by its present state."""
        before = self._remove(sequence)
        size, length = self._size, len(sequence.token_ids)
        runs = sequence.state in RUNS
        if not runs and sequence.candidates is not None:
            self._held[sequence] = None
        reuses = not runs and not sequence.host_table
        remaining = length - sequence.computed
        if runs and remaining <= 1:
            return
        end = 0
        if self._prefix_caching:
            end = (length - 1 if reuses else length) // size
        keys = self._keys(sequence, end, before.keys if before is not None else [])
        if reuses:
            share = Share(keys, True, 0, end, length - end * size)
            share.first = self._matched_blocks(sequence)
            self._count(self._wanted, self._computed, keys[share.first : end])
        else:
            share = Share(keys, False, min(sequence.computed // size, end), end, remaining)
            self._count(self._computed, self._wanted, keys[share.first : end])
            if runs:
                self._computing[sequence] = share
        self._own += share.own
        self._shares[sequence] = share

    def _remove(self, sequence: Sequence) -> Share | None:
        share = self._shares.pop(sequence, None)
        if share is None:
            return None
        self._own -= share.own
        blocks = share.keys[share.first : share.end]
        if share.reuses:
            self._discount(self._wanted, self._computed, blocks)
        else:
            self._computing.pop(sequence, None)
            self._discount(self._computed, self._wanted, blocks)
        return share

    def _advance(self) -> None:
        """Take off what the last step has computed."""
        for sequence, share in list(self._computing.items()):
            remaining = len(sequence.token_ids) - sequence.computed
            if remaining <= 1:
                self._remove(sequence)
                continue
            self._own += remaining - share.own
            share.own = remaining
            first = min(sequence.computed // self._size, share.end)
            self._discount(self._computed, self._wanted, share.keys[share.first : first])
            share.first = first

    def _rematch(self) -> None:
        waiting = self._state.waiting
        changed = 0
        for _ in range(min(MAX_REMATCHED, len(waiting))):
            self._next = self._next + 1 if self._next + 1 < len(waiting) else 0
            sequence = waiting[self._next]
            share = self._shares.get(sequence)
            if share is None or not share.reuses:  # none: a new sequence that is not counted yet
                continue
            first, matched = share.first, self._matched_blocks(sequence)
            if matched > first:
                self._discount(self._wanted, self._computed, share.keys[first:matched])
            elif matched < first:
                self._count(self._wanted, self._computed, share.keys[matched:first])
            share.first = matched
            changed += abs(matched - first)
            if changed > MAX_CHANGED_BLOCKS:
                break

    def _matched_blocks(self, sequence: Sequence) -> int:
        """Blocks that a waiting sequence would reuse now."""
        if not self._prefix_caching:
            return 0
        tokens, longest = sequence.token_ids, sequence.longest_hit  # admission goes on from here
        sequence.node = self._state.index.match(sequence.root, tokens, longest, sequence.node)
        return 0 if sequence.node is None else sequence.node.depth

    def _keys(self, sequence: Sequence, count: int, known: list[int]) -> list[int]:
        """At least the first ``count`` keys; texts only ever grow, so that ``known`` ones stay."""
        size, tokens = self._size, sequence.token_ids
        key = known[-1] if known else hash(sequence.root)
        for start in range(len(known) * size, count * size, size):
            key = hash((key, *tokens[start : start + size]))
            known.append(key)
        return known

    def _count(self, keys: dict[int, int], others: dict[int, int], blocks: list[int]) -> None:
        for key in blocks:
            count = keys.get(key, 0)
            keys[key] = count + 1
            if not count and key in others:
                self._both += 1

    def _discount(self, keys: dict[int, int], others: dict[int, int], blocks: list[int]) -> None:
        for key in blocks:
            count = keys[key]
            if count > 1:
                keys[key] = count - 1
                continue
            del keys[key]
            if key in others:
                self._both -= 1
