"""A replica in simulated time: the engine's pool and prefix index, its rules of admission, a modelled step."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.prefix_index import PrefixIndex
from engine.scheduling.pending_prefill import MAX_REMATCHED
from loadtests.experiments.routing.constants import BLOCK_SIZE, MAX_NUM_SEQS, SERVICE, TOKEN_BUDGET, Service
from loadtests.experiments.routing.event_pool import EventPool
from loadtests.experiments.routing.row import Row

_ROOT = "root"
_BULK = BLOCK_SIZE  # most decode steps that are taken at once
_LOOK_AHEAD, _MAX_OVERTAKES, _MAX_SHARERS, _MAX_GROWTH = 8, 32, 32, 8.0  # as the engine's scheduler has them


@dataclass(slots=True)
class Plan:
    """The step or steps that run now: prompt chunks in one step, or only decodes in up to ``_BULK`` steps."""

    start: float
    chunks: list[tuple[Row, int]]
    decoding: list[Row]
    steps: int
    rows: int
    kv_tokens: int
    end: float


class Replica:
    """Runs rows in steps, as the engine does, oldest first under a token budget.

    The caller delivers rows and calls :meth:`settle` at each plan's end, then :meth:`plan`. Steps that only
    decode are planned several at once, until a delivery."""

    def __init__(
        self,
        name: str,
        num_blocks: int,
        service: Service = SERVICE,
        *,
        token_budget: int = TOKEN_BUDGET,
        max_num_seqs: int = MAX_NUM_SEQS,
    ) -> None:
        self.name = name
        self.pool = EventPool(num_blocks, BLOCK_SIZE)
        self.index = PrefixIndex(self.pool)
        self.service = service
        self.running: list[Row] = []  # in the order of their arrival
        self.waiting: list[Row] = []
        self.current: Plan | None = None
        self.acknowledged: dict[int, int] = {}
        """The highest attempt delivered on each channel."""
        self.preemptions = 0
        self.finished: list[Row] = []
        """Rows that ended in the last :meth:`settle`; ``started`` got their first token in it."""
        self.started: list[Row] = []
        self.generated = 0
        self.prefilled = 0
        self.query_tokens = self.hit_tokens = 0
        """Prompt tokens of all that were started, and how many of them were found."""
        self._budget = token_budget
        self.max_running = max_num_seqs
        self._growth = 1.0
        self._retry = False  # something changed since admission last found no place
        self.held_up = 0
        """Waiting rows that a new one could not pass at the last admission, for want of seats or blocks."""
        self._promises: set[int] = set()  # keys that rows here are going to compute
        self.waiting_tokens = 0
        """Tokens to be computed for those here: not cached, each block of a prompt counted once."""

    def deliver(self, row: Row, now: float) -> float | None:
        """Queue a row; a run of decodes in progress ends with the step it is in: returns when, if sooner."""
        self.waiting.append(row)
        self.acknowledged[row.channel] = max(row.attempt, self.acknowledged.get(row.channel, 0))
        self._promise(row)
        self._retry = True
        plan = self.current
        return self._cut(plan, now) if plan is not None and plan.steps > 1 else None

    def plan(self, now: float) -> Plan | None:
        """What runs from ``now`` on; ``None`` when there is nothing to do."""
        prefills = [row for row in self.running if row.missing > 1 or not row.generated]
        short = self._cover_decodes()
        budget = self._budget - len(self.running) + len(prefills)
        chunks: list[tuple[Row, int]] = []
        for row in prefills:
            if budget <= 0 or row not in self.running:
                continue
            length = self._grow(row, min(row.missing, budget))
            while not length:
                short = True
                victim = self.running[-1]
                self._preempt(victim)
                if victim is row:
                    break
                length = self._grow(row, min(row.missing, budget))
            if length:
                chunks.append((row, length))
                budget -= length
        decoding = [row for row in self.running if row.missing == 1 and row.generated]
        if short:
            self._growth = min(_MAX_GROWTH, 2 * self._growth)
        else:
            self._growth = max(1.0, 0.99 * self._growth)
            if self.waiting and self._retry:
                self._admit(chunks, budget, bool(decoding))
        rows = len(decoding)
        if not rows and not chunks:
            self.current = None
            return None
        kv_tokens = sum(map(_length, decoding))
        if chunks:
            steps = 1
            seconds = self.service.step(sum(length for _, length in chunks), rows, kv_tokens)
        else:
            steps = self._bulk(decoding)
            seconds = self.service.steps(steps, rows, kv_tokens)
        self.current = Plan(now, chunks, decoding, steps, rows, kv_tokens, now + seconds)
        return self.current

    def settle(self, now: float) -> None:
        """Account for the current plan, which has ended."""
        plan = self.current
        assert plan is not None
        self.current = None
        self.started, self.finished = [], []
        for row in plan.decoding:
            row.computed += plan.steps
            row.generate(plan.steps)
            if row.computed // BLOCK_SIZE > row.findable:
                self._make_findable(row)
            if not row.left:
                self.finished.append(row)
        self.generated += plan.rows * plan.steps
        for row, length in plan.chunks:
            row.computed += length
            self.prefilled += length
            self._make_findable(row)
            self._owe(row, row.missing)
            if not row.missing:
                self._forget_promise(row)
                if not row.generated:
                    row.first = now
                    self.started.append(row)
                row.generate(1)
                self.generated += 1
                if not row.left:
                    self.finished.append(row)
            self._retry = True  # what somebody waits for may be there now
        for row in self.finished:
            row.last = now
            self.running.remove(row)
            self.pool.release(row.table)
            row.table = []
            self._retry = True
        for row in [one for one in self.waiting[:MAX_REMATCHED] if one.cached is not None]:
            self._match(row)  # others take its blocks

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K and V the running rows read in a step."""
        return sum(map(_length, self.running))

    def _cut(self, plan: Plan, now: float) -> float | None:
        for count in range(1, plan.steps):
            end = plan.start + self.service.steps(count, plan.rows, plan.kv_tokens)
            if end >= now:
                plan.steps, plan.end = count, end
                return end
        return None

    def _bulk(self, decoding: list[Row]) -> int:
        steps = min(_BULK, min(row.left for row in decoding))
        needed = 0
        for row in decoding:
            needed += max(0, -(-(row.computed + steps) // BLOCK_SIZE) - len(row.table))
        if needed > self.pool.num_available:
            return 1
        for row in decoding:
            self._grow(row, steps)
        return steps

    def _cover_decodes(self) -> bool:
        """Give each decoding row a block for its next token, the oldest first; whether they ran short."""
        short = False
        position = 0
        while position < len(self.running):
            row = self.running[position]
            if row.missing == 1 and row.generated and not self._grow(row, 1):
                short = True
                self._preempt(self.running[-1])
            else:
                position += 1
        return short

    def _grow(self, row: Row, length: int) -> int:
        """Let a row write up to ``length`` more tokens; return how many its blocks then take."""
        table = row.table
        missing = -(-(row.computed + length) // BLOCK_SIZE) - len(table)
        if missing > 0:
            count = min(missing, self.pool.num_available)
            if count:
                table.extend(self.pool.allocate(count, table[-1] if table else None) or ())
        return min(length, len(table) * BLOCK_SIZE - row.computed)

    def _preempt(self, row: Row) -> None:
        """Take the blocks of a row, which waits again and will compute what is gone by then."""
        self.running.remove(row)
        self.pool.release(row.table)
        row.table = []
        row.computed = row.findable = 0
        self._match(row)
        self.preemptions += 1
        arrival = row.job.arrival
        place = next((i for i, other in enumerate(self.waiting) if other.job.arrival > arrival), None)
        self.waiting.insert(len(self.waiting) if place is None else place, row)
        self._retry = True

    def _admit(self, chunks: list[tuple[Row, int]], budget: int, decoding: bool) -> None:
        """Start waiting rows while tokens, seats and blocks last, passing over a few that do not fit."""
        self._retry = False
        self.held_up = 0
        position = misses = sharers = kept = 0
        reserved: int | None = None
        passed: list[Row] = []
        while position < len(self.waiting) and budget > 0 and len(self.running) < self.max_running:
            row = self.waiting[position]
            needed = self._needed(row)
            if self._in_the_making(row, chunks):
                sharers += 1
                if sharers > _MAX_SHARERS:
                    return
            else:
                available = self.pool.num_available
                fits = needed + kept <= available
                if fits and (chunks or decoding):
                    if reserved is None:
                        reserved = sum(map(self._reserve, self.running))
                    fits = needed + reserved + kept <= available
                if fits or not self.running:
                    del self.waiting[position]
                    budget -= self._start(row, chunks, budget)
                    if reserved is not None:
                        reserved += self._reserve(row)
                    for other in passed:
                        other.overtakes += 1
                    continue
                misses += 1
                if misses > _LOOK_AHEAD or row.overtakes >= _MAX_OVERTAKES:
                    self.held_up = len(self.waiting) - position
                    return
                passed.append(row)
            if row.generated:
                kept += self._most(row)
            position += 1
        if position < len(self.waiting):
            self._retry = True  # only tokens or seats were missing
            if len(self.running) >= self.max_running:
                self.held_up = len(self.waiting) - position

    def _needed(self, row: Row) -> int:
        """Blocks that a start takes out of the available ones."""
        self._match(row)
        # A block that a row holds has all those before it held, too.
        held = row.node
        while held is not None and held.parent is not None and not self.pool.references(held.block):
            held = held.parent
        return max(1, self._most(row) - (held.depth if held is not None else 0))

    def _match(self, row: Row) -> None:
        """Look up what a waiting row would find; one that was preempted will compute all the rest again."""
        row.node = self.index.match(_ROOT, row.tokens, len(row.tokens) - 1, row.node)
        if row.cached is not None:
            depth = row.node.depth if row.node is not None else 0
            self._owe(row, len(row.tokens) - depth * BLOCK_SIZE)

    def _most(self, row: Row) -> int:
        return -(-(len(row.tokens) + 1) // BLOCK_SIZE)

    def _reserve(self, row: Row) -> int:
        tokens = min(len(row.tokens) + int(self._growth * BLOCK_SIZE), row.most)
        return max(0, -(-tokens // BLOCK_SIZE) - len(row.table))

    def _in_the_making(self, row: Row, chunks: list[tuple[Row, int]]) -> bool:
        """Whether a row of this very step computes the next block that ``row`` misses: it then waits for it."""
        depth = row.node.depth if row.node is not None else 0
        end = (depth + 1) * BLOCK_SIZE
        if end > len(row.tokens) - 1:
            return False
        # Keys stand for all tokens up to the block's end.
        key = row.keys_up_to(depth + 1)[depth]
        for owner, _ in chunks:
            if owner.findable == depth and len(owner.keys) > depth and owner.keys[depth] == key:
                return True
        return False

    def _start(self, row: Row, chunks: list[tuple[Row, int]], budget: int) -> int:
        row.table = self.index.blocks(row.node)
        self.pool.share(row.table)
        row.findable = len(row.table)
        row.computed = row.findable * BLOCK_SIZE
        if row.cached is None:
            row.cached = row.computed
            self.query_tokens += row.prompt_length
            self.hit_tokens += row.cached
        self._owe(row, row.missing)
        arrival = row.job.arrival
        place = len(self.running)
        while place and self.running[place - 1].job.arrival > arrival:
            place -= 1
        self.running.insert(place, row)
        length = self._grow(row, min(row.missing, budget))
        chunks.append((row, length))
        return length

    def _make_findable(self, row: Row) -> None:
        full = row.computed // BLOCK_SIZE
        if full <= row.findable:
            return
        alive = row.node is not None and row.node.alive
        start = row.node.depth if alive and row.node is not None else 0
        keys = row.keys_up_to(full)
        self.pool.name(row.table[start:full], keys[start:full])
        row.node = self.index.extend(_ROOT, row.node, row.tokens, row.table, full)
        row.findable = full

    def _promise(self, row: Row) -> None:
        """Count the prompt tokens that the row will compute: neither cached nor promised by an earlier row."""
        row.node = self.index.match(_ROOT, row.tokens, len(row.tokens) - 1)
        keys, promises = row.keys, self._promises
        depth = row.node.depth if row.node is not None else 0
        while depth < len(keys) and keys[depth] in promises:
            depth += 1
        row.promises = keys[depth:]
        promises.update(row.promises)
        self._owe(row, max(row.prompt_length - depth * BLOCK_SIZE, 1))

    def _owe(self, row: Row, tokens: int) -> None:
        self.waiting_tokens += tokens - row.owed
        row.owed = tokens

    def _forget_promise(self, row: Row) -> None:
        self._promises.difference_update(row.promises)
        row.promises = []


def _length(row: Row) -> int:
    return len(row.tokens)
