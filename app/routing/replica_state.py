"""One replica: its bookings, what is learned of it, its state in the ledger, and its view in a decision."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.routing.load import PREFILL_RATE, LoadReport
from app.routing.requirement import UNKNOWN_BUILD, Build, ReplicaProfile

SHORTEST_CLAIM_S, LONGEST_CLAIM_S = 0.5, 10.0

STALLED_S = 3.0
"""A replica whose engine has work and has made no progress for this long gets no new requests."""

_SLOWNESS_STEP = 1 / 32
"""How much of the difference one report corrects."""

_FORGETTING = 1 / 128
"""How much of the difference one report of an idle engine removes: half in 45 s."""


class Route(NamedTuple):
    """An open channel: attempts live and die with exactly this one."""

    replica: str
    epoch: int


class Compared(NamedTuple):
    """What a request would have cost on a replica: tokens that it has cached, seconds by ``cost.TERMS``."""

    replica: str
    cached_tokens: int
    terms: tuple[float, ...]


@dataclass(slots=True, eq=False)
class Booking:
    """Work of one attempt on one route; the ledger alone changes it.

    In tokens, ``prefill`` is to be computed, ``cached`` is found there, ``decode`` is the most that all its
    ``rows`` (sequences) make together, ``kv_tokens`` is what they are expected to read in each step.
    """

    request_id: str
    attempt: int
    route: Route
    prefill: int
    decode: int
    cached: int = 0
    rows: int = 1
    kv_tokens: int = 0
    keys: Sequence[int] = ()
    """Of its full blocks, until they are computed."""
    prefilled: bool = False
    """Its first token has come."""
    grown: int = 0
    """Tokens of its only sequence, as far as its length has been learned from."""
    acknowledged: bool = False
    """The engine's reports include it."""
    alone: bool = False
    """No other such booking may be where it is."""
    reason: str = ""
    """What decided."""
    placed_at: float = 0.0
    """When, on the ledger's clock."""
    compared: tuple[Compared, ...] = ()
    """What it costs here, and elsewhere."""


@dataclass(slots=True)
class ReplicaHistory:
    """What is learned about a replica over time; it survives a closed channel."""

    slowness: float = 1.0
    """Its step time over that of the fleet's model."""

    def learn_step(self, measured_s: float, expected_s: float) -> None:
        """Take in one step time and what the model expects of the same step."""
        ratio = min(max(measured_s / max(expected_s, 1e-9), 0.1), 10.0)
        self.slowness += (ratio - self.slowness) * _SLOWNESS_STEP

    def forget(self) -> None:
        """It ran nothing. What made it slow may have ended, and without requests that would not show."""
        self.slowness += (1.0 - self.slowness) * _FORGETTING


@dataclass(slots=True)
class ReplicaView:
    """All that a decision knows about one replica: its name, what is booked there, and its part of the cost.

    Nothing changes it. It is not ``frozen``, because that makes construction four times as expensive.
    """

    replica: Final[str]
    seed: Final[int]
    """Of the rendezvous hash."""
    booked_tokens: Final[int]
    bookings: Final[int]
    backlog_s: Final[float]
    """Seconds of prompt work that are left when all that had started by the report is done."""
    started_until: Final[float]
    """When that is done, in monotonic seconds; ``cost.SILENT_S`` after the report at most."""
    token_cost: Final[float]
    """Weighted seconds for each token that is computed."""
    streaming_weight: Final[float]
    """``cost.STREAMING``, times its step time over that of the fleet's model."""
    rows: Final[float]
    """Sequences that run, or are about to."""
    load_step_s: Final[float]
    """By how much these lengthen each step, as the fleet's model has it."""
    free_tokens: Final[float]
    """Tokens of KV that fit in without eviction, after those that wait."""
    evictable_tokens: Final[float]
    """Tokens of KV that fit in by eviction; negative if not even those that wait do."""
    missing_token_s: Final[float]
    """Seconds of waiting for each token of KV beyond these."""
    free_slots: Final[float]
    """Sequences that can start after those that wait; -n if n must end for those alone."""
    slot_s: Final[float]
    """Seconds between the ends of two running sequences."""

    def wait_s(self, now: float) -> float:
        """Seconds until all prompts ahead of a new one are computed."""
        return self.backlog_s + max(self.started_until - now, 0.0)

    def admission_s(self, excess_tokens: float, sequences: float) -> float:
        """Seconds until there are slots for ``sequences`` and KV for ``excess_tokens`` beyond what is free."""
        for_blocks = (excess_tokens - self.evictable_tokens) * self.missing_token_s
        for_slots = (sequences - self.free_slots) * self.slot_s
        return max(for_blocks, for_slots, 0.0)


