"""Chooses who runs in one step and with how many tokens; preempts and admits as blocks allow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.kv.block_pool import BlockPool, InvariantError
from engine.kv.prefix_index import PrefixIndex
from engine.request import Request
from engine.scheduling.admission import Admission
from engine.scheduling.preemption import Preemption
from engine.scheduling.request_table import Entry, RequestTable
from engine.scheduling.step_plan import ScheduledChunk, StepPlan, Swap, Transfers

_MAX_GROWTH = 8.0  # blocks kept back for each running request after repeated preemption


@dataclass(slots=True)
class Step:
    """A plan in the making."""

    most: int  # tokens
    short: bool = False  # blocks ran out
    prefill: int = 0  # tokens of chunks longer than one
    longer: int = 0  # tokens of all chunks, beside one of each
    unsampled: int = 0  # chunks that do not reach the end of their texts
    chunks: list[ScheduledChunk] = field(default_factory=list)
    transfers: Transfers = field(default_factory=Transfers)
    swaps: list[Swap] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    prefilling: list[Entry] = field(default_factory=list)

    @property
    def budget(self) -> int:
        """Tokens left."""
        return self.most - len(self.chunks) - self.longer

    def take(self, entry: Entry, length: int) -> None:
        """Plan the next ``length`` tokens of a sequence whose table covers them."""
        request = entry.request
        start = request.computed
        remaining = len(request.token_ids) - start
        if remaining > 1:
            self.prefilling.append(entry)
            self.prefill += length
        self.chunks.append(ScheduledChunk(request, start, length, length == remaining, entry))
        self.longer += length - 1
        self.unsampled += length < remaining

    def planned(self, held_up: int) -> StepPlan:
        """The plan, complete."""
        return StepPlan(
            chunks=self.chunks,
            num_tokens=len(self.chunks) + self.longer,
            num_samples=len(self.chunks) - self.unsampled,
            transfers=self.transfers,
            preempted=self.preempted,
            admitted=self.admitted,
            swaps=self.swaps,
            prefill=self.prefill,
            held_up=held_up,
        )


class StepPlanner:
    """Plans steps over the sequences of one table.

    :class:`engine.scheduling.scheduler.Scheduler` says what to expect.
    """

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
        self._held_up = 0  # at the last admission: steps that run short have none
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
            self._held_up = 0
            if self._table.waiting:
                if not step.chunks:
                    self._make_room(step)
                self._held_up = self._admission.admit(step)
        return step.planned(self._held_up)

    def _continue_running(self, step: Step) -> None:
        """Give each running sequence its tokens, oldest first, one kept for each that decodes."""
        running = self._table.running
        chunks = step.chunks
        spare: int | None = None  # tokens that no decode needs: the same before and after each decode
        for position, entry in enumerate(running):  # preemption takes from its end, at most all but ``entry``
            request = entry.request
            computed = request.computed
            length = len(request.token_ids) - computed
            if length == 1:  # as nearly always, and nearly always there is room in its last block
                if computed >= entry.writable and not self.grow(entry, 1, step):
                    return
                chunk = entry.decode
                if chunk is None:
                    chunk = entry.decode = ScheduledChunk(request, computed, 1, True, entry)
                chunk.start = computed
                chunks.append(chunk)
                continue
            if spare is None:
                spare = step.budget - sum(later.remaining == 1 for later in running[position + 1 :])
            length = min(length, spare)
            if length <= 0:  # a held beam's is 0 to begin with
                continue
            length = self.grow(entry, length, step)
            if length == 0:
                return
            spare -= length
            step.take(entry, length)

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
        return self._reserve([entry])

    def reserve(self) -> int:
        """Blocks to keep back from admissions for all running sequences; O(running)."""
        return self._reserve(self._table.running)

    def most_reserve(self, step: Step) -> int:
        """At least :meth:`reserve`, once ``step`` has all that runs; O(prefilling).

        The table of a sequence that decodes covers its whole text: it can only want what growth may fill.
        """
        growth = self._pool.blocks_for(int(self._growth * self._pool.block_size))
        return self._reserve(step.prefilling) + self._table.seats * (growth + 1)

    def _reserve(self, entries: Iterable[Entry]) -> int:
        size = self._pool.block_size
        growth = int(self._growth * size)
        blocks = 0
        for entry in entries:
            request = entry.request
            tokens = len(request.token_ids) + growth
            if tokens > request.max_total_tokens:
                tokens = request.max_total_tokens
            own = (tokens + size - 1) // size - len(request.block_table)
            if own > 0:
                blocks += own
            if entry.seats > 1:
                blocks += (entry.seats - 1) * (max(own, 0) + 1)
        return blocks

    def _drop_unseen(self, request: Request) -> None:
        """Release the blocks that no layer of a sliding-window model can see any more."""
        if self._index.window is not None:
            self._table.drop_before(request, self._index.visible_from(request.computed))

    def _make_way(self, entry: Entry, step: Step) -> bool:
        """Preempt somebody so that ``entry`` can grow; true if it was ``entry`` itself."""
        running = self._table.running
        position = len(running) - 1
        if running[position] is entry and not step.chunks:
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
        """Nobody can run: all who have blocks are held until a waiting relative has its turn, so let it in.

        It may lack blocks, or a seat: a search may have more beams than there are seats.
        """
        running = self._table.running
        head = self._admission.head()
        while (
            running
            and head is not None
            and (
                self._table.seats + head.seats > self._max_num_seqs
                or self._admission.needed(head) > self._pool.num_available
            )
        ):
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
