"""Admits waiting sequences to the running batch, in order, as blocks, slots, and tokens allow."""

from __future__ import annotations

from bisect import bisect_left

from engine.kv.prefix_node import PrefixNode
from engine.scheduling.fair_queue import Account
from engine.scheduling.preemption import FreedBlocks, grow, preempt
from engine.scheduling.prefill import begin_prefills
from engine.scheduling.sequence import RUNS, Order, Sequence, SequenceState
from engine.scheduling.state import SchedulerState
from engine.scheduling.step import StepPlan
from engine.scheduling.swapping import swap_in

_MAX_DEFERRED = 32  # waiting sequences passed over in one step because the step computes their next block
_MAX_WITHOUT_TOKENS = 256  # waiting sequences passed over in one step in search of shorter ones
_MAX_MATCHED = 4_096  # blocks found anew in one step before it looks at no more sequences: about 1.5 ms
_MAX_COUNTED = 16_384  # blocks of hits looked up between two starts: about 1 ms; one hit may have more


def admit_waiting(state: SchedulerState, plan: StepPlan, before: Order | None = None) -> tuple[int, int]:
    """Start waiting sequences while tokens, sequence slots and blocks last.

    A bounded number of sequences that do not fit is passed over. Returns two counts of sequences that lack
    slots or blocks: those that no newcomer can overtake, and all of them, including those passed over.
    Sequences that lack only tokens do not count. With ``before``, only sequences that come before this place in
    the order start.

    A request for several sequences starts with the slots that are free, at least one. Those of its sequences
    that find none when they are forked wait for theirs: if it needed all slots at once, small requests could
    pass it by for as long as they come.
    """
    waiting, shares = state.waiting, state.shares
    position = misses = deferred = without_tokens = 0
    lacking = 0  # sequences that lack slots or blocks
    others = 0  # sequences that wait for something else
    room = _Room(state, plan)
    hits = Hits()
    passed: list[Sequence] = []
    behind: set[Account] = set()  # passed over for want of tokens: each is left a slot by other clients
    if not shares.begun:
        begin_prefills(state, plan.budget_left, 0)
    full = False  # slots or blocks have run out, so no newcomer can start
    while position < len(waiting) and state.num_seqs < state.max_num_seqs:
        if hits.matched > _MAX_MATCHED:  # the next step continues from what was found
            break
        sequence = waiting[position]
        if before is not None and sequence.order > before:
            break
        if not _may_start(sequence):
            others += sequence.num_seqs
            if sequence.candidates is None:  # swapped out in this step, so it can start in the next
                room.withheld += _blocks_in_all(state, sequence)
            position += 1
            continue
        out_of_tokens = plan.budget_left <= 0  # nothing starts, but lack of blocks is still counted
        # If tokens are scarce, many are looked at, so the last known match of their prefixes must suffice.
        tokens = (
            out_of_tokens
            or not shares.limited
            or shares.allowed(sequence, _prefill_tokens(state, sequence)) > 0
        )
        if tokens:
            needed = blocks_needed(state, sequence, hits)
            if is_next_block_scheduled(state, sequence, plan):
                deferred += 1
                if deferred > _MAX_DEFERRED:
                    break
                others += sequence.num_seqs
            elif not room.fits(sequence, needed):
                misses += 1
                if misses > state.look_ahead or sequence.overtakes >= state.max_overtakes:
                    full = True
                    break
                lacking += sequence.num_seqs
                passed.append(sequence)
            elif out_of_tokens:
                break
            else:
                allowed = shares.allowed(sequence, _prefill_tokens(state, sequence))
                account = sequence.ticket.account
                left = state.max_num_seqs - state.num_seqs - len(behind - {account})
                tokens = allowed > 0 and (left > 0 or not state.running)
                if tokens:
                    _start(state, position, plan, allowed, left)
                    room.started(sequence)
                    hits.clear()
                    for other in passed:
                        other.overtakes += 1
                    continue
        if not tokens:
            without_tokens += 1
            if without_tokens > _MAX_WITHOUT_TOKENS or sequence.overtakes >= state.max_overtakes:
                break
            behind.add(sequence.ticket.account)
            others += sequence.num_seqs
        if sequence.state is not SequenceState.WAITING:
            room.withheld += _blocks_in_all(state, sequence)
        position += 1
    else:
        full = position < len(waiting)  # of sequence slots
    if not full:
        return 0, lacking
    rest = state.num_waiting - others
    return rest - lacking, rest


