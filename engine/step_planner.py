"""Chooses who runs in one step and with how many tokens; preempts and admits as blocks allow."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.block_pool import BlockPool, InvariantError
from engine.prefix_index import PrefixIndex
from engine.recovery import Recovery, RecoveryPolicy
from engine.request import Request, RequestState
from engine.request_table import Entry, RequestTable
from engine.step_plan import ScheduledChunk, StepPlan

_MAX_GROWTH = 8.0  # blocks kept back for each running request after repeated preemption
_MAX_SHARERS = 32  # waiting requests passed over in one step because their next block is in the making


@dataclass(slots=True)
class _Step:
    """A plan in the making."""

    budget: int  # tokens left
    decodes: int = 0  # running requests not yet planned that need exactly one token
    reserved: int = 0  # blocks that running requests are about to need
    short: bool = False  # blocks ran out
    chunks: list[ScheduledChunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    prefilling: list[Entry] = field(default_factory=list)

    def take(self, entry: Entry, length: int) -> None:
        """Plan the next ``length`` tokens of a request whose table covers them."""
        request = entry.request
        remaining = entry.remaining
        if remaining > 1:
            self.prefilling.append(entry)
        self.chunks.append(ScheduledChunk(request, request.computed, length, length == remaining))
        self.budget -= length


class StepPlanner:
    """Plans steps over the requests of one table; :class:`engine.scheduler.Scheduler` says what it promises."""

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        table: RequestTable,
        recovery: RecoveryPolicy,
        *,
        max_num_seqs: int,
        token_budget: int,
        prefix_caching: bool,
        look_ahead: int,
        max_overtakes: int,
    ) -> None:
        self._pool = pool
        self._index = index
        self._table = table
        self._recovery = recovery
        self._max_num_seqs = min(max_num_seqs, token_budget)
        self._token_budget = token_budget
        self._prefix_caching = prefix_caching
        self._look_ahead = look_ahead
        self._max_overtakes = max_overtakes
        self._growth = 1.0
        self.num_preemptions = 0

    def plan(self) -> StepPlan:
        """Plan one step, changing block tables, states and ``computed`` of whom it admits or preempts."""
        step = _Step(self._token_budget)
        self._yield_to_priority(step)
        self._continue_running(step)
        if step.short:
            self._growth = min(_MAX_GROWTH, 2 * self._growth)
        else:
            self._growth = max(1.0, 0.99 * self._growth)
            self._admit(step)
        return StepPlan(step.chunks, step.preempted, step.admitted)

    def _continue_running(self, step: _Step) -> None:
        """Give each running request its tokens, oldest first, one kept for each that decodes."""
        running = self._table.running
        step.decodes = sum(entry.remaining == 1 for entry in running)
        position = 0
        while position < len(running):  # preemption shortens the list, at its end
            entry = running[position]
            length = entry.remaining
            if length == 1:
                step.decodes -= 1
            else:
                length = min(length, step.budget - step.decodes)
            if length > 0:
                length = self._grow(entry, length, step)
                if length == 0:
                    return
                step.take(entry, length)
            step.reserved += self._about_to_need(entry)
            position += 1

    def _grow(self, entry: Entry, length: int, step: _Step) -> int:
        """Make the table cover up to ``length`` more tokens; return how many, 0 if ``entry`` was preempted.

        Fewer tokens now are better than a preemption: blocks are taken from others only for the first token.
        """
        request = entry.request
        table = request.block_table
        size = self._pool.block_size
        missing = self._pool.blocks_for(request.computed + length) - len(table)
        while missing > 0:
            count = min(missing, self._pool.num_available)
            blocks = self._pool.allocate(count, after=table[-1] if table else None) if count else None
            if blocks:
                table.extend(blocks)
                break
            if len(table) * size > request.computed:
                break
            step.short = True
            victim = self._table.running[-1]
            if victim is entry and len(self._table.running) == 1:
                raise InvariantError(f"request {request.request_id!r} runs alone and does not fit the pool")
            self._preempt_last(step)
            if victim is entry:
                return 0
        return min(length, len(table) * size - request.computed)

    def _about_to_need(self, entry: Entry) -> int:
        """Blocks to keep back from admissions for a running request.

        They are the rest of its prefill and a block of growth, more after preemptions: admitting into the last
        free blocks would preempt somebody a few steps later.
        """
        request = entry.request
        growth = int(self._growth * self._pool.block_size)
        tokens = min(request.max_total_tokens, len(request.token_ids) + growth)
        return max(0, self._pool.blocks_for(tokens) - len(request.block_table))

    def _preempt_last(self, step: _Step) -> None:
        victim = self._table.running[-1].request
        if self._recovery.choose(victim) is not Recovery.RECOMPUTE:
            raise InvariantError(f"request {victim.request_id!r} cannot recover in the chosen way")
        self._table.preempt_last()
        self.num_preemptions += 1
        step.preempted.append(victim)

    def _yield_to_priority(self, step: _Step) -> None:
        """Preempt lower priorities for the first waiting request, if that lets it in."""
        running, waiting = self._table.running, self._table.waiting
        if not waiting or not running or running[-1].request.priority <= waiting[0].request.priority:
            return
        head = waiting[0]
        needed = self._needed(head)
        hits = set(self._index.blocks(head.node))
        reserved = sum(map(self._about_to_need, running))
        freed = victims = 0
        while len(running) - victims >= self._max_num_seqs or (
            victims < len(running) and needed + reserved > self._pool.num_available + freed
        ):
            victim = running[-1 - victims]
            if victim.request.priority <= head.request.priority:
                return
            freed += sum(
                self._pool.references(block) == 1 and block not in hits for block in victim.request.block_table
            )
            reserved -= self._about_to_need(victim)
            victims += 1
        for _ in range(victims):
            self._preempt_last(step)

    def _admit(self, step: _Step) -> None:
        """Start waiting requests in order, passing over a bounded number that do not fit."""
        running, waiting = self._table.running, self._table.waiting
        position = misses = sharers = kept = 0
        passed: list[Entry] = []
        while position < len(waiting) and step.budget > 0 and len(running) < self._max_num_seqs:
            entry = waiting[position]
            needed = self._needed(entry)
            if self._in_the_making(entry, step):
                sharers += 1
                if sharers > _MAX_SHARERS:
                    return
            elif not running or needed + step.reserved + kept <= self._pool.num_available:
                self._start(position, step)
                for other in passed:
                    other.overtakes += 1
                continue
            else:
                misses += 1
                if misses > self._look_ahead or entry.overtakes >= self._max_overtakes:
                    return
                passed.append(entry)
            if entry.request.state is RequestState.PREEMPTED:
                kept += self._pool.blocks_for(len(entry.request.token_ids) + 1)
            position += 1

    def _needed(self, entry: Entry) -> int:
        """Blocks that admission takes out of the available ones, for all tokens and one more.

        The prefix is matched anew at each try: what was there in the last step may be gone, or grown.
        """
        tokens = entry.request.token_ids
        needed = self._pool.blocks_for(len(tokens) + 1)
        if not self._prefix_caching:
            return needed
        # The last token is always run: its logits are needed.
        entry.node = self._index.match(entry.root, tokens, len(tokens) - 1, entry.node)
        return needed - sum(self._pool.references(block) > 0 for block in self._index.blocks(entry.node))

    def _in_the_making(self, entry: Entry, step: _Step) -> bool:
        """Whether a request in this very plan computes the next block that ``entry`` misses.

        It then waits, holding nothing, and is asked again in the next step. That ends: the other request moves
        on by at least a token in each step that makes this one wait.
        """
        if not self._prefix_caching:
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

    def _start(self, position: int, step: _Step) -> None:
        """Admit a request for which there are blocks."""
        entry = self._table.start(position)
        request = entry.request
        request.block_table = self._index.blocks(entry.node)
        self._pool.share(request.block_table)
        entry.findable = len(request.block_table)
        request.computed = entry.findable * self._pool.block_size
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
            step.admitted.append(request)
        length = self._grow(entry, min(entry.remaining, step.budget), step)
        step.take(entry, length)
        step.reserved += self._about_to_need(entry)
