"""What a request would cost on each replica, in seconds: one sum, the same for every replica and load.

    wait        prompt tokens to be computed there first, over the prefill rate, less the time since they were
                reported (at most 3 s)
  + compute     its own uncached tokens over the prefill rate: once as its own delay, and once as machine time
                that later requests wait for, so that a sibling that waits for a prefix costs the fleet less
                than one that computes it again; and the time for which running streams stand still meanwhile,
                weighted by ``STALL``
  + streaming   its decode time at the step time that it would see there, and the slowdown of the running
                sequences by its rows and KV, weighted by ``STREAMING``
  + eviction    recomputing the blocks that it would really push out there, times the share of reuse
  + admission   where sequence slots or blocks are out: the wait until enough running sequences have ended to
                admit those before it, and then it

Running sequences end one by one, ``step time * output / rows`` apart. Each end frees a slot and all blocks that
no other sequence holds. If slots and blocks have both run out, a request waits once, for the later of the two.
The prompts ahead of it are computed in the same period but in other steps, so *wait* is added.

Running rows and their KV slow a request down only while they remain, on average for half of an output.
No term is a threshold, and none depends on the fleet as a whole: a hot replica changes only its own cost.
``policies.cheapest`` has the tie rule and computes the copy deficit.

To add a term: learn its state in ``ReplicaHistory``, or take it from the load report; add its coefficient to
``ReplicaView`` and to ``view_of``, its name to ``TERMS``, and its seconds to both sums in ``costs``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from app.routing.fleet_estimates import FleetEstimates
from app.routing.load import PREFILL_RATE, LoadReport
from app.routing.replica_state import ReplicaState, ReplicaView

STREAMING = 0.05
"""Weight of a second of slower steps, against a second of waiting for the first token."""

STALL = 0.1
"""Weight of a second for which a stream stands still because a prompt is computed."""

MACHINE = 1.0
"""Weight of a second of computing as a delay of later requests, in addition to the request's own delay."""

SILENT_S = 3.0
"""After a report, waiting work is assumed to shrink with time for at most this long: an engine may hang."""

UNLIMITED = 1 << 40
"""Free blocks, or sequence slots, of a replica whose number is unknown."""


TERMS = ("wait", "compute", "streaming", "eviction", "admission")


class RoutingRequest(NamedTuple):
    """What a decision knows of a request."""

    request_id: str
    tokens: int
    """Of the prompt."""
    output: float
    """Tokens that each of its sequences is expected to make."""
    sequences: int = 1
    keys: Sequence[int] = ()
    """Of the prompt's full blocks."""
    retry: bool = False
    """It has been placed before, so nothing is learned from its keys again."""
    likely_victims: Collection[str] = ()
    """Replicas to use only if all others cost much more."""
    ordinal: int = 0
    """How many requests were placed before it."""


def view_of(
    state: ReplicaState, load: LoadReport, reported_at: float, estimates: FleetEstimates, output: float
) -> ReplicaView:
    """A replica at ``load`` as of ``reported_at``, whose running sequences make ``output`` tokens on average.

    A report may lag behind the ledger's own bookings, so at least these are assumed to run, up to the slots.
    """
    step, slowness = estimates.steps, state.history.slowness
    rate = load.prefill_rate or PREFILL_RATE
    ahead = load.waiting_tokens + state.pending_prefill
    started_s = 0.0 if load.num_blocked else min(load.waiting_tokens / rate, SILENT_S)

    rows = float(max(load.running, state.acknowledged_rows) + state.pending_rows)
    kv_tokens: float = max(load.kv_tokens, state.acknowledged_kv_tokens) + state.pending_kv_tokens
    slots = load.max_running or UNLIMITED
    free_slots = slots - max(load.running + load.waiting, state.acknowledged_rows) - state.pending_rows
    if load.num_blocked:
        # If blocks are lacking, a new sequence waits behind the blocked ones, and none of them runs with it.
        free_slots = min(free_slots, -load.num_blocked - state.pending_rows)
        slots = load.running or 1
    if rows > slots:
        kv_tokens *= slots / rows
        rows = slots
    load_step_s = step.per_row * rows + step.per_kv_token * kv_tokens

    block_size = estimates.block_size
    free = float((load.free if load.num_blocks else UNLIMITED) * block_size - ahead)
    # When a sequence ends, each of those running holds half an output more than now.
    slot_s = output * slowness * (step.base + load_step_s) / (rows or 1)
    kv_at_end = max(load.referenced * block_size / (rows or 1) + output / 2, block_size)
    return ReplicaView(
        replica=state.replica,
        seed=state.seed,
        booked_tokens=state.booked_tokens,
        bookings=state.bookings,
        backlog_s=ahead / rate - started_s,
        started_until=reported_at + started_s,
        token_cost=(1.0 + MACHINE + STALL * rows) / rate,
        streaming_weight=STREAMING * slowness,
        rows=rows,
        load_step_s=load_step_s,
        free_tokens=max(free, 0.0),
        evictable_tokens=load.evictable * block_size + min(free, 0.0),
        missing_token_s=max(slot_s / kv_at_end, 1.0 / rate),
        free_slots=free_slots,
        slot_s=slot_s,
    )


def costs(
    views: Sequence[ReplicaView],
    cached_blocks: Sequence[int],
    request: RoutingRequest,
    estimates: FleetEstimates,
    now: float,
    copy_deficit: float = 0.0,
    parts: list[tuple[float, ...]] | None = None,
) -> list[float]:
    """The cost of ``request`` at ``now`` on each replica, which holds ``cached_blocks`` of its prefix.

    ``copy_deficit`` (0 to 1) is how much the fleet lacks another copy of the longest of these prefixes:
    computing one that it lacks is not charged. ``parts`` gets the ``TERMS`` of each sum.
    """
    tokens, output, sequences = request.tokens, request.output, request.sequences
    step, block_size, reuse = estimates.steps, estimates.block_size, estimates.reuse.share
    # Running sequences have half an output left on average, and share that many steps with the request.
    shared_steps = min(output, estimates.outputs.tokens / 2)
    own_step_s = sequences * (step.per_row + (tokens + output / 2) * step.per_kv_token)
    decode_s = output * (step.base + own_step_s)
    slowdown_s = shared_steps * own_step_s
    # There are few different numbers of cached blocks: what follows from each, once.
    copied = copy_deficit * max(cached_blocks) if copy_deficit else 0.0
    charged_tokens, kv_tokens = {}, {}
    for blocks in set(cached_blocks):
        charged_tokens[blocks] = tokens - block_size * (blocks + copied - copy_deficit * blocks)
        kv_tokens[blocks] = tokens + sequences * output - block_size * blocks

    sums = []
    for view, blocks in zip(views, cached_blocks, strict=True):
        wait = view.backlog_s
        if now < view.started_until:
            wait += view.started_until - now
        compute = charged_tokens[blocks] * view.token_cost
        streaming = view.streaming_weight * (
            decode_s + shared_steps * view.load_step_s + slowdown_s * view.rows
        )
        eviction = admission = 0.0
        excess = kv_tokens[blocks] - view.free_tokens
        if excess > 0.0 or sequences > view.free_slots:
            evicted = excess if excess < view.evictable_tokens else view.evictable_tokens
            if evicted > 0.0:
                eviction = evicted * reuse * view.token_cost
            if evicted < excess or sequences > view.free_slots:
                admission = view.admission_s(excess, sequences)
        sums.append(wait + compute + streaming + eviction + admission)
        if parts is not None:
            parts.append((wait, compute, streaming, eviction, admission))
    return sums