class _Room:
    """The slots and blocks that are left for waiting sequences in one step."""

    def __init__(self, state: SchedulerState, plan: StepPlan) -> None:
        self._state = state
        self._plan = plan
        self.withheld = 0  # blocks for preempted sequences that were passed over: later ones must leave them
        self._reserved: int | None = None  # blocks for the growth of running sequences; a bound until exact
        self._exact = False

    def fits(self, sequence: Sequence, needed: int) -> bool:
        """Whether a sequence that needs ``needed`` blocks can start. If nothing runs, the first one can."""
        state, reserve = self._state, self._state.reserve
        if not state.running:
            return True
        left = state.pool.num_available - needed - self.withheld
        if left < 0:
            return False
        if not self._plan.chunks:  # all running sequences are held beams
            return True
        if sequence.order < state.running[-1].order:
            return reserve.blocks(running_before(state, sequence)) <= left
        if self._reserved is None:
            self._reserved = reserve_bound(state, self._plan)
        if not self._exact and self._reserved > left:
            self._reserved, self._exact = reserve.blocks(state.running), True
        return self._reserved <= left

    def started(self, sequence: Sequence) -> None:
        """A sequence has started, and will grow like the others."""
        if self._reserved is not None:
            self._reserved += self._state.reserve.blocks([sequence])


def reserve_bound(state: SchedulerState, plan: StepPlan) -> int:
    """At least the blocks that are kept for all running sequences; quick to compute."""
    prefilling = [*plan.prefilling, *state.shares.held_back]
    return state.reserve.upper_bound(prefilling, state.num_seqs)


def preempt_for_first(state: SchedulerState, plan: StepPlan) -> None:
    """Preempt running sequences that the first waiting one outranks, last ones first, if that lets it in."""
    running, pool = state.running, state.pool
    if not running or running[-1].order < state.waiting[0].order:
        return
    first = _first_startable(state)
    if first is None:
        return
    lost: dict[Account, float] = {}  # work of the victims
    behind = running[len(running_before(state, first)) :]
    if not any(_outranks(first, victim, lost, 1) for victim in behind):
        return
    # Without the forks, each of which needs a slot and a block.
    needed = blocks_needed(state, first) - _slots(state, first) + 1
    freed = FreedBlocks(pool, state.index.blocks(first.node))
    reserved = state.reserve.blocks(running_before(state, first))
    slots = state.max_num_seqs - state.num_seqs
    victims: list[int] = []  # positions, the last one first

    def fits(num_seqs: int) -> bool:
        return slots >= num_seqs and needed + num_seqs - 1 + reserved <= pool.num_available + freed.count

    for position in range(len(running) - 1, -1, -1):
        victim = running[position]
        if fits(first.num_seqs) or victim.order < first.order:
            break
        if _outranks(first, victim, lost, slots + victim.num_seqs):
            freed.add(victim.block_table)
            slots += victim.num_seqs
            account = victim.ticket.account
            lost[account] = lost.get(account, 0.0) + victim.work
            victims.append(position)
    if fits(min(max(slots, 1), first.num_seqs)) or len(victims) == len(running):  # alone it runs in any case
        for position in victims:
            preempt(state, position, plan)


def first_that_fits(state: SchedulerState) -> Sequence | None:
    """The first waiting sequence, if it comes before one that runs and there is room for it."""
    first = _first_startable(state)
    if first is None or not state.running or state.running[-1].order < first.order:
        return None
    if state.num_seqs >= state.max_num_seqs:
        return None
    needed = blocks_needed(state, first) + state.reserve.blocks(running_before(state, first))
    return first if needed <= state.pool.num_available else None


def preempt_held_beams(state: SchedulerState, plan: StepPlan) -> None:
    """Let the first waiting sequence in if held beams keep it out.

    Waiting beams take the slots of held ones of their group, which wait for them: a search may have more beams
    than there are slots. If nothing runs but held beams, those of any group give way, for want of blocks, too.
    """
    running = state.running
    first = _first_startable(state)
    if first is None:
        return
    group = first.group
    if group is not None and group.search is not None and state.num_seqs >= state.max_num_seqs:
        startable = sum(each.state not in RUNS and _may_start(each) for each in group.sequences.values())
        held = [place for place, each in enumerate(running) if each.group is group and not _may_start(each)]
        for place in held[::-1][: max(min(startable, plan.budget_left), 0)]:
            preempt(state, place, plan)
    if plan.chunks or state.shares.held_back:
        return
    while running and (
        state.num_seqs >= state.max_num_seqs or blocks_needed(state, first) > state.pool.num_available
    ):
        preempt(state, len(running) - 1, plan)


class Hits:
    """The prefixes that one step found for waiting sequences, and how much work that was."""

    def __init__(self) -> None:
        self.matched = 0  # blocks found anew
        self.counted = 0  # blocks looked up in ``referenced``, which hold until something starts
        self.referenced: dict[PrefixNode, int] = {}  # blocks of a hit that are referenced

    def clear(self) -> None:
        """A sequence has started, so other blocks are referenced now."""
        self.counted = 0
        self.referenced.clear()


