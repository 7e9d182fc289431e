"""Who may be routed to, and how much work is booked there.

One ledger for each (process, engine deployment). The router's thread books, the ingress's loop opens routes
and releases bookings; one lock makes each call one step, so a booking is either made before a route closes
(and returned by ``close``) or not at all.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection
from dataclasses import dataclass

from engine.errors import QuireError


class NoRouteError(QuireError):
    """No replica has an open channel at the moment, or the attempt to be routed is over."""


@dataclass(frozen=True, slots=True)
class Route:
    """An open channel: attempts live and die with exactly this one."""

    replica: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Booking:
    """Work of one attempt on one route, in tokens."""

    request_id: str
    attempt: int
    route: Route
    prefill: int
    decode: int


class Ledger:
    """Invariant: each replica's load is the sum of its bookings, prefill parts released at the first token."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: dict[str, Route] = {}
        self._suspects: set[str] = set()
        self._expected: set[int] = set()
        self._bookings: dict[int, Booking] = {}
        self._prefilled: set[int] = set()
        self._load: dict[str, int] = {}
        self._count: dict[str, int] = {}

    def open(self, route: Route) -> None:
        """Make a replica routable."""
        with self._lock:
            self._routes[route.replica] = route
            self._suspects.discard(route.replica)

    def close(self, route: Route) -> list[int]:
        """End a route; release and return the attempts that were booked on it."""
        with self._lock:
            if self._routes.get(route.replica) == route:
                del self._routes[route.replica]
                self._suspects.discard(route.replica)
            attempts = [booking.attempt for booking in self._bookings.values() if booking.route == route]
            for attempt in attempts:
                self._release(attempt)
                self._expected.discard(attempt)
            return attempts

    def suspect(self, replica: str, suspected: bool) -> None:
        """Stop routing to a silent replica, or start again; its attempts stay."""
        with self._lock:
            if suspected and replica in self._routes:
                self._suspects.add(replica)
            else:
                self._suspects.discard(replica)

    def routable(self, members: Collection[str] | None = None) -> list[str]:
        """Replicas with an open channel and no suspicion, of ``members`` where given."""
        with self._lock:
            return [replica for replica in self._routes if self._usable(replica, members)]

    def expect(self, attempt: int) -> None:
        """Allow an attempt to be booked, until ``release``: a cancelled call may still reach the router."""
        with self._lock:
            self._expected.add(attempt)

    def book(
        self,
        request_id: str,
        attempt: int,
        prefill: int,
        decode: int,
        members: Collection[str] | None = None,
        avoid: str = "",
    ) -> Booking:
        """Choose the least booked replica and book there; an earlier booking of the attempt is released.

        ``avoid`` is taken only if there is no other. Ties go to the fewest bookings, then by rendezvous hash.

        Raises:
            NoRouteError: none of ``members`` is routable, or the attempt is not expected; nothing is booked.
        """
        with self._lock:
            if attempt not in self._expected:
                raise NoRouteError(f"attempt {attempt} is over")
            self._release(attempt)
            candidates = [route for replica, route in self._routes.items() if self._usable(replica, members)]
            if not candidates:
                raise NoRouteError("no engine replica has an open channel")
            route = min(
                candidates,
                key=lambda route: (
                    route.replica == avoid,
                    self._load.get(route.replica, 0),
                    self._count.get(route.replica, 0),
                    _rendezvous(request_id, route.replica),
                ),
            )
            booking = Booking(request_id, attempt, route, prefill, decode)
            self._bookings[attempt] = booking
            self._load[route.replica] = self._load.get(route.replica, 0) + prefill + decode
            self._count[route.replica] = self._count.get(route.replica, 0) + 1
            return booking

    def first_token(self, attempt: int) -> None:
        """Release the prefill part; later calls do nothing."""
        with self._lock:
            booking = self._bookings.get(attempt)
            if booking is not None and attempt not in self._prefilled:
                self._prefilled.add(attempt)
                self._load[booking.route.replica] -= booking.prefill

    def release(self, attempt: int) -> bool:
        """End a booking; false if it has ended already."""
        with self._lock:
            self._expected.discard(attempt)
            return self._release(attempt)

    def booking(self, attempt: int) -> Booking | None:
        """Where an attempt is booked."""
        with self._lock:
            return self._bookings.get(attempt)

    def load(self) -> dict[str, int]:
        """Booked tokens of each replica that has any booking or an open route."""
        with self._lock:
            return {replica: self._load.get(replica, 0) for replica in {*self._routes, *self._load}}

    def _usable(self, replica: str, members: Collection[str] | None) -> bool:
        return replica not in self._suspects and (members is None or replica in members)

    def _release(self, attempt: int) -> bool:
        booking = self._bookings.pop(attempt, None)
        if booking is None:
            return False
        replica = booking.route.replica
        self._load[replica] -= (
            booking.decode if attempt in self._prefilled else booking.prefill + booking.decode
        )
        self._prefilled.discard(attempt)
        self._count[replica] -= 1
        if not self._count[replica]:
            del self._count[replica], self._load[replica]
        return True


def _rendezvous(request_id: str, replica: str) -> int:
    digest = hashlib.blake2b(f"{request_id}\0{replica}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
