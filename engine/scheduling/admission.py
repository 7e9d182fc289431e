"""Lets waiting sequences in, in order, passing over a bounded number that do not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kv.block_pool import NO_BLOCK, BlockPool
from engine.kv.prefix_index import PrefixIndex, PrefixNode
from engine.request import RequestState
from engine.scheduling.preemption import Preemption
from engine.scheduling.request_table import Entry, RequestTable
from engine.scheduling.step_plan import Swap

if TYPE_CHECKING:
    from engine.scheduling.step_planner import Step, StepPlanner

_MAX_SHARERS = 32  # waiting sequences passed over in one step because their next block is in the making


class Admission:
    """Decides which waiting sequences start, and gives them their first blocks."""

    def __init__(
        self,
        planner: StepPlanner,
        pool: BlockPool,
        index: PrefixIndex,
        table: RequestTable,
        preemption: Preemption,
        *,
        max_num_seqs: int,
        prefix_caching: bool,
        look_ahead: int,
        max_overtakes: int,
    ) -> None:
        self._planner = planner
        self._pool = pool
        self._index = index
        self._table = table
        self._preemption = preemption
        self._max_num_seqs = max_num_seqs
        self._prefix_caching = prefix_caching
        self._look_ahead = look_ahead
        self._max_overtakes = max_overtakes

    def head(self) -> Entry | None:
        """The first waiting sequence that may start."""
        return next(filter(_may_start, self._table.waiting), None)

    def admit(self, step: Step) -> int:
        """Start waiting sequences while tokens, seats and blocks last.

        Returns behind how many whoever comes now has to stay, for want of a seat or of blocks. Those left for
        want of tokens do not count, nor those that are passed over.
        """
        table, pool = self._table, self._pool
        waiting = table.waiting
        position = misses = sharers = kept = 0
        reserved: int | None = None
        exact = False
        held: dict[PrefixNode, int] = {}
        passed: list[Entry] = []
        while position < len(waiting) and step.budget > 0 and table.seats < self._max_num_seqs:
            entry = waiting[position]
            if not _may_start(entry):
                position += 1
                continue
            needed = self.needed(entry, held)
            if self._in_the_making(entry, step):
                sharers += 1
                if sharers > _MAX_SHARERS:
                    return 0
            else:
                fits = table.seats + entry.seats <= self._max_num_seqs and needed + kept <= pool.num_available
                if fits and step.chunks:  # while nothing runs, nothing is kept back
                    if reserved is None:
                        reserved = self._planner.most_reserve(step)
                    if not exact and needed + reserved + kept > pool.num_available:
                        reserved, exact = self._planner.reserve(), True
                    fits = needed + reserved + kept <= pool.num_available
                if fits or not table.running:
                    self._start(position, step)
                    held.clear()
                    if reserved is not None:
                        reserved += self._planner.about_to_need(entry)
                    for other in passed:
                        other.overtakes += 1
                    continue
                misses += 1
                if misses > self._look_ahead or entry.overtakes >= self._max_overtakes:
                    return len(waiting) - position
                passed.append(entry)
            if entry.request.state is not RequestState.WAITING:
                kept += self._most(entry)
            position += 1
        return len(waiting) - position if table.seats >= self._max_num_seqs else 0

    def needed(self, entry: Entry, held: dict[PrefixNode, int] | None = None) -> int:
        """Blocks that admission takes out of the available ones, for all tokens and one more.

        The prefix is matched anew at each try: what was there in the last step may be gone, or grown. ``held``
        keeps how many of a hit's blocks are held, for others with the same hit, as long as nothing changes.
        """
        request = entry.request
        needed = self._most(entry)
        if not self._prefix_caching:
            return needed
        tokens = request.token_ids
        # The last token is always run: its logits are needed. A swapped sequence looks for what it had.
        most = request.computed if entry.host_table else len(tokens) - 1
        entry.node = self._index.match(entry.root, tokens, most, entry.node)
        if entry.node is None:
            return needed
        count = None if held is None else held.get(entry.node)
        if count is None:
            count = sum(map(bool, map(self._pool.references, self._index.blocks(entry.node))))
            if held is not None:
                held[entry.node] = count
        return max(needed - count, 1)

    def _most(self, entry: Entry) -> int:
        """Blocks for all tokens and one more, and one for each sequence that will be forked from it."""
        tokens = len(entry.request.token_ids) + 1
        window = self._index.window
        blocks = self._pool.blocks_for(tokens)
        if window is not None:
            # Blocks behind the window go as the prompt is computed.
            blocks = min(blocks, self._pool.blocks_for(window + self._planner.token_budget) + 2)
        return blocks + entry.seats - 1

    def _in_the_making(self, entry: Entry, step: Step) -> bool:
        """Whether a sequence in this very plan computes the next block that ``entry`` misses.

        It then waits, holding nothing, and is asked again in the next step. That ends: the other moves
        on by at least a token in each step that makes this one wait.
        """
        if not self._prefix_caching or not step.prefilling or entry.host_table:
            return False
        size = self._pool.block_size
        depth = entry.node.depth if entry.node is not None else 0
        end = (depth + 1) * size
        tokens = entry.request.token_ids
        if end > len(tokens) - 1:
            return False
        block = tokens[depth * size : end]
        return any(
            owner.findable == depth
            and owner.node is entry.node
            and owner.root == entry.root
            and owner.request.token_ids[depth * size : end] == block
            for owner in step.prefilling
        )

    def _start(self, position: int, step: Step) -> None:
        """Admit a sequence for which there are blocks."""
        entry = self._table.start(position)
        request = entry.request
        size = self._pool.block_size
        request.block_table = self._index.blocks(entry.node)
        self._pool.share(request.block_table)
        entry.findable = kept = len(request.block_table)
        if request.state is RequestState.SWAPPING_IN:
            self._swap_in(entry, step)
        else:
            request.computed = kept * size
            if request.cached_tokens is None:
                request.cached_tokens = request.computed
                step.admitted.append(request)
        self._preemption.resumed(entry, kept)
        length = self._planner.grow(entry, min(entry.remaining, step.budget), step)
        step.take(entry, length)

    def _swap_in(self, entry: Entry, step: Step) -> None:
        """Give a swapped sequence blocks for what the index no longer has, to be filled from the host.

        What it cannot see any more stays away: a block given up in the step that fills it could be given to
        another, and be filled twice.
        """
        request = entry.request
        found = len(request.block_table)
        hidden = self._index.visible_from(request.computed)
        self._table.drop_before(request, min(hidden, found))
        sources = entry.host_table[found : self._pool.blocks_for(request.computed)]
        unseen = min(max(hidden - found, 0), len(sources))
        sources[:unseen] = [NO_BLOCK] * unseen
        present = [block for block in sources if block != NO_BLOCK]
        last = request.block_table[-1] if request.block_table else None
        fresh = self._pool.allocate(len(present), last if last != NO_BLOCK else None)
        assert fresh is not None, "admission has counted them"
        step.transfers.swap_in.extend(zip(present, fresh, strict=True))
        blocks = iter(fresh)
        request.block_table.extend(NO_BLOCK if source == NO_BLOCK else next(blocks) for source in sources)
        if entry.decision is not None:
            step.swaps.append(Swap(entry.decision, 0, len(present)))


def _may_start(entry: Entry) -> bool:
    """Whether a waiting sequence can go on; a held beam has nothing to compute, and its blocks can wait."""
    return entry.candidates is None and entry.request.state is not RequestState.SWAPPING_OUT
