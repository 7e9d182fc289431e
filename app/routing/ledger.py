"""Who may be routed to, and how much work is booked there; each choice and its booking are one step.

One ledger for each (process, engine deployment). The router's thread books, the ingress's loop opens routes,
passes reports on and releases bookings; one lock makes each call one step, so a booking is either made before
a route closes (and returned by ``close``) or not at all, and the next choice of a burst sees the one before.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

from app.routing.booking import Booking, Entry, NoRouteError, Route, Standing
from app.routing.candidates import Candidates
from app.routing.load import LoadReport, sane
from app.routing.policies import Chooser, Policy, Wanted, least_booked
from app.routing.residency import Residency
from app.routing.waiting import ExpectedWait, expected_wait

__all__ = ["Booking", "Ledger", "NoRouteError", "Residency", "Route"]

T = TypeVar("T")

_PREFIX = Policy.PREFIX  # Python 3.11 finds a member of an enumeration by a call

BLOCK_SIZE = 16
"""Until a report says otherwise."""

logger = logging.getLogger(__name__)


class Ledger:
    """Invariant: each replica's load is the sum of its bookings, prefill parts released at the first token.

    ``policy`` chooses; ``index`` finds prefixes, none are found without one. ``clock`` is in monotonic seconds.
    """

    def __init__(
        self,
        policy: Policy = Policy.PREFIX,
        index: Residency | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._index = index
        self._chooser = Chooser(policy, BLOCK_SIZE)
        self._routes: dict[str, Route] = {}
        self._suspects: set[str] = set()
        self._expected: set[int] = set()
        self._entries: dict[int, Entry] = {}
        self._standings: dict[str, Standing] = {}
        self._candidates = Candidates()
        self._stale: list[Standing] = []
        self._unacknowledged: dict[Route, dict[int, Entry]] = {}
        self._faults = 0
        self._said_at = float("-inf")

    @property
    def faults(self) -> int:
        """Choices and changes of the index that failed; above 0 is a defect."""
        return self._faults

    @property
    def typical_output(self) -> float:
        """Tokens that a sequence comes to, on average of the last ones that ended."""
        return self._chooser.outputs.tokens

    def configure(self, policy: Policy | None = None, index: Residency | None = None) -> None:
        """Change what is given, for the choices from now on."""
        with self._lock:
            self._chooser.policy = policy or self._chooser.policy
            if index is not None:
                self._index = index
                for route in self._routes.values():
                    index.add(route.replica, route.epoch)

    def with_index(self, replica: str, step: Callable[[], T]) -> T | None:
        """Run what reads or changes the index's part of a replica under the lock, as all of that must.

        ``None`` if there is a defect in it: then the index has the replica no more until its next route.
        """
        with self._lock:
            return self._guarded(replica, step)

    def open(self, route: Route) -> None:
        """Make a replica routable."""
        with self._lock:
            self._routes[route.replica] = route
            self._suspects.discard(route.replica)
            standing = self._standings.setdefault(route.replica, Standing(route.replica))
            standing.route, standing.load, standing.terms = route, None, None
            self._unacknowledged.setdefault(route, {})
            self._list_candidates()
            if self._index is not None:
                self._guarded(route.replica, partial(self._index.add, *route))

    def close(self, route: Route) -> list[int]:
        """End a route; release and return the attempts that were booked on it."""
        with self._lock:
            ends = self._routes.get(route.replica) == route
            if ends:
                del self._routes[route.replica]
                self._suspects.discard(route.replica)
            attempts = [at for at, entry in self._entries.items() if entry.booking.route == route]
            for attempt in attempts:
                self._release(attempt)
                self._expected.discard(attempt)
            self._unacknowledged.pop(route, None)
            self._forget(route.replica)
            self._list_candidates()
            if ends and self._index is not None:
                self._guarded(route.replica, partial(self._index.remove, route.replica))
            return attempts

    def suspect(self, replica: str, suspected: bool) -> None:
        """Stop routing to a silent replica, or start again; its attempts stay."""
        with self._lock:
            if suspected and replica in self._routes:
                self._suspects.add(replica)
            else:
                self._suspects.discard(replica)
            self._list_candidates()

    def routable(self, members: Collection[str] | None = None) -> list[str]:
        """Replicas with an open channel and no suspicion, of ``members`` where given."""
        with self._lock:
            return [name for name in self._candidates.names if members is None or name in members]

    def report(self, route: Route, load: LoadReport) -> bool:
        """Engine truth: bookings that it has acknowledged are in its numbers from now on, not beside them.

        False if the route is not the replica's open one; then nothing changes.
        """
        with self._lock:
            if self._routes.get(route.replica) != route:
                return False
            load = sane(load)
            standing = self._standings[route.replica]
            waiting = self._unacknowledged.get(route, {})
            for attempt in [attempt for attempt in waiting if attempt <= load.acknowledged]:
                waiting.pop(attempt).acknowledge()
            now = self._clock()
            if self._chooser.learn(standing, load, now):
                for other in self._standings.values():
                    other.terms = None
                self._stale.extend(self._standings.values())
            self._settle(now)
            return True

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
        *,
        keys: Sequence[int] = (),
        sequences: int = 1,
        fading: Collection[str] = (),
    ) -> Booking:
        """Choose a replica and book there; an earlier booking of the attempt is released.

        ``prefill`` counts all prompt tokens, cached or not; ``keys`` are those of its full blocks. ``decode``
        is the most that its ``sequences`` make together. ``avoid`` is taken last; ``fading``: see ``Wanted``.

        Raises:
            NoRouteError: none of ``members`` is routable, or the attempt is not expected; nothing is booked.
        """
        with self._lock:
            if attempt not in self._expected:
                raise NoRouteError(f"attempt {attempt} is over")
            again = avoid != "" or attempt in self._entries
            if attempt in self._entries:
                self._release(attempt)
            standings = self._candidates.among(members, avoid)
            if not standings:
                raise NoRouteError("no engine replica has an open channel")
            wanted = Wanted(request_id, prefill, decode, sequences, keys, again, fading)
            now = self._clock()
            place, blocks = self._choose(standings, wanted, now)
            return self._book(attempt, wanted, standings[place], blocks, now)

    def first_token(self, attempt: int) -> None:
        """Release the prefill part; later calls do nothing."""
        with self._lock:
            entry = self._entries.get(attempt)
            if entry is not None and not entry.prefilled:
                entry.release_prefill()
                self._stale.append(entry.standing)
                self._settle(self._clock())

    def release(self, attempt: int, made: float | None = None) -> bool:
        """End a booking; false if it has ended already.

        ``made``: tokens of each sequence, on average, where all ended by themselves or at their limit; teaches.
        """
        with self._lock:
            self._expected.discard(attempt)
            entry = self._entries.get(attempt)
            if entry is not None and made is not None:
                self._chooser.outputs.learn(made)
            released = self._release(attempt)
            self._settle(self._clock())
            return released

    def booking(self, attempt: int) -> Booking | None:
        """Where an attempt is booked."""
        with self._lock:
            entry = self._entries.get(attempt)
            return entry.booking if entry is not None else None

    def load(self) -> dict[str, int]:
        """Booked tokens of each replica that has any booking or an open route."""
        with self._lock:
            return {replica: standing.tokens for replica, standing in self._standings.items()}

    def expected_wait(self, members: Collection[str]) -> ExpectedWait | None:
        """Of a new request like the last ones, on routable ``members``; ``None`` before any has reported."""
        with self._lock:
            return expected_wait(
                self._candidates.standings, members, self._entries, self._chooser, self._clock()
            )

    def state(self) -> dict[str, Any]:
        """For tests and debugging: ``faults``, and sequences running on each replica that has reported."""
        with self._lock:
            loads = {replica: self._standings[replica].load for replica in self._routes}
            running = {replica: load.running for replica, load in loads.items() if load is not None}
            return {"faults": self._faults, "running": running}

    def _list_candidates(self) -> None:
        self._candidates = Candidates(
            self._standings[replica] for replica in self._routes if replica not in self._suspects
        )

    def _settle(self, now: float) -> None:
        """What the next choice would have to do first, done while no request waits for it."""
        self._chooser.settle()
        for standing in self._stale:
            if standing.terms is None:
                self._chooser.refresh(standing)
        self._stale.clear()
        if self._index is not None:
            self._tried(self._index.expire, now)

    def _choose(self, standings: Sequence[Standing], wanted: Wanted, now: float) -> tuple[int, int]:
        """The place of the best, and the blocks that it holds; a defect must not fail requests."""
        try:
            held: Sequence[int]
            if wanted.keys and self._index is not None and self._chooser.policy is _PREFIX:
                self._index.expire(now)
                held = self._candidates.held(standings, self._index.longest(wanted.keys))
            else:
                held = [0] * len(standings)
            place = self._chooser.choose(standings, held, wanted, now)
            return place, held[place]
        except Exception:  # noqa: BLE001  (whatever is wrong with a choice, any replica can do the work)
            self._fault()
            return least_booked(standings, range(len(standings)), wanted._replace(keys=()), 0), 0

    def _guarded(self, replica: str, step: Callable[[], T]) -> T | None:
        """A replica about whose blocks the index may be wrong is routed to by its load alone."""
        try:
            return step()
        except Exception:  # noqa: BLE001  (as in _choose)
            self._fault()
            if self._index is not None:
                with contextlib.suppress(Exception):
                    self._index.remove(replica)
            return None

    def _tried(self, change: Callable[..., object], *arguments: object) -> None:
        """What the index does beside a choice; a defect is no request's fault."""
        try:
            change(*arguments)
        except Exception:  # noqa: BLE001  (as in _choose)
            self._fault()

    def _fault(self) -> None:
        self._faults += 1
        now = self._clock()
        if now - self._said_at >= 1.0:
            self._said_at = now
            logger.exception("choosing by prefixes failed (%d times so far); going by load alone", self._faults)

    def _book(self, attempt: int, wanted: Wanted, standing: Standing, blocks: int, now: float) -> Booking:
        route = standing.route
        assert route is not None  # or it would not be a candidate
        tokens, output, keys = wanted.tokens, wanted.output, wanted.keys
        cached = self._chooser.cached(wanted, blocks) if blocks else 0
        prefill = tokens - cached
        booking = Booking(wanted.request_id, attempt, route, prefill, output, cached)
        rows = wanted.sequences if wanted.sequences > 1 else 1
        kv = rows * tokens + int(rows * self._chooser.expected_output(wanted) / 2)
        entry = Entry(booking, standing, keys, rows, kv)
        self._entries[attempt] = self._unacknowledged[route][attempt] = entry
        standing.tokens += prefill + output
        standing.count += 1
        booked = standing.booked
        booked.prefill += prefill
        booked.rows += rows
        booked.kv += kv
        standing.terms = None
        self._stale.append(standing)
        if keys and self._index is not None and self._chooser.policy is _PREFIX:
            until = now + standing.claim_seconds()
            self._tried(self._index.speculate, standing.replica, keys, now, until, blocks)
        return booking

    def _release(self, attempt: int) -> bool:
        entry = self._entries.pop(attempt, None)
        if entry is None:
            return False
        booking, standing = entry.booking, entry.standing
        if not entry.prefilled:
            if entry.keys and self._index is not None:
                self._tried(self._index.withdraw, booking.route.replica, entry.keys)
            entry.release_prefill()
        if entry.acknowledged:
            standing.booked.seen_rows -= entry.rows
            standing.booked.seen_kv -= entry.kv
        else:
            self._unacknowledged[booking.route].pop(attempt)
            standing.booked.rows -= entry.rows
            standing.booked.kv -= entry.kv
        standing.tokens -= booking.decode
        standing.count -= 1
        standing.terms = None
        self._stale.append(standing)
        self._forget(booking.route.replica)
        return True

    def _forget(self, replica: str) -> None:
        standing = self._standings.get(replica)
        if standing is not None and not standing.count and replica not in self._routes:
            del self._standings[replica]
