"""Chooses who runs in one step and with how many tokens; preempts and admits as blocks allow."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.admission import Admission
from engine.block_pool import BlockPool, InvariantError
from engine.prefix_index import PrefixIndex
from engine.preemption import Preemption
from engine.request import Request
from engine.request_table import Entry, RequestTable
from engine.step_plan import ScheduledChunk, StepPlan, Swap, Transfers

_MAX_GROWTH = 8.0  # blocks kept back for each running request after repeated preemption


@dataclass(slots=True)
class Step:
    """A plan in the making."""

    budget: int  # tokens left
    decodes: int = 0  # running sequences not yet planned that need exactly one token
    short: bool = False  # blocks ran out
    prefill: int = 0  # tokens of chunks longer than one
    chunks: list[ScheduledChunk] = field(default_factory=list)
    transfers: Transfers = field(default_factory=Transfers)
    swaps: list[Swap] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    prefilling: list[Entry] = field(default_factory=list)

    def take(self, entry: Entry, length: int) -> None:
        """Plan the next ``length`` tokens of a sequence whose table covers them."""
        request = entry.request
        start = request.computed
        remaining = len(request.token_ids) - start
        if remaining > 1:
            self.prefilling.append(entry)
            self.prefill += length
        self.chunks.append(ScheduledChunk(request, start, length, length == remaining, entry))
        self.budget -= length


class StepPlanner:
    """Plans steps over the sequences of one table; :class:`engine.scheduler.Scheduler` says what it promises."""

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        table: RequestTable,
        preemption: Preemption,
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
        self._preemption = preemption
        self._max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self._growth = 1.0
        self._admission = Admission(
            self,
            pool,
            index,
            table,
            preemption,
            max_num_seqs=max_num_seqs,
            prefix_caching=prefix_caching,
            look_ahead=look_ahead,
            max_overtakes=max_overtakes,
        )

    def plan(self) -> StepPlan:
        """Plan one step, changing block tables, states and ``computed`` of whom it admits or preempts."""
        self._table.settle()
        step = Step(self.token_budget)
        if self._table.waiting:
            self._yield_to_priority(step)
        self._continue_running(step)
        if step.short:
            self._growth = min(_MAX_GROWTH, 2 * self._growth)
        else:
            self._growth = max(1.0, 0.99 * self._growth)
            if self._table.waiting:
                if not step.chunks:
                    self._make_room(step)
                self._admission.admit(step)
        return StepPlan(
            step.chunks, step.transfers, step.preempted, step.admitted, step.swaps, step.prefill
        )

    def _continue_running(self, step: Step) -> None:
        """Give each running sequence its tokens, oldest first, one kept for each that decodes."""
        running = self._table.running
        chunks = step.chunks
        step.decodes = sum(len(e.request.token_ids) - e.request.computed == 1 for e in running)
        position = 0
        while position < len(running):  # preemption shortens the list, mostly at its end
            entry = running[position]
            request = entry.request
            computed = request.computed
            length = len(request.token_ids) - computed
            if length == 1:
                step.decodes -= 1
                if computed < entry.writable:  # as nearly always
                    chunks.append(ScheduledChunk(request, computed, 1, True, entry))
                    step.budget -= 1
                    position += 1
                    continue
            elif length > 1:
                length = min(length, step.budget - step.decodes)
            if length > 0:
                length = self.grow(entry, length, step)
                if length == 0:
                    return
                step.take(entry, length)
                position = self._table.position(entry, position)
            position += 1

    def grow(self, entry: Entry, length: int, step: Step) -> int:
        """Let ``entry`` write up to ``length`` more tokens; return how many, 0 if it was preempted itself.

        Its table comes to cover them, and a block that others hold, too, is copied before it is written.
        Fewer tokens now are better than a preemption: blocks are taken from others only for the first token.
        """
        request = entry.request
        pool, size = self._pool, self._pool.block_size
        computed = request.computed
        self._drop_unseen(request)
        while True:
            table = request.block_table
            first = computed // size
            copy = first < len(table) and pool.references(table[first]) > 1
            missing = copy + max(0, pool.blocks_for(computed + length) - len(table))
            if missing == 0:
                break
            count = min(missing, pool.num_available)
            blocks = pool.allocate(count, table[-1] if table and not copy else None) if count else None
            if blocks:
                if copy:
                    step.transfers.copies.append((table[first], blocks[0]))
                    pool.release(table[first : first + 1])
                    table[first] = blocks.pop(0)
                table.extend(blocks)
                break
            if not copy and len(table) * size > computed:
                break
            step.short = True
            if self._make_way(entry, step):
                return 0
        entry.writable = len(table) * size
        return min(length, entry.writable - computed)

    def about_to_need(self, entry: Entry) -> int:
        """Blocks to keep back from admissions for a running sequence.

        They are the rest of its prefill and a block of growth, more after preemptions: admitting into the last
        free blocks would preempt somebody a few steps later. Sequences that will be forked from it count, too.
        """
        request = entry.request
        growth = int(self._growth * self._pool.block_size)
        tokens = min(request.max_total_tokens, len(request.token_ids) + growth)
        own = max(0, self._pool.blocks_for(tokens) - len(request.block_table))
        return own + (entry.seats - 1) * (own + 1)

    def reserve(self) -> int:
        """Blocks to keep back from admissions for all running sequences."""
        return sum(map(self.about_to_need, self._table.running))

    def _drop_unseen(self, request: Request) -> None:
        """Release the blocks that no layer of a sliding-window model can see any more."""
        if self._index.window is not None:
            self._table.drop_before(request, self._index.visible_from(request.computed))

    def _make_way(self, entry: Entry, step: Step) -> bool:
        """Preempt somebody so that ``entry`` can grow; true if it was ``entry`` itself."""
        running = self._table.running
        position = len(running) - 1
        if running[position] is entry:
            if not step.chunks:
                # All before it are held and wait for this one: they can wait without blocks.
                position -= 1
                if position < 0:
                    raise InvariantError(
                        f"request {entry.request.request_id!r} runs alone and does not fit the pool"
                    )
        victim = running[position]
        self._preemption.preempt(position, step)
        return victim is entry

    def _make_room(self, step: Step) -> None:
        """Nobody can run: all who have blocks are held until a relative that waits has its turn, so let it in."""
        running = self._table.running
        head = self._admission.head()
        while running and head is not None and self._admission.needed(head) > self._pool.num_available:
            self._preemption.preempt(len(running) - 1, step)

    def _yield_to_priority(self, step: Step) -> None:
        """Preempt lower priorities for the first waiting sequence, if that lets it in."""
        running = self._table.running
        head = self._admission.head()
        if head is None or not running or not _outranks(head, running[-1]):
            return
        needed = self._admission.needed(head)
        hits = set(self._index.blocks(head.node))
        reserved = self.reserve()
        seats = self._table.seats
        freed = victims = 0
        while (seats + head.seats > self._max_num_seqs and victims < len(running)) or (
            victims < len(running) and needed + reserved > self._pool.num_available + freed
        ):
            victim = running[-1 - victims]
            if not _outranks(head, victim):
                return
            freed += sum(
                block >= 0 and self._pool.references(block) == 1 and block not in hits
                for block in victim.request.block_table
            )
            reserved -= self.about_to_need(victim)
            seats -= victim.seats
            victims += 1
        for _ in range(victims):
            self._preemption.preempt(len(running) - 1, step)


def _outranks(waiting: Entry, running: Entry) -> bool:
    return waiting.request.priority < running.request.priority and waiting.order < running.order