@dataclass(slots=True, eq=False)
class ReplicaState:
    """Invariant: each total is the sum over the bookings that live there, prefill parts until the first token.

    A booking is in the ``pending`` totals until the engine acknowledges it, then its sequences are in the
    ``acknowledged`` ones, whatever the last report shows of them.
    """

    replica: str
    history: ReplicaHistory = field(default_factory=ReplicaHistory)
    route: Route | None = None
    """The open one."""
    profile: ReplicaProfile | None = None
    """What the replica offers, if it has said; it survives a closed channel."""
    build: Build = UNKNOWN_BUILD
    """With which options it runs."""
    suspected: bool = False
    """Silent; gets nothing new."""
    stalled: bool = False
    """Its engine makes no progress; gets nothing new."""
    load: LoadReport | None = None
    """The open route's last report."""
    reported_at: float = 0.0

    booked_tokens: int = 0
    bookings: int = 0
    alone: int = 0
    """Bookings that must be alone; 1 at most."""
    pending_prefill: int = 0
    pending_rows: int = 0
    pending_kv_tokens: int = 0
    acknowledged_rows: int = 0
    acknowledged_kv_tokens: int = 0
    pending: dict[int, Booking] = field(default_factory=dict)
    """Unacknowledged bookings on the open route, by attempt."""
    view: ReplicaView | None = None
    """Of what is booked, reported and learned; ``None`` if out of date."""
    seed: int = field(init=False)
    """Of the rendezvous hash."""

    def __post_init__(self) -> None:
        self.seed = name_key(self.replica)

    @property
    def suspects(self) -> int:
        """Reported by the engine; see ``LoadReport``."""
        return 0 if self.load is None else self.load.suspects

    @property
    def routable(self) -> bool:
        """Whether it may get new requests."""
        return self.route is not None and not self.suspected and not self.stalled

    def open(self, route: Route, profile: ReplicaProfile | None = None, build: Build = UNKNOWN_BUILD) -> None:
        """A channel has opened; nothing is known of the load behind it yet."""
        self.profile, self.build = profile, build
        self.route, self.suspected, self.stalled, self.load, self.view = route, False, False, None, None
        self.pending = {}

    def close(self) -> None:
        """The channel has closed."""
        self.route, self.suspected, self.stalled, self.load, self.view = None, False, False, None, None

    def add(self, booking: Booking) -> None:
        """Work on the open route, which the engine has not seen."""
        self.pending[booking.attempt] = booking
        self.booked_tokens += booking.prefill + booking.decode
        self.bookings += 1
        self.alone += booking.alone
        self.pending_prefill += booking.prefill
        self.pending_rows += booking.rows
        self.pending_kv_tokens += booking.kv_tokens
        self.view = None

    def report(self, load: LoadReport, now: float) -> None:
        """The open route's engine has reported: its figures include the bookings that it acknowledges."""
        self.load, self.reported_at, self.view = load, now, None
        self.stalled = load.stalled_s >= STALLED_S
        acknowledged = [booking for attempt, booking in self.pending.items() if attempt <= load.acknowledged]
        for booking in acknowledged:
            del self.pending[booking.attempt]
            booking.acknowledged = True
            if not booking.prefilled:
                self.pending_prefill -= booking.prefill
            self.pending_rows -= booking.rows
            self.pending_kv_tokens -= booking.kv_tokens
            self.acknowledged_rows += booking.rows
            self.acknowledged_kv_tokens += booking.kv_tokens

    def end_prefill(self, booking: Booking) -> None:
        """Count its prompt as computed, or as never to be computed; only once."""
        booking.prefilled = True
        booking.keys = ()
        self.booked_tokens -= booking.prefill
        if not booking.acknowledged:
            self.pending_prefill -= booking.prefill
        self.view = None

    def remove(self, booking: Booking) -> None:
        """The booking has ended, its prefill part before."""
        if booking.acknowledged:
            self.acknowledged_rows -= booking.rows
            self.acknowledged_kv_tokens -= booking.kv_tokens
        else:
            self.pending.pop(booking.attempt, None)  # not there if its route is an older one
            self.pending_rows -= booking.rows
            self.pending_kv_tokens -= booking.kv_tokens
        self.booked_tokens -= booking.decode
        self.bookings -= 1
        self.alone -= booking.alone
        self.view = None

    def claim_seconds(self) -> float:
        """How long a request's blocks count as expected here: twice the time of the work ahead, within limits.

        Siblings that arrive before the first event find them.
        """
        tokens, rate, load = self.pending_prefill, PREFILL_RATE, self.load
        if load is not None:
            tokens += load.waiting_tokens
            rate = load.prefill_rate or rate
        seconds = 2.0 * tokens / rate
        if seconds < SHORTEST_CLAIM_S:
            return SHORTEST_CLAIM_S
        return seconds if seconds < LONGEST_CLAIM_S else LONGEST_CLAIM_S


def name_key(name: str) -> int:
    """64 bits of a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
