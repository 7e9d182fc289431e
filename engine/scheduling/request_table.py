"""The sequences that have not ended, in two ordered lists: running and waiting."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from engine.kv.block_pool import NO_BLOCK, BlockPool, InvariantError
from engine.kv.host_pool import HostPool
from engine.kv.prefix_index import PrefixNode
from engine.request import FinishReason, Request, RequestState
from engine.scheduling.recovery import Decision
from engine.scheduling.step_plan import Candidates, ScheduledChunk

_RUNS = (RequestState.RUNNING, RequestState.SWAPPING_IN)
_HAS_HOST_BLOCKS = (RequestState.SWAPPING_OUT, RequestState.SWAPPED, RequestState.SWAPPING_IN)

Order = tuple[float, float, str, int]


@dataclass(slots=True, eq=False)
class Entry:
    """A live sequence with what only the scheduler knows about it."""

    request: Request
    root: tuple[object, ...]  # of its prefix tree
    order: Order  # smaller is older and is served first; kept for life
    ending: frozenset[int]  # tokens that end it, once there are min_tokens
    base: int  # tokens before its output's first one
    seats: int = 1  # running sequences that it stands for: more before its family is spread
    node: PrefixNode | None = None  # running: of its last findable block; waiting: where the next match starts
    findable: int = 0  # blocks handed to the index
    writable: int = 0  # tokens up to which its table can be written without asking the pool
    overtakes: int = 0  # admissions past it while it did not fit
    host_table: list[int] = field(default_factory=list)
    candidates: Candidates | None = None  # a beam's offers; it is held until its whole family has some
    decision: Decision | None = None  # of a recovery that is not complete
    decode: ScheduledChunk | None = None  # its chunk of one token, made once for all steps in which it decodes

    @property
    def remaining(self) -> int:
        """Tokens still to be computed."""
        return len(self.request.token_ids) - self.request.computed


class TableObserver(Protocol):
    """Hears of each sequence that comes, goes from one list to the other, or ends; not of running forks."""

    def moved(self, entry: Entry) -> None:
        """A sequence has begun to wait or to run."""

    def ended(self, entry: Entry) -> None:
        """A sequence is gone."""


class RequestTable:
    """Live sequences by key and by order; the only place where one changes its state and loses blocks."""

    def __init__(self, pool: BlockPool, host: HostPool) -> None:
        self._pool = pool
        self._host = host
        self.entries: dict[tuple[str, int], Entry] = {}
        self.running: list[Entry] = []
        self.waiting: list[Entry] = []  # never admitted, or preempted
        self.seats = 0  # of the running ones
        self.running_limit = 0  # tokens that these may come to together
        self.num_preempted = 0  # waiting to compute their KV again
        self.num_swapped = 0  # waiting with their KV in host blocks
        self.observer: TableObserver | None = None
        self._moving: list[Entry] = []  # swapped out or in by the step that was planned last

    def queue(self, entry: Entry) -> None:
        """Take in a sequence that waits; its state says for what."""
        self.entries[entry.request.key] = entry
        self._wait(entry)

    def start(self, position: int) -> Entry:
        """Let the waiting sequence at ``position`` run."""
        entry = self.waiting.pop(position)
        self._count_waiting(entry, -1)
        swapped = entry.request.state is RequestState.SWAPPED
        entry.request.state = RequestState.SWAPPING_IN if swapped else RequestState.RUNNING
        entry.overtakes = 0
        if swapped:
            self._moving.append(entry)
        self._run(entry)
        if self.observer is not None:
            self.observer.moved(entry)
        return entry

    def preempt(self, position: int, host_table: list[int] | None) -> Entry:
        """Take the blocks of the running sequence at ``position``, which keeps its place in the order.

        ``host_table`` names the host blocks that this step copies its KV to; without, it is lost.
        """
        entry = self.running.pop(position)
        request = entry.request
        self.seats -= entry.seats
        self.running_limit -= request.max_total_tokens
        self._drop_blocks(entry)
        request.num_preemptions += 1
        if host_table is None:
            request.computed = 0
            request.state = RequestState.PREEMPTED
        else:
            entry.host_table = host_table
            request.state = RequestState.SWAPPING_OUT
            self._moving.append(entry)
        self._wait(entry)
        return entry

    def settle(self) -> None:
        """The transfers of the last plan have been carried out."""
        if not self._moving:
            return
        for entry in self._moving:
            request = entry.request
            if request.state is RequestState.SWAPPING_OUT:
                request.state = RequestState.SWAPPED
            elif request.state is RequestState.SWAPPING_IN:
                request.state = RequestState.RUNNING
                self._drop_host_blocks(entry)
        self._moving.clear()

    def drop_before(self, request: Request, place: int) -> None:
        """Release the blocks before ``place`` in a running sequence's table; nobody looks at them again."""
        table = request.block_table
        while place > 0 and table[place - 1] != NO_BLOCK:
            place -= 1
            self._pool.release(table[place : place + 1])
            table[place] = NO_BLOCK

    def fork(self, parent: Entry, child: Request, run: bool) -> Entry:
        """Add a copy of ``parent`` that shares all its blocks, on the device or on the host.

        The partial last block is shared, too: whoever writes to it first copies it. With ``run`` false, or if
        the parent waits to compute its KV again, so does the child, and it shares nothing yet.
        """
        request = parent.request
        child.max_total_tokens = request.max_total_tokens
        child.num_prompt_tokens = request.num_prompt_tokens
        child.cached_tokens = request.cached_tokens
        child.arrival = request.arrival
        order = (*parent.order[:3], child.sequence)
        entry = Entry(child, parent.root, order, parent.ending, parent.base, node=parent.node)
        if request.state is RequestState.RUNNING and run:
            size = self._pool.block_size
            child.computed = request.computed
            child.block_table = request.block_table[: self._pool.blocks_for(request.computed)]
            self._pool.share(child.block_table)
            entry.findable = parent.findable
            child.state = RequestState.RUNNING
            # From here on neither may write to a partial last block without a look at its references.
            entry.writable = 0 if child.computed % size else len(child.block_table) * size
            parent.writable = 0
            self.entries[child.key] = entry
            self._run(entry)
            return entry
        # Forks come when a step is committed: whoever it swapped out has settled.
        if request.state is RequestState.SWAPPED:
            child.computed = request.computed
            entry.host_table = list(parent.host_table)
            self._host.share(_present(entry.host_table))
            child.state = RequestState.SWAPPED
        else:
            child.state = RequestState.PREEMPTED
        self.queue(entry)
        return entry

    def finish(self, entry: Entry, reason: FinishReason) -> None:
        """Let a sequence in any state go, with all its blocks on the device and on the host."""
        request = entry.request
        if request.state in _RUNS:
            del self.running[bisect_left(self.running, entry.order, key=_order)]
            self.seats -= entry.seats
            self.running_limit -= request.max_total_tokens
            self._drop_blocks(entry)
        else:
            del self.waiting[bisect_left(self.waiting, entry.order, key=_order)]
            self._count_waiting(entry, -1)
        if entry.host_table:
            self._drop_host_blocks(entry)
        del self.entries[request.key]
        entry.candidates = entry.decode = None
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        if self.observer is not None:
            self.observer.ended(entry)

    def give_up_seats(self, entry: Entry) -> None:
        """A running sequence's family is spread: from now on it stands for itself alone."""
        self.seats -= entry.seats - 1
        entry.seats = 1

    def _wait(self, entry: Entry) -> None:
        self._count_waiting(entry, 1)
        insort(self.waiting, entry, key=_order)
        if self.observer is not None:
            self.observer.moved(entry)

    def _run(self, entry: Entry) -> None:
        self.seats += entry.seats
        self.running_limit += entry.request.max_total_tokens
        insort(self.running, entry, key=_order)

    def _count_waiting(self, entry: Entry, change: int) -> None:
        state = entry.request.state
        if state is RequestState.PREEMPTED:
            self.num_preempted += change
        elif state is not RequestState.WAITING:
            self.num_swapped += change

    def _drop_blocks(self, entry: Entry) -> None:
        self._pool.release(entry.request.block_table)
        entry.request.block_table = []
        entry.writable = 0

    def _drop_host_blocks(self, entry: Entry) -> None:
        self._host.release(_present(entry.host_table))
        entry.host_table = []

    def check(self) -> None:
        """Verify lists, states and tables; O(blocks), for tests and debugging.

        Raises:
            InvariantError: says what is wrong.
        """
        if sorted(map(_order, [*self.running, *self.waiting])) != sorted(map(_order, self.entries.values())):
            raise InvariantError("a live sequence is in no list or in two")
        for entries in (self.running, self.waiting):
            if entries != sorted(entries, key=_order):
                raise InvariantError("a list of sequences is out of order")
        states = [entry.request.state for entry in self.waiting]
        if self.num_preempted != states.count(RequestState.PREEMPTED):
            raise InvariantError(f"{self.num_preempted} preempted sequences are counted, wrongly")
        swapped = states.count(RequestState.SWAPPED) + states.count(RequestState.SWAPPING_OUT)
        if self.num_swapped != swapped:
            raise InvariantError(f"{self.num_swapped} swapped sequences are counted, but {swapped} wait")
        if self.seats != sum(entry.seats for entry in self.running):
            raise InvariantError(f"{self.seats} seats are counted, wrongly")
        if self.running_limit != sum(entry.request.max_total_tokens for entry in self.running):
            raise InvariantError(f"running sequences are taken to come to {self.running_limit} tokens, wrongly")
        for key, entry in self.entries.items():
            if key != entry.request.key:
                raise InvariantError(f"the sequence {entry.request.key} is known as {key}")
            if bool(entry.host_table) and entry.request.state not in _HAS_HOST_BLOCKS:
                raise InvariantError(f"{_name(entry)} is {entry.request.state.value} but holds host blocks")
        for entry in self.running:
            self._check_running(entry)
        for entry in self.waiting:
            request = entry.request
            if request.state in _RUNS or request.state is RequestState.FINISHED:
                raise InvariantError(f"{_name(entry)} waits in state {request.state.value}")
            if request.block_table:
                raise InvariantError(f"{_name(entry)} does not run but holds blocks")
            covered = len(entry.host_table) * self._pool.block_size
            if request.computed > covered:
                raise InvariantError(f"{_name(entry)} waits with more computed tokens than it has host blocks")
        self._host.check(_host_tables(self.entries.values()))

    def _check_running(self, entry: Entry) -> None:
        request = entry.request
        if request.state not in _RUNS:
            raise InvariantError(f"{_name(entry)} runs in state {request.state.value}")
        size = self._pool.block_size
        if request.computed > len(request.block_table) * size:
            raise InvariantError(f"{_name(entry)} has computed more tokens than it has blocks")
        if (entry.remaining == 0) != (entry.candidates is not None):
            raise InvariantError(
                f"{_name(entry)} has computed all its tokens, or offers candidates before it has"
            )
        if entry.writable > len(request.block_table) * size:
            raise InvariantError(f"{_name(entry)} may write further than its blocks reach")
        first = request.computed // size
        for place, block in enumerate(request.block_table[first:], first):
            shared = self._pool.references(block) != 1
            if self._pool.is_keyed(block) or (shared and (place > first or entry.writable > request.computed)):
                raise InvariantError(f"{_name(entry)} is about to write block {block}, which others can see")


def _order(entry: Entry) -> Order:
    return entry.order


def _name(entry: Entry) -> str:
    request = entry.request
    number = f" (sequence {request.sequence})" if request.family is not None else ""
    return f"request {request.request_id!r}{number}"


def _present(table: list[int]) -> list[int]:
    return [block for block in table if block != NO_BLOCK]


def _host_tables(entries: Iterable[Entry]) -> list[list[int]]:
    return [_present(entry.host_table) for entry in entries]