def blocks_needed(state: SchedulerState, sequence: Sequence, hits: Hits | None = None) -> int:
    """Blocks that admission takes out of the available ones, for all tokens and one more.

    The prefix is matched at each try: what was cached in the last step may be gone, or have grown. With
    ``hits``, only the first hits of a step are looked up if they are long. All blocks of the others count as
    needed, which may be too many but never too few.
    """
    needed = _blocks_in_all(state, sequence)
    if not state.prefix_caching:
        return needed
    tokens, known = sequence.token_ids, sequence.node
    depth = known.depth if known is not None and known.alive else 0
    node = sequence.node = state.index.match(sequence.root, tokens, sequence.longest_hit, known)
    if node is None:
        return needed
    if hits is None:
        return max(needed - _num_referenced(state, node), 1)
    hits.matched += max(node.depth - depth, 0)
    count = hits.referenced.get(node)
    if count is None:
        if hits.counted and hits.counted + node.depth > _MAX_COUNTED:
            return needed
        hits.counted += node.depth
        count = hits.referenced[node] = _num_referenced(state, node)
    return max(needed - count, 1)


def _num_referenced(state: SchedulerState, node: PrefixNode) -> int:
    """Blocks of a hit that are referenced."""
    return state.pool.count_referenced(state.index.blocks(node))


def is_next_block_scheduled(state: SchedulerState, sequence: Sequence, plan: StepPlan) -> bool:
    """Whether ``plan`` already computes, for another sequence, the next block that this one misses.

    It then waits, holding nothing, and is considered in the next step. That ends: the other sequence advances
    by at least a token in each step that makes this one wait.
    """
    if not state.prefix_caching or not plan.prefilling or sequence.host_table:
        return False
    size, node = state.pool.block_size, sequence.node
    depth = node.depth if node is not None else 0
    end = (depth + 1) * size
    tokens = sequence.token_ids
    if end > sequence.longest_hit:
        return False
    block = tokens[depth * size : end]
    return any(
        other.indexed == depth
        and other.node is node
        and other.root == sequence.root
        and other.token_ids[depth * size : end] == block
        for other in plan.prefilling
    )


def _start(state: SchedulerState, position: int, plan: StepPlan, tokens: int, slots: int) -> None:
    """Run a waiting sequence that fits: reuse its prefix or swap it in, then add its first ``tokens``.

    It gets up to ``slots`` sequence slots, and one in any case.
    """
    sequence = state.start(position, slots)
    found = state.block_tables.reuse_prefix(sequence)
    if sequence.state is SequenceState.SWAPPING_IN:
        swap_in(state, sequence, plan)
    else:
        sequence.computed = found * state.pool.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            plan.admitted.append(sequence)
    if not sequence.ticket.begun:
        state.fair.begin(sequence.ticket, sequence.remaining)
    state.recoveries.resumed(sequence, found)
    state.shares.take(sequence, sequence.remaining, tokens)
    plan.add(sequence, grow(state, sequence, tokens, plan))


def _prefill_tokens(state: SchedulerState, sequence: Sequence) -> int:
    """Tokens that a waiting sequence would have to compute, by what was found of its prefix last."""
    if sequence.host_table:
        return sequence.remaining
    depth = sequence.node.depth if sequence.node is not None else 0
    return len(sequence.token_ids) - depth * state.pool.block_size


def _blocks_in_all(state: SchedulerState, sequence: Sequence) -> int:
    """Blocks for all tokens and one more, and one for each sequence that will be forked from it at once."""
    pool, window = state.pool, state.index.window
    blocks = pool.blocks_for(len(sequence.token_ids) + 1)
    if window is not None:
        # Blocks outside the window are released as the prompt is computed.
        blocks = min(blocks, pool.blocks_for(window + state.token_budget) + 2)
    return blocks + _slots(state, sequence) - 1


def _slots(state: SchedulerState, sequence: Sequence) -> int:
    """Sequence slots that a waiting sequence would start with now."""
    return min(sequence.num_seqs, max(state.max_num_seqs - state.num_seqs, 1))


def running_before(state: SchedulerState, sequence: Sequence) -> list[Sequence]:
    """Running sequences that come before one that waits; the others give way to it when blocks run out."""
    return state.running[: bisect_left(state.running, sequence.order, key=_order)]


def _first_startable(state: SchedulerState) -> Sequence | None:
    """The first waiting sequence that could run if there were room for it."""
    return next(filter(_may_start, state.waiting), None)


def _may_start(sequence: Sequence) -> bool:
    """Whether a waiting sequence can run; a held beam has nothing to compute, and its blocks can wait."""
    return sequence.candidates is None and sequence.state is not SequenceState.SWAPPING_OUT


def _outranks(waiting: Sequence, running: Sequence, lost: dict[Account, float], slots: int) -> bool:
    """Whether a waiting sequence may take the place of one that runs and comes after it.

    Either its priority is better, or another client, after what that one has ``lost``, would still have more in
    service than its own; as much, if its own has nothing. So clients never take places from each other in turn.
    Of a request for several sequences, as many count as there would be ``slots``.
    """
    if waiting.priority < running.priority:
        return True
    account, other = waiting.ticket.account, running.ticket.account
    if account is other or account.level is not other.level:
        return False
    width = waiting.params.width if waiting.num_seqs > 1 else 1
    own = account.in_service + waiting.work * min(slots / width, 1.0)
    others = other.in_service - lost.get(other, 0.0) - running.work
    return own < others or (own == others and not account.in_service)


def _order(sequence: Sequence) -> Order:
    return sequence.order
