"""The scheduler's state: pools, limits, and the live sequences in two ordered lists, running and waiting."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Protocol

from engine.kv.block_pool import NO_BLOCK, BlockPool, InvariantError
from engine.kv.host_pool import HostPool
from engine.kv.prefix_index import PrefixIndex
from engine.request import FinishReason
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.fair_queue import OUTPUT_WEIGHT, FairQueue, Ticket
from engine.scheduling.growth_reserve import GrowthReserve
from engine.scheduling.prefill_shares import PrefillShares
from engine.scheduling.recovery import RecoveryPolicy
from engine.scheduling.recovery_tracker import RecoveryTracker
from engine.scheduling.scheduler_config import SchedulerConfig
from engine.scheduling.sequence import RUNS, Order, Sequence, SequenceState, order_of
from engine.scheduling.slot_ends import OutputLengths

_order: Callable[[Sequence], Order] = attrgetter("order")  # much faster than a function of our own

_HAS_HOST_BLOCKS = (SequenceState.SWAPPING_OUT, SequenceState.SWAPPED, SequenceState.SWAPPING_IN)


class StateObserver(Protocol):
    """Is told of each sequence that arrives, moves between lists, or ends; not of forks that run at once."""

    def moved(self, sequence: Sequence) -> None:
        """A sequence has begun to wait or to run."""

    def ended(self, sequence: Sequence) -> None:
        """A sequence is gone."""


class SchedulerState:
    """The state that the parts of the scheduler share. Only this class changes a sequence's state.

    :class:`engine.scheduling.scheduler.Scheduler` describes the arguments. Other objects may read this state
    between two calls of the scheduler.
    """

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        host: HostPool,
        recovery: RecoveryPolicy,
        config: SchedulerConfig,
    ) -> None:
        self.pool = pool
        self.index = index
        self.host = host
        self.max_num_seqs = min(config.max_num_seqs, config.token_budget)
        self.token_budget = config.token_budget
        self.prefix_caching = config.prefix_caching
        self.look_ahead = config.look_ahead
        self.max_overtakes = config.max_overtakes
        self.block_tables = BlockTables(pool, index)
        self.reserve = GrowthReserve(pool)
        self.fair = FairQueue()
        self.shares = PrefillShares()
        self.recoveries = RecoveryTracker(pool, host, recovery)

        self.sequences: dict[tuple[str, int], Sequence] = {}  # by their keys
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []  # never admitted, or preempted
        self.num_seqs = 0  # that the running ones count for against ``max_num_seqs``
        self.num_waiting = 0  # that the waiting ones will count for
        self.running_limit = 0  # tokens that the running ones may reach together
        self.num_preempted = 0  # waiting to recompute their KV
        self.num_swapped = 0  # waiting with their KV in host blocks
        self.num_preemptions = 0  # since the start
        self.num_blocked = 0  # of the last step that admitted: see :attr:`StepPlan.num_blocked`
        self.num_lacking = 0  # of the last step
        self.output_lengths = OutputLengths()
        self.observer: StateObserver | None = None
        self._swapping: list[Sequence] = []  # out or in, by the step that was planned last

    def queue(self, sequence: Sequence) -> None:
        """Add a waiting sequence; its state says what it waits for."""
        self._add(sequence)
        self._wait(sequence)

    def reorder(self, tickets: Iterable[Ticket]) -> None:
        """Put requests that have not run yet in order again: their starts have changed."""
        for ticket in tickets:
            for number in ticket.numbers:
                sequence = self.sequences.get((ticket.request_id, number))
                if sequence is not None:
                    sequence.order = order_of(ticket, number)
        self.waiting.sort(key=_order)

    def start(self, position: int, slots: int) -> Sequence:
        """Let the waiting sequence at ``position`` run; it has no blocks yet.

        It counts for as many sequences as will be forked from it, but for at most ``slots``, and at least one.
        """
        sequence = self.waiting.pop(position)
        self._count_waiting(sequence, -1)
        sequence.num_seqs = min(sequence.num_seqs, max(slots, 1))
        swapped = sequence.state is SequenceState.SWAPPED
        sequence.state = SequenceState.SWAPPING_IN if swapped else SequenceState.RUNNING
        sequence.overtakes = 0
        if swapped:
            self._swapping.append(sequence)
        self._run(sequence)
        if self.observer is not None:
            self.observer.moved(sequence)
        return sequence

    def preempt_to_recompute(self, position: int) -> None:
        """Preempt the running sequence at ``position``: it loses its blocks and waits to recompute their KV."""
        sequence = self._preempt(position)
        sequence.computed = 0
        sequence.state = SequenceState.PREEMPTED
        self._wait(sequence)

    def preempt_to_swap(self, position: int, host_table: list[int]) -> None:
        """Preempt the running sequence at ``position``: this step copies its blocks to ``host_table``."""
        sequence = self._preempt(position)
        sequence.host_table = host_table
        sequence.state = SequenceState.SWAPPING_OUT
        self._swapping.append(sequence)
        self._wait(sequence)

    def _preempt(self, position: int) -> Sequence:
        """Stop a running sequence, which keeps its place in the order; the caller sets what it waits for."""
        sequence = self.running.pop(position)
        self._stop(sequence)
        sequence.num_seqs = self.slots_wanted(sequence)
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        return sequence

    def settle_swaps(self) -> None:
        """Update states now that the last plan's transfers have been carried out."""
        if not self._swapping:
            return
        for sequence in self._swapping:
            if sequence.state is SequenceState.SWAPPING_OUT:
                sequence.state = SequenceState.SWAPPED
            elif sequence.state is SequenceState.SWAPPING_IN:
                sequence.state = SequenceState.RUNNING
                self._release_host_blocks(sequence)
        self._swapping.clear()

    def fork(self, parent: Sequence, number: int, seed: int) -> Sequence:
        """Add a copy of ``parent`` that shares all its blocks, on the device or on the host.

        If ``max_num_seqs`` sequences are running, or if the parent waits to recompute its KV, the child waits,
        too, and shares nothing yet.
        """
        child = Sequence(
            parent.request_id,
            list(parent.token_ids),
            parent.params,
            parent.priority,
            parent.ticket,
            root=parent.root,
            order=(*parent.order[:4], number),
            end_token_ids=parent.end_token_ids,
            output_start=parent.output_start,
            num_prompt_tokens=parent.num_prompt_tokens,
            max_total_tokens=parent.max_total_tokens,
            number=number,
            group=parent.group,
            seed=seed,
            node=parent.node,
            cached_tokens=parent.cached_tokens,
            edits=None if parent.edits is None else parent.edits.fork(),
            logprobs=list(parent.logprobs),
            logprob=parent.logprob,
            charged_from=len(parent.token_ids),
            grammar=parent.grammar,
        )
        if parent.state is SequenceState.RUNNING and self.num_seqs < self.max_num_seqs:
            self.block_tables.fork(parent, child)
            child.state = SequenceState.RUNNING
            self._add(child)
            self._run(child)
            return child
        # Forks come when a step is committed: the sequences that it swapped out have settled.
        if parent.state is SequenceState.SWAPPED:
            child.computed = parent.computed
            child.host_table = list(parent.host_table)
            self.host.share(_present(child.host_table))
            child.state = SequenceState.SWAPPED
        else:
            child.state = SequenceState.PREEMPTED
        self.queue(child)
        return child

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state and release all its blocks, on the device and on the host."""
        self.recoveries.abandon(sequence)
        if sequence.state in RUNS:
            del self.running[bisect_left(self.running, sequence.order, key=_order)]
            self._stop(sequence)
        else:
            del self.waiting[bisect_left(self.waiting, sequence.order, key=_order)]
            self._count_waiting(sequence, -1)
        if sequence.host_table:
            self._release_host_blocks(sequence)
        del self.sequences[sequence.key]
        ticket = sequence.ticket
        ticket.done += OUTPUT_WEIGHT * (len(sequence.token_ids) - sequence.charged_from)
        ticket.sequences -= 1
        if not ticket.sequences:
            self.fair.leave(ticket)
        sequence.candidates = sequence.decode_chunk = None
        sequence.state = SequenceState.FINISHED
        sequence.finish_reason = reason
        if self.observer is not None:
            self.observer.ended(sequence)

    def holders(self) -> list[tuple[tuple[str, str], tuple[int, ...], tuple[int, ...]]]:
        """Request id and tenant, device table and host table of each sequence that has blocks.

        Any thread may call it; the result may or may not include concurrent changes.
        """
        found = []
        for sequence in (*self.running, *self.waiting):
            *_, tenant, _ = sequence.root
            tables = tuple(sequence.block_table), tuple(sequence.host_table)
            if any(tables):
                found.append(((sequence.request_id, str(tenant)), *tables))
        return found

    def first_starts(self, priority: float) -> tuple[float, float]:
        """The first start of running and of waiting sequences of one priority; infinity if there are none."""
        starts = []
        for sequences in (self.running, self.waiting):
            place = bisect_left(sequences, (priority, -math.inf, 0.0, "", 0), key=_order)
            found = place < len(sequences) and sequences[place].order[0] == priority
            starts.append(sequences[place].order[1] if found else math.inf)
        return starts[0], starts[1]

    def slots_wanted(self, sequence: Sequence) -> int:
        """What a waiting sequence counts for: itself, and its forks to come if its group has none yet."""
        group = sequence.group
        return 1 if group is None or group.forked else min(sequence.params.width, self.max_num_seqs)

    def count_alone(self, sequence: Sequence) -> None:
        """Count a running sequence as a single one from now on, because its group is about to be forked."""
        self.num_seqs -= sequence.num_seqs - 1
        sequence.num_seqs = 1

    def _wait(self, sequence: Sequence) -> None:
        self._count_waiting(sequence, 1)
        insort(self.waiting, sequence, key=_order)
        if self.observer is not None:
            self.observer.moved(sequence)

    def _add(self, sequence: Sequence) -> None:
        self.sequences[sequence.key] = sequence
        sequence.ticket.sequences += 1

    def _run(self, sequence: Sequence) -> None:
        self.num_seqs += sequence.num_seqs
        self.running_limit += sequence.max_total_tokens
        self._serve(sequence, sequence.work)
        insort(self.running, sequence, key=_order)

    def _stop(self, sequence: Sequence) -> None:
        """A sequence that has left the running list gives up its slots and its blocks."""
        self.num_seqs -= sequence.num_seqs
        self.running_limit -= sequence.max_total_tokens
        self._serve(sequence, -sequence.work)
        self.block_tables.release(sequence)

    def _serve(self, sequence: Sequence, work: float) -> None:
        account = sequence.ticket.account
        account.in_service += work
        account.level.in_service += work

    def _count_waiting(self, sequence: Sequence, change: int) -> None:
        self.num_waiting += change * sequence.num_seqs
        if sequence.state is SequenceState.PREEMPTED:
            self.num_preempted += change
        elif sequence.state is not SequenceState.WAITING:
            self.num_swapped += change

    def _release_host_blocks(self, sequence: Sequence) -> None:
        self.host.release(_present(sequence.host_table))
        sequence.host_table = []

    def check(self) -> None:
        """Verify lists, states and tables; O(blocks), for tests and debugging.

        Raises:
            InvariantError: says what is wrong.
        """
        listed = [*self.running, *self.waiting]
        if sorted(map(_order, listed)) != sorted(map(_order, self.sequences.values())):
            raise InvariantError("a live sequence is in no list or in two")
        for sequences in (self.running, self.waiting):
            if sequences != sorted(sequences, key=_order):
                raise InvariantError("a list of sequences is out of order")
        states = [sequence.state for sequence in self.waiting]
        if self.num_preempted != states.count(SequenceState.PREEMPTED):
            raise InvariantError(f"{self.num_preempted} preempted sequences are counted, wrongly")
        swapped = states.count(SequenceState.SWAPPED) + states.count(SequenceState.SWAPPING_OUT)
        if self.num_swapped != swapped:
            raise InvariantError(f"{self.num_swapped} swapped sequences are counted, but {swapped} wait")
        if self.num_seqs != sum(sequence.num_seqs for sequence in self.running):
            raise InvariantError(f"{self.num_seqs} running sequences are counted, wrongly")
        if self.num_waiting != sum(sequence.num_seqs for sequence in self.waiting):
            raise InvariantError(f"{self.num_waiting} waiting sequences are counted, wrongly")
        if self.running_limit != sum(sequence.max_total_tokens for sequence in self.running):
            raise InvariantError(f"running sequences are taken to reach {self.running_limit} tokens, wrongly")
        for key, sequence in self.sequences.items():
            if key != sequence.key:
                raise InvariantError(f"the sequence {sequence.key} is known as {key}")
            if bool(sequence.host_table) and sequence.state not in _HAS_HOST_BLOCKS:
                raise InvariantError(f"{_name(sequence)} is {sequence.state.value} but holds host blocks")
        for sequence in self.running:
            self._check_running(sequence)
        for sequence in self.waiting:
            if sequence.state in RUNS or sequence.state is SequenceState.FINISHED:
                raise InvariantError(f"{_name(sequence)} waits in state {sequence.state.value}")
            if sequence.block_table:
                raise InvariantError(f"{_name(sequence)} does not run but holds blocks")
            if sequence.num_seqs != self.slots_wanted(sequence):
                raise InvariantError(f"{_name(sequence)} waits for {sequence.num_seqs} slots, wrongly")
            covered = len(sequence.host_table) * self.pool.block_size
            if sequence.computed > covered:
                raise InvariantError(
                    f"{_name(sequence)} waits with more computed tokens than it has host blocks"
                )
        self.host.check(_host_tables(self.sequences.values()))

    def _check_running(self, sequence: Sequence) -> None:
        if sequence.state not in RUNS:
            raise InvariantError(f"{_name(sequence)} runs in state {sequence.state.value}")
        size, table = self.pool.block_size, sequence.block_table
        if sequence.computed > len(table) * size:
            raise InvariantError(f"{_name(sequence)} has computed more tokens than it has blocks")
        if (sequence.remaining == 0) != (sequence.candidates is not None):
            raise InvariantError(
                f"{_name(sequence)} has computed all its tokens, or has candidates before it has"
            )
        if sequence.writable > len(table) * size:
            raise InvariantError(f"{_name(sequence)} may write further than its blocks reach")
        first = sequence.computed // size
        for place, block in enumerate(table[first:], first):
            shared = self.pool.references(block) != 1
            if self.pool.is_keyed(block) or (
                shared and (place > first or sequence.writable > sequence.computed)
            ):
                raise InvariantError(f"{_name(sequence)} is about to write block {block}, which others can see")


def _name(sequence: Sequence) -> str:
    number = f" (sequence {sequence.number})" if sequence.group is not None else ""
    return f"request {sequence.request_id!r}{number}"


def _present(table: list[int]) -> list[int]:
    return [block for block in table if block != NO_BLOCK]


def _host_tables(sequences: Iterable[Sequence]) -> list[list[int]]:
    return [_present(sequence.host_table) for sequence in sequences if sequence.host_table]
