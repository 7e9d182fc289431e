"""Divides a step's prefill tokens: among clients, and between long prompts and short ones."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from engine.scheduling.fair_queue import OUTPUT_WEIGHT, Account
from engine.scheduling.prefill_shares import charge
from engine.scheduling.sequence import RUNS, Sequence
from engine.scheduling.state import SchedulerState
from engine.scheduling.step import StepPlan

MAX_SHARERS = 4
"""A step divides its tokens among at most this many clients: with more, the prompts of all would be late."""

_SEARCHED = 32  # waiting sequences among which clients are looked for


def begin_prefills(state: SchedulerState, budget: int, prefilling: int) -> None:
    """Begin a step's prefills: ``budget`` tokens, wanted by this many running sequences."""
    contended = prefilling + len(state.waiting) > 1
    state.shares.begin(budget, contended, _quotas(state, budget) if contended and state.fair.shared else {})


def lengthen_held_back(
    state: SchedulerState, plan: StepPlan, held_back: list[Sequence], quotas: dict[Account, float] | None = None
) -> None:
    """Give tokens that are left to running sequences that were held back, in this order.

    With ``quotas``, clients get the rest of these only. Nothing is preempted for a sequence: it gets no more
    than the available blocks cover.
    """
    prefills = (chunk for chunk in plan.chunks if chunk.length > 1 or not chunk.samples)
    chunks = {chunk.sequence: chunk for chunk in prefills}
    for sequence in held_back:
        account = sequence.ticket.account
        more = plan.budget_left if quotas is None else min(plan.budget_left, int(quotas.get(account, 0)))
        if more <= 0 or sequence.state not in RUNS:  # preempted since
            continue
        chunk = chunks.get(sequence)
        begun = 0 if chunk is None else chunk.length
        covered = state.block_tables.extend(sequence, min(sequence.remaining, begun + more), plan.transfers)
        if covered <= begun:
            continue
        if chunk is None:
            plan.add(sequence, covered)
            chunks[sequence] = plan.chunks[-1]
        else:
            plan.lengthen(chunk, covered)
        if quotas is not None:
            charge(quotas, sequence, covered - begun, covered == sequence.remaining)


def _quotas(state: SchedulerState, budget: int) -> dict[Account, float]:
    """Work for each client that wants prefill tokens, of which there are ``budget``.

    That is an equal part of the step's work, less what the client decodes. Work is that of the fair queue: in
    tokens, clients whose requests generate much for their prompts would get more. Only clients with the best
    priority get a quota; others get what is left. Empty if there is one client.
    """
    running = state.running
    wanting = [sequence for sequence in running if sequence.remaining > 1]
    wanting += islice(state.waiting, _SEARCHED)
    best = min(sequence.order[0] for sequence in wanting)
    accounts = {sequence.ticket.account for sequence in wanting if sequence.order[0] == best}
    if len(accounts) < 2:
        return {}
    decodes = Counter(sequence.ticket.account for sequence in running if sequence.remaining == 1)
    work = budget + OUTPUT_WEIGHT * sum(decodes[account] for account in accounts)
    part = max(work / min(len(accounts), MAX_SHARERS), 1.0)
    return {account: max(part - OUTPUT_WEIGHT * decodes[account], 0.0) for account in accounts}
