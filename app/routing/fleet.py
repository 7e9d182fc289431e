"""What one process knows of an engine deployment's replicas; shared by its router and its engine client.

Serve pickles the router's module by value, so a registry inside that module would exist twice. All code uses
this one, through ``fleet.get_fleet(...)``.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection

from app.routing.kv_index import KvIndex
from app.routing.ledger import Booking, Ledger
from app.routing.requirement import Requirement
from app.routing.routing_meta import RoutingMeta
from app.routing.subset import Subset
from app.routing.timed_set import TimedSet
from engine.errors import QuireError

logger = logging.getLogger(__name__)


class ReplicaGoneError(QuireError):
    """A pinned call's replica cannot be reached any more."""


class NotAcceptedError(QuireError):
    """The chosen replica did not take the call: it was full, or it has just gone."""


class Fleet:
    """The members, as last reported by Serve's controller, and the ledger with its index of cached blocks.

    ``set_members`` runs on the router's thread. Listeners are called there, or in the thread that changes the
    subset, and must hand over to their own loop. They are called under the lock, so they see memberships in
    order, and they must not call back. ``known`` is the whole fleet; ``members`` is the subset that this
    ingress routes to, by default all.

    ``cordon`` names members that get no new requests for a while. ``likely_victims`` names those that
    autoscaling would stop next: they get no request that others could take nearly as well. ``routed`` counts
    the attempts for which each member was chosen.
    """

    def __init__(self) -> None:
        self.index = KvIndex()
        self.ledger = Ledger(index=self.index)
        self.cordon = TimedSet()
        self.likely_victims = TimedSet()
        self.routed: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._subset: Subset | None = None
        self._factor = 1  # the subset is this many times its usual size
        self._known: frozenset[str] = frozenset()
        self._members: frozenset[str] = frozenset()
        self._pinned: set[str] = set()
        self._listeners: list[Callable[[frozenset[str]], None]] = []

    @property
    def members(self) -> frozenset[str]:
        """Replicas to which this process may send new requests, open channel or not."""
        return self._members

    @property
    def known(self) -> frozenset[str]:
        """Replicas to which any process may send new requests: the whole fleet."""
        return self._known

    def set_members(self, members: frozenset[str]) -> None:
        """A new membership from the controller."""
        with self._lock:
            self._known = members
            for gone in self.routed.keys() - members:
                del self.routed[gone]
            self._choose()

    def set_subset(self, subset: Subset | None) -> None:
        """Route to this part of the fleet from now on; to all of it without one."""
        with self._lock:
            self._subset, self._factor = subset, 1
            self._choose()

    def widen_subset(self) -> bool:
        """Double the subset, if it is not the whole fleet; returns whether it is wider than usual."""
        with self._lock:
            if len(self._members) < len(self._known):
                self._factor *= 2
                self._choose()
                logger.info("widened the subset to %d of %d replicas", len(self._members), len(self._known))
            return self._factor > 1

    def narrow_subset(self) -> None:
        """Return to the subset's usual size."""
        with self._lock:
            if self._factor > 1:
                self._factor = 1
                self._choose()

    def _choose(self) -> None:
        self._members = self._known if self._subset is None else self._subset.of(self._known, self._factor)
        for listener in self._listeners:
            listener(self._members)

    def is_first(self, replica: str) -> bool:
        """Whether this process reports the replica's figures to the other ingresses: with subsets, one does."""
        return self._subset is not None and self._subset.is_first(replica)

    def eligible(self, names: Collection[str], requirement: Requirement | None = None) -> Collection[str]:
        """The ``names`` that may get a new request: members, and cordoned ones only if no other can run it."""
        if self._subset is not None:
            names = self._members.intersection(names)
        cordoned = self.cordon.names()
        if not cordoned:
            return names
        others = frozenset(names) - cordoned
        return others if self.ledger.routable(others, requirement) else names

    def book(self, meta: RoutingMeta, candidates: Collection[str] | None = None) -> Booking:
        """Let the ledger choose among ``candidates``, by default all, and book; cordoned ones come last.

        Raises:
            NoRouteError: see ``Ledger.book``.
        """
        members = self.eligible(self._known if candidates is None else candidates, meta.requirement)
        booking = self.ledger.book(meta, members, self.likely_victims.names())
        with self._lock:  # the router's thread may book, too
            self.routed[booking.route.replica] += 1
        return booking

    def listen(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Call ``listener`` with the members now and after each change."""
        with self._lock:
            self._listeners.append(listener)
            listener(self._members)

    def unlisten(self, listener: Callable[[frozenset[str]], None]) -> None:
        """Stop calling ``listener``."""
        with self._lock:
            self._listeners.remove(listener)

    def pin(self, replica: str, pinned: bool) -> None:
        """Keep a replica reachable for pinned calls after it has left the members, for its open channel."""
        with self._lock:
            if pinned:
                self._pinned.add(replica)
            else:
                self._pinned.discard(replica)

    def is_pinned(self, replica: str) -> bool:
        """Whether a channel to the replica is open."""
        with self._lock:
            return replica in self._pinned


_fleets: dict[str, Fleet] = {}
_fleets_lock = threading.Lock()


def get_fleet(app_name: str, deployment: str = "engine") -> Fleet:
    """The process's only fleet of that deployment."""
    with _fleets_lock:
        return _fleets.setdefault(f"{app_name}#{deployment}", Fleet())
