"""What an engine has still to compute: a block counts once, however many sequences wait for it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.prefix_index import PrefixIndex
from engine.request import RequestState
from engine.scheduling.request_table import Entry, RequestTable

LOOKED_UP = 32
"""Waiting sequences whose prefixes are looked up again each time: others may have computed them, or evicted."""

MOST_CHANGES = 1024
"""Blocks found or lost after which the rest of these waits for the next time: about a millisecond."""

MOST_NEW = 2048
"""Blocks of newcomers after which the rest of these waits for the next time: about a millisecond or two."""

_RUNS = (RequestState.RUNNING, RequestState.SWAPPING_IN)


@dataclass(slots=True, eq=False)
class Part:
    """What one sequence is going to compute: ``own`` tokens, and the blocks ``keys[first:end]``.

    One that ``finds`` has not got its blocks yet: it computes those that nobody else does, beside ``own``. Any
    other one computes the blocks in any case, so that ``own`` includes them.
    """

    keys: list[int]
    finds: bool
    first: int
    end: int
    own: int


class Backlog:
    """Follows the sequences that wait or compute a prompt; belongs to the engine's thread.

    With order left out of account: blocks that only waiting sequences miss count once, those that running or
    swapped-out ones are computing count there. The last block of a text is each sequence's own, since its last
    token must be run to get logits. Exact while at most ``LOOKED_UP`` sequences wait and few blocks change;
    beyond it, blocks that have become findable, or ceased to be, are seen some steps later, and newcomers count
    as if they shared nothing until it is their turn.

    Changes are noted as they happen and worked in when somebody asks, so that whoever starts and ends in one
    step costs nothing. Keys are chains of hashes: equal for equal texts of one root, and a collision would only
    make a figure a block too small.
    """

    def __init__(self, table: RequestTable, index: PrefixIndex, block_size: int, prefix_caching: bool) -> None:
        self._table = table
        self._index = index
        self._size = block_size
        self._prefix_caching = prefix_caching
        self._parts: dict[Entry, Part] = {}
        self._computing: dict[Entry, Part] = {}  # of those, the ones that run
        self._held: dict[Entry, None] = {}  # wait with candidates: they get a token more before they go on
        self._changed: dict[Entry, None] = {}
        self._own = 0
        self._wanted: dict[int, int] = {}  # blocks that sequences want to find, and how many do
        self._made: dict[int, int] = {}  # blocks that sequences compute, and how many do
        self._both = 0  # blocks in either
        self._next = 0  # place in the waiting list of the next sequence to look up
        table.observer = self

    def moved(self, entry: Entry) -> None:
        """A sequence has begun to wait or to run."""
        self._changed[entry] = None

    def ended(self, entry: Entry) -> None:
        """A sequence is gone."""
        self._changed.pop(entry, None)
        self._held.pop(entry, None)
        self._drop(entry)

    def tokens(self) -> int:
        """How many are to be computed before all that is here decodes."""
        self._place_changed()
        self._advance()
        self._look_up()
        left = sum(len(entry.request.token_ids) - entry.request.computed for entry in self._changed)
        return self._own + (len(self._wanted) - self._both) * self._size + left

    def _place_changed(self) -> None:
        changed = [*self._changed, *self._held]
        self._changed.clear()
        self._held.clear()
        blocks = 0
        for entry in changed:
            if entry not in self._parts:  # its keys are to be made; those of others are there, and counted
                if blocks >= MOST_NEW:
                    self._changed[entry] = None
                    continue
                blocks += len(entry.request.token_ids) // self._size
            self._place(entry)

    def _place(self, entry: Entry) -> None:
        """Count a sequence anew, as what it is now."""
        before = self._drop(entry)
        request, size = entry.request, self._size
        length = len(request.token_ids)
        runs = request.state in _RUNS
        if not runs and entry.candidates is not None:
            self._held[entry] = None
        finds = not runs and not entry.host_table
        remaining = length - request.computed
        if runs and remaining <= 1:
            return
        end = 0
        if self._prefix_caching:
            end = (length - 1 if finds else length) // size
        keys = self._keys(entry, end, before.keys if before is not None else [])
        if finds:
            part = Part(keys, True, 0, end, length - end * size)
            part.first = self._found(entry)
            self._count(self._wanted, self._made, keys[part.first : end])
        else:
            part = Part(keys, False, min(request.computed // size, end), end, remaining)
            self._count(self._made, self._wanted, keys[part.first : end])
            if runs:
                self._computing[entry] = part
        self._own += part.own
        self._parts[entry] = part

    def _drop(self, entry: Entry) -> Part | None:
        part = self._parts.pop(entry, None)
        if part is None:
            return None
        self._own -= part.own
        blocks = part.keys[part.first : part.end]
        if part.finds:
            self._discount(self._wanted, self._made, blocks)
        else:
            self._computing.pop(entry, None)
            self._discount(self._made, self._wanted, blocks)
        return part

    def _advance(self) -> None:
        """What prompts have got in the last step is done."""
        for entry, part in list(self._computing.items()):
            request = entry.request
            remaining = len(request.token_ids) - request.computed
            if remaining <= 1:
                self._drop(entry)
                continue
            self._own += remaining - part.own
            part.own = remaining
            first = min(request.computed // self._size, part.end)
            self._discount(self._made, self._wanted, part.keys[part.first : first])
            part.first = first

    def _look_up(self) -> None:
        waiting = self._table.waiting
        changes = 0
        for _ in range(min(LOOKED_UP, len(waiting))):
            self._next = self._next + 1 if self._next + 1 < len(waiting) else 0
            entry = waiting[self._next]
            part = self._parts.get(entry)
            if part is None or not part.finds:  # none: a newcomer that is not placed yet
                continue
            first, found = part.first, self._found(entry)
            if found > first:
                self._discount(self._wanted, self._made, part.keys[first:found])
            elif found < first:
                self._count(self._wanted, self._made, part.keys[found:first])
            part.first = found
            changes += abs(found - first)
            if changes > MOST_CHANGES:
                break

    def _found(self, entry: Entry) -> int:
        """Blocks that a waiting sequence would find now."""
        if not self._prefix_caching:
            return 0
        tokens = entry.request.token_ids
        entry.node = self._index.match(entry.root, tokens, len(tokens) - 1, entry.node)
        return 0 if entry.node is None else entry.node.depth

    def _keys(self, entry: Entry, count: int, known: list[int]) -> list[int]:
        """At least the first ``count`` ones; texts only ever grow, so that ``known`` ones stay."""
        size, tokens = self._size, entry.request.token_ids
        key = known[-1] if known else hash(entry.root)
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
