"""Which replicas are routable, and how much work is booked on each; a choice and its booking are one step.

There is one ledger for each (process, engine deployment). The ingress's loop opens routes, passes on reports,
books, and releases bookings. Only if Serve chooses the replicas, the router's thread books. One lock makes each
call atomic: a booking is either made before a route closes (and returned by ``close``) or not at all, and each
choice of a burst sees the one before it.

The ledger owns all state: routes and bookings are here, what a choice needs is in ``chooser.py``, which calls a
pure function (``policies.py``) of views of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from app.autoscaling.fault_counter import FaultCounter
from app.routing.chooser import Chooser
from app.routing.cost import RoutingRequest
from app.routing.fleet_estimates import FleetEstimates
from app.routing.guarded_index import BlockIndex, GuardedIndex
from app.routing.load import PREFILL_RATE, LoadReport, sane
from app.routing.policies import Policy
from app.routing.replica_state import Booking, ReplicaState, Route
from app.routing.requirement import UNKNOWN_BUILD, Build, ReplicaProfile, Requirement
from app.routing.routable_replicas import RoutableReplicas, that_stay
from app.routing.routing_meta import RoutingMeta
from app.routing.waiting import ExpectedWait, expected_wait
from engine.errors import QuireError

__all__ = ["Booking", "Ledger", "NoRouteError", "Route"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16
"""Until a report says otherwise."""

REMEMBERED = 1024
"""Replicas without a channel whose history is kept."""


class NoRouteError(QuireError):
    """No replica has an open channel at the moment, or the attempt to be routed is over."""


class Ledger:
    """Invariant: a replica's totals are the sums of its bookings, and its view, if there is one, is current.

    ``policy`` chooses. ``index`` finds prefixes; without one, none are found. ``clock`` is in monotonic
    seconds.
    """

    def __init__(
        self,
        policy: Policy = Policy.PREFIX,
        index: BlockIndex | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._faults = FaultCounter("choosing by prefixes failed; going by load alone", logger)
        self._index = GuardedIndex(index, self._faults)
        self._estimates = FleetEstimates(BLOCK_SIZE)
        self._chooser = Chooser(policy, self._estimates, self._index, self._faults)
        self._replicas: dict[str, ReplicaState] = {}
        self._routable = RoutableReplicas()
        self._expected: set[int] = set()
        self._bookings: dict[int, Booking] = {}
        self._placed = 0

    @property
    def faults(self) -> int:
        """Choices and changes of the index that failed; above 0 is a defect."""
        return self._faults.count + self._index.stuck.count

    @property
    def changes(self) -> int:
        """Counts whenever other replicas may be routable, or the same ones may offer something else."""
        return self._routable.changes

    @property
    def typical_output(self) -> float:
        """Average number of tokens that a sequence makes here."""
        return self._estimates.outputs.tokens

    def configure(self, policy: Policy) -> None:
        """Choose by this policy from now on."""
        with self._lock:
            self._chooser.configure(policy)

    def with_index(self, replica: str, step: Callable[[], T]) -> T | None:
        """Run ``step``, which reads or changes the index's part of a replica, under the lock.

        Returns ``None`` if it raises: the index then drops the replica until its next route. If dropping fails,
        too, that is a second fault, and the replica's blocks may be wrong.
        """
        with self._lock:
            return self._index.run(replica, step)

    # ---- routes and reports

    def open(self, route: Route, profile: ReplicaProfile | None = None, build: Build = UNKNOWN_BUILD) -> None:
        """Make a replica routable for what its ``profile`` allows; for everything without one."""
        with self._lock:
            self._open(route, profile, build)

    def _open(self, route: Route, profile: ReplicaProfile | None, build: Build) -> None:
        state = self._replicas.pop(route.replica, None) or ReplicaState(route.replica)
        self._replicas[route.replica] = state
        state.open(route, profile, build)
        self._routable.relist(self._replicas.values())
        self._index.add(route)

    def close(self, route: Route) -> list[int]:
        """End a route; release and return the attempts that were booked on it."""
        with self._lock:
            attempts = [number for number, booking in self._bookings.items() if booking.route == route]
            for attempt in attempts:
                self._release(attempt)
                self._expected.discard(attempt)
            state = self._replicas.get(route.replica)
            if state is not None and state.route == route:
                state.close()
                self._routable.relist(self._replicas.values())
                self._forget_oldest()
                self._index.remove(route.replica)
            return attempts

    def hold(self, route: Route) -> list[int]:
        """Stop booking on a route that has broken. Returns its attempts, which stay booked until ``reopen``."""
        with self._lock:
            state = self._replicas.get(route.replica)
            if state is not None and state.route == route:
                state.suspected = True
                self._routable.relist(self._replicas.values())
                self._index.remove(route.replica)
            return [number for number, booking in self._bookings.items() if booking.route == route]

    def reopen(
        self,
        ended: Route,
        route: Route,
        profile: ReplicaProfile | None,
        build: Build,
        resumed: Collection[int],
    ) -> list[int]:
        """``open`` in place of a route that ``hold`` has ended; the ``resumed`` attempts are booked here now.

        Releases and returns the others that were booked there.
        """
        with self._lock:
            there = [(number, booking) for number, booking in self._bookings.items() if booking.route == ended]
            kept = [booking for number, booking in there if number in resumed]
            lost = [number for number, _ in there if number not in resumed]
            for booking in kept:
                booking.route = route
            for number in lost:
                self._release(number)
                self._expected.discard(number)
            self._open(route, profile, build)
            state = self._replicas[route.replica]
            state.pending = {booking.attempt: booking for booking in kept if not booking.acknowledged}
            return lost

    def suspect(self, replica: str, suspected: bool) -> None:
        """Stop routing to a silent replica, or start again; its attempts stay."""
        with self._lock:
            state = self._replicas.get(replica)
            if state is not None and state.route is not None:
                state.suspected = suspected
                self._routable.relist(self._replicas.values())

    def routable(
        self, members: Collection[str] | None = None, requirement: Requirement | None = None
    ) -> list[str]:
        """Replicas with an open channel and no suspicion; of ``members`` and able to meet ``requirement``."""
        with self._lock:
            return [state.replica for state in self._routable.able(members, requirement)]

    def profile(self, replica: str) -> ReplicaProfile | None:
        """What a replica offers, if it has said."""
        with self._lock:
            state = self._replicas.get(replica)
            return None if state is None else state.profile

    def report(self, route: Route, load: LoadReport) -> bool:
        """Take in an engine's report, whose figures include the bookings that it has acknowledged.

        ``False`` if the route is not the replica's open one; then nothing changes.
        """
        with self._lock:
            state = self._replicas.get(route.replica)
            if state is None or state.route != route:
                return False
            now = self._clock()
            load = sane(load)
            before = state.stalled, state.suspects
            state.report(load, now)
            if (state.stalled, state.suspects) != before:
                self._routable.relist(self._replicas.values())
            self._chooser.outdate(state)
            if self._estimates.learn_report(load, state.history):
                for other in self._replicas.values():
                    self._chooser.outdate(other)
            self._catch_up(now)
            return True

    # ---- bookings

    def expect(self, attempt: int) -> None:
        """Allow an attempt to be booked until ``release``; a canceled call may still reach the router."""
        with self._lock:
            self._expected.add(attempt)

    def book(
        self,
        meta: RoutingMeta,
        members: Collection[str] | None = None,
        likely_victims: Collection[str] = (),
    ) -> Booking:
        """Choose a replica and book there; an earlier booking of the attempt is released.

        Likely victims are taken only where all others cost much more.

        Raises:
            NoRouteError: none of ``members`` is routable and meets the request's requirement, or the attempt is
                not expected; nothing is booked.
        """
        with self._lock:
            attempt, decode, sequences = meta.attempt, meta.decode, meta.sequences
            if attempt not in self._expected:
                raise NoRouteError(f"attempt {attempt} is over")
            placed_before = self._release(attempt)
            replicas = self._routable.candidates(members, meta, likely_victims)
            if not replicas:
                raise NoRouteError("no engine replica that can run the request has an open channel")
            request = RoutingRequest(
                meta.request_id,
                meta.prefill,
                self._estimates.expected_output(decode, sequences),
                sequences,
                meta.keys,
                placed_before or meta.avoid != "",
                likely_victims,
                self._placed,
            )
            self._placed += 1
            now = self._clock()
            decision = self._chooser.choose(replicas, request, now)
            state, blocks = replicas[decision.place], decision.cached_blocks
            alone = meta.requirement is not None and meta.requirement.alone
            booking = self._book(state, attempt, request, decode, blocks, alone, now)
            booking.reason, booking.placed_at, booking.compared = decision.reason, now, decision.compared
            return booking

    def first_token(self, attempt: int) -> None:
        """Release the prefill part; later calls do nothing."""
        with self._lock:
            booking = self._bookings.get(attempt)
            if booking is not None and not booking.prefilled:
                state = self._replicas[booking.route.replica]
                state.end_prefill(booking)
                self._chooser.outdate(state)
                self._catch_up(self._clock())

    def grow(self, attempt: int, before: int, after: int) -> None:
        """An attempt's only sequence had ``before`` tokens and has ``after``.

        Not every token must be reported: only the first ones, and those that reach a power of two.
        """
        with self._lock:
            booking = self._bookings.get(attempt)
            if booking is not None:
                self._estimates.outputs.grow(before, after)
                booking.grown = after

    def release(self, attempt: int, generated: float | None = None) -> bool:
        """End a booking; false if it has ended already.

        ``generated``: tokens of each sequence, on average, where all ended by themselves or at their limit.
        """
        with self._lock:
            self._expected.discard(attempt)
            booking = self._bookings.get(attempt)
            if booking is not None and generated is not None:
                self._estimates.outputs.learn(generated, booking.grown)
            released = self._release(attempt)
            self._catch_up(self._clock())
            return released

    def booking(self, attempt: int) -> Booking | None:
        """Where an attempt is booked."""
        with self._lock:
            return self._bookings.get(attempt)

    def clear_suspect(self, attempt: int) -> None:
        """An attempt no longer has to be the only suspect on its replica."""
        with self._lock:
            booking = self._bookings.get(attempt)
            if booking is not None and booking.alone:
                booking.alone = False
                self._replicas[booking.route.replica].alone -= 1

    def attempts_on(self, replicas: Collection[str]) -> list[int]:
        """The attempts that are booked on any of ``replicas``."""
        with self._lock:
            return [number for number, booking in self._bookings.items() if booking.route.replica in replicas]

    def booked(self, replicas: Collection[str]) -> set[str]:
        """Those of ``replicas`` on which an attempt is booked; however many are, only the replicas count."""
        with self._lock:
            known = ((name, self._replicas.get(name)) for name in replicas)
            return {name for name, state in known if state is not None and state.bookings}

    # ---- figures

    def prefill_rate(self, members: Collection[str], likely_victims: Collection[str] = ()) -> float:
        """Prompt tokens per second of all routable ``members`` together to which requests move."""
        with self._lock:
            loads = [state.load for state in that_stay(self._routable.able(members, None), likely_victims)]
            return sum(PREFILL_RATE if load is None else load.prefill_rate or PREFILL_RATE for load in loads)

    def load(self) -> dict[str, int]:
        """Booked tokens of each replica that has any booking or an open route."""
        with self._lock:
            return {
                name: state.booked_tokens
                for name, state in self._replicas.items()
                if state.route is not None or state.bookings
            }

    def expected_wait(self, members: Collection[str]) -> ExpectedWait | None:
        """The wait of a request like the last ones on routable ``members``; ``None`` before any report."""
        with self._lock:
            latest = reversed(self._bookings.values())
            return expected_wait(self._routable.states, members, latest, self._estimates, self._clock())

    def state(self) -> dict[str, Any]:
        """``faults``, ``reasons`` of decisions, and sequences running on each replica that has reported."""
        with self._lock:
            running = {
                name: state.load.running for name, state in self._replicas.items() if state.load is not None
            }
            return {"faults": self.faults, "reasons": dict(self._chooser.reasons), "running": running}

    def stalled(self) -> list[str]:
        """Replicas whose engine has work and makes no progress."""
        with self._lock:
            return [name for name, state in self._replicas.items() if state.stalled]

    def foreign_suspects(self, replica: str) -> bool:
        """Whether a suspect (``app/fleet/faults.py``) of another ingress runs there, and none of this one's."""
        with self._lock:
            state = self._replicas.get(replica)
            return state is not None and state.suspects > state.alone

    def _book(
        self,
        state: ReplicaState,
        attempt: int,
        request: RoutingRequest,
        decode: int,
        cached_blocks: int,
        alone: bool,
        now: float,
    ) -> Booking:
        assert state.route is not None  # or it would not be routable
        tokens, rows, keys = request.tokens, request.sequences, request.keys
        cached = self._estimates.usable_blocks(tokens, cached_blocks) * self._estimates.block_size
        kv_tokens = rows * tokens + int(rows * request.output / 2)
        booking = Booking(
            request.request_id, attempt, state.route, tokens - cached, decode, cached, rows, kv_tokens, keys
        )
        booking.alone = alone
        self._bookings[attempt] = booking
        state.add(booking)
        if alone:
            self._routable.changes += 1  # others that must be alone can no longer run there
        self._chooser.outdate(state)
        if keys and self._chooser.by_prefix:
            self._index.claim(state.replica, keys, now, now + state.claim_seconds(), cached_blocks)
        return booking

    def _release(self, attempt: int) -> bool:
        booking = self._bookings.pop(attempt, None)
        if booking is None:
            return False
        state = self._replicas[booking.route.replica]
        if not booking.prefilled:
            if booking.keys:
                self._index.withdraw(state.replica, booking.keys)
            state.end_prefill(booking)
        state.remove(booking)
        self._chooser.outdate(state)
        return True

    # ---- upkeep

    def _catch_up(self, now: float) -> None:
        """Do now, while no request waits, the upkeep that the next choice would otherwise have to do."""
        self._chooser.catch_up()
        self._index.expire(now)

    def _forget_oldest(self) -> None:
        """Keep the histories of closed replicas for their next channels, but only of the most recent ones."""
        closed = [name for name, state in self._replicas.items() if state.route is None and not state.bookings]
        for name in closed[:-REMEMBERED]:
            del self._replicas[name]
