"""Admits waiting sequences to the running batch, in order, as blocks, slots, and tokens allow."""

from __future__ import annotations

from engine.kv.prefix_node import PrefixNode
from engine.scheduling.preemption import FreedBlocks, grow, preempt
from engine.scheduling.sequence import Sequence, SequenceState
from engine.scheduling.state import SchedulerState
from engine.scheduling.step import StepPlan
from engine.scheduling.swapping import swap_in

_MAX_DEFERRED = 32  # waiting sequences passed over in one step because the step computes their next block


def admit_waiting(state: SchedulerState, plan: StepPlan) -> int:
    """Start waiting sequences while tokens, sequence slots and blocks last.

    A bounded number of sequences that do not fit is passed over. Returns how many waiting sequences no newcomer
    can overtake, for lack of slots or blocks; sequences left for lack of tokens do not count, nor those that
    are passed over.
    """
    pool, waiting, reserve = state.pool, state.waiting, state.reserve
    position = misses = deferred = 0
    withheld = 0  # blocks for preempted sequences that were passed over: later ones must leave them
    reserved: int | None = None  # blocks for the growth of running sequences; a bound until ``exact``
    exact = False
    referenced_in_hit: dict[PrefixNode, int] = {}
    passed: list[Sequence] = []
    while position < len(waiting) and plan.budget_left > 0 and state.num_seqs < state.max_num_seqs:
        sequence = waiting[position]
        if not _may_start(sequence):
            position += 1
            continue
        needed = blocks_needed(state, sequence, referenced_in_hit)
        if is_next_block_scheduled(state, sequence, plan):
            deferred += 1
            if deferred > _MAX_DEFERRED:
                return 0
        else:
            fits = (
                state.num_seqs + sequence.num_seqs <= state.max_num_seqs
                and needed + withheld <= pool.num_available
            )
            if fits and plan.chunks:  # while nothing runs, nothing is reserved
                if reserved is None:
                    reserved = reserve.upper_bound(plan.prefilling, state.num_seqs)
                if not exact and needed + reserved + withheld > pool.num_available:
                    reserved, exact = reserve.blocks(state.running), True
                fits = needed + reserved + withheld <= pool.num_available
            if fits or not state.running:
                _start(state, position, plan)
                referenced_in_hit.clear()
                if reserved is not None:
                    reserved += reserve.blocks([sequence])
                for other in passed:
                    other.overtakes += 1
                continue
            misses += 1
            if misses > state.look_ahead or sequence.overtakes >= state.max_overtakes:
                return len(waiting) - position
            passed.append(sequence)
        if sequence.state is not SequenceState.WAITING:
            withheld += _blocks_in_all(state, sequence)
        position += 1
    return len(waiting) - position if state.num_seqs >= state.max_num_seqs else 0


def preempt_for_priority(state: SchedulerState, plan: StepPlan) -> None:
    """Preempt running sequences of lower priority for the first waiting one, if that lets it in."""
    running, pool = state.running, state.pool
    first = _first_startable(state)
    if first is None or not running or not _outranks(first, running[-1]):
        return
    needed = blocks_needed(state, first)
    freed = FreedBlocks(pool, state.index.blocks(first.node))
    reserved = state.reserve.blocks(running)
    num_seqs = state.num_seqs
    victims = 0
    while (
        num_seqs + first.num_seqs > state.max_num_seqs or needed + reserved > pool.num_available + freed.count
    ):
        if victims == len(running):
            break
        victim = running[-1 - victims]
        if not _outranks(first, victim):
            return
        freed.add(victim.block_table)
        reserved -= state.reserve.blocks([victim])
        num_seqs -= victim.num_seqs
        victims += 1
    for _ in range(victims):
        preempt(state, len(running) - 1, plan)


def preempt_held_beams(state: SchedulerState, plan: StepPlan) -> None:
    """No running sequence can run: all are beams held until a waiting one of their group has run, so let it in.

    It may lack blocks, or a sequence slot: a search may have more beams than ``max_num_seqs``.
    """
    running = state.running
    first = _first_startable(state)
    while (
        running
        and first is not None
        and (
            state.num_seqs + first.num_seqs > state.max_num_seqs
            or blocks_needed(state, first) > state.pool.num_available
        )
    ):
        preempt(state, len(running) - 1, plan)


def blocks_needed(
    state: SchedulerState, sequence: Sequence, referenced_in_hit: dict[PrefixNode, int] | None = None
) -> int:
    """Blocks that admission takes out of the available ones, for all tokens and one more.

    The prefix is matched at each try: what was cached in the last step may be gone, or have grown.
    ``referenced_in_hit`` remembers how many blocks of a hit are referenced, for sequences with the same hit, as
    long as nothing changes.
    """
    needed = _blocks_in_all(state, sequence)
    if not state.prefix_caching:
        return needed
    tokens = sequence.token_ids
    # The last token is always run: its logits are needed. A swapped sequence looks for what it had.
    longest_hit = sequence.computed if sequence.host_table else len(tokens) - 1
    node = sequence.node = state.index.match(sequence.root, tokens, longest_hit, sequence.node)
    if node is None:
        return needed
    count = None if referenced_in_hit is None else referenced_in_hit.get(node)
    if count is None:
        count = sum(map(bool, map(state.pool.references, state.index.blocks(node))))
        if referenced_in_hit is not None:
            referenced_in_hit[node] = count
    return max(needed - count, 1)


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
    if end > len(tokens) - 1:
        return False
    block = tokens[depth * size : end]
    return any(
        other.indexed == depth
        and other.node is node
        and other.root == sequence.root
        and other.token_ids[depth * size : end] == block
        for other in plan.prefilling
    )


def _start(state: SchedulerState, position: int, plan: StepPlan) -> None:
    """Run a waiting sequence that fits: reuse its prefix or swap it in, then add its first chunk."""
    sequence = state.start(position)
    found = state.block_tables.reuse_prefix(sequence)
    if sequence.state is SequenceState.SWAPPING_IN:
        swap_in(state, sequence, plan)
    else:
        sequence.computed = found * state.pool.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            plan.admitted.append(sequence)
    state.recoveries.resumed(sequence, found)
    plan.add(sequence, grow(state, sequence, min(sequence.remaining, plan.budget_left), plan))


def _blocks_in_all(state: SchedulerState, sequence: Sequence) -> int:
    """Blocks for all tokens and one more, and one for each sequence that will be forked from it."""
    pool, window = state.pool, state.index.window
    blocks = pool.blocks_for(len(sequence.token_ids) + 1)
    if window is not None:
        # Blocks outside the window are released as the prompt is computed.
        blocks = min(blocks, pool.blocks_for(window + state.token_budget) + 2)
    return blocks + sequence.num_seqs - 1


def _first_startable(state: SchedulerState) -> Sequence | None:
    return next(filter(_may_start, state.waiting), None)


def _may_start(sequence: Sequence) -> bool:
    """Whether a waiting sequence can run; a held beam has nothing to compute, and its blocks can wait."""
    return sequence.candidates is None and sequence.state is not SequenceState.SWAPPING_OUT


def _outranks(waiting: Sequence, running: Sequence) -> bool:
    return waiting.priority < running.priority and waiting.order < running.order
