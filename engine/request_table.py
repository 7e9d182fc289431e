"""The requests that have not ended, in two ordered lists: running and waiting."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from engine.block_pool import BlockPool, InvariantError
from engine.prefix_index import PrefixNode
from engine.request import FinishReason, Request, RequestState


@dataclass(slots=True, eq=False)
class Entry:
    """A live request with what only the scheduler knows about it."""

    request: Request
    root: tuple[object, ...]  # of its prefix tree
    order: tuple[int, float, str]
    node: PrefixNode | None = None  # running: of its last findable block; waiting: where the next match starts
    findable: int = 0  # blocks handed to the index
    overtakes: int = 0  # admissions past it while it did not fit

    @property
    def remaining(self) -> int:
        """Tokens still to be computed."""
        return len(self.request.token_ids) - self.request.computed


class RequestTable:
    """Live requests by id and by order; the only place where a request changes its state and loses blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.entries: dict[str, Entry] = {}
        self.running: list[Entry] = []
        self.waiting: list[Entry] = []  # never admitted, or preempted
        self.num_preempted = 0

    def queue(self, entry: Entry) -> None:
        """Take in a new request."""
        self.entries[entry.request.request_id] = entry
        insort(self.waiting, entry, key=_order)

    def start(self, position: int) -> Entry:
        """Let the waiting request at ``position`` run."""
        entry = self.waiting.pop(position)
        self.num_preempted -= entry.request.state is RequestState.PREEMPTED
        entry.request.state = RequestState.RUNNING
        entry.overtakes = 0
        insort(self.running, entry, key=_order)
        return entry

    def preempt_last(self) -> Entry:
        """Take the blocks of the last running request, which keeps its place in the order."""
        entry = self.running.pop()
        self._drop_blocks(entry)
        request = entry.request
        request.computed = 0
        request.state = RequestState.PREEMPTED
        request.num_preemptions += 1
        self.num_preempted += 1
        insort(self.waiting, entry, key=_order)
        return entry

    def finish(self, entry: Entry, reason: FinishReason) -> None:
        """Let a request in any state go, with all its blocks."""
        request = entry.request
        if request.state is RequestState.RUNNING:
            del self.running[bisect_left(self.running, entry.order, key=_order)]
            self._drop_blocks(entry)
        else:
            del self.waiting[bisect_left(self.waiting, entry.order, key=_order)]
            self.num_preempted -= request.state is RequestState.PREEMPTED
        del self.entries[request.request_id]
        request.state = RequestState.FINISHED
        request.finish_reason = reason

    def _drop_blocks(self, entry: Entry) -> None:
        self._pool.release(entry.request.block_table)
        entry.request.block_table = []

    def check(self) -> None:
        """Verify lists, states and tables; O(blocks), for tests and debugging.

        Raises:
            InvariantError: says what is wrong.
        """
        if sorted(map(_order, [*self.running, *self.waiting])) != sorted(map(_order, self.entries.values())):
            raise InvariantError("a live request is in no list or in two")
        for entries in (self.running, self.waiting):
            if entries != sorted(entries, key=_order):
                raise InvariantError("a list of requests is out of order")
        states = [entry.request.state for entry in self.waiting]
        if self.num_preempted != states.count(RequestState.PREEMPTED):
            raise InvariantError(f"{self.num_preempted} preempted requests are counted, wrongly")
        for entry in self.running:
            self._check_running(entry.request)
        for entry in self.waiting:
            request = entry.request
            if request.state not in (RequestState.WAITING, RequestState.PREEMPTED):
                raise InvariantError(f"request {request.request_id!r} waits in state {request.state.value}")
            if request.block_table or request.computed:
                raise InvariantError(f"request {request.request_id!r} does not run but holds blocks")

    def _check_running(self, request: Request) -> None:
        name = request.request_id
        if request.state is not RequestState.RUNNING:
            raise InvariantError(f"request {name!r} runs in state {request.state.value}")
        size = self._pool.block_size
        if request.computed >= len(request.token_ids) or request.computed > len(request.block_table) * size:
            raise InvariantError(f"request {name!r} has computed more than it has tokens or blocks")
        for block in request.block_table[request.computed // size :]:
            if self._pool.references(block) != 1 or self._pool.is_keyed(block):
                raise InvariantError(f"request {name!r} is about to write block {block}, which others can see")


def _order(entry: Entry) -> tuple[int, float, str]:
    return entry.order
