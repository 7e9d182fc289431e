"""A fleet as one ingress process routes to it: ledger, index and reports, without Ray and without engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from app.routing.cost import view_of
from app.routing.fleet_estimates import FleetEstimates
from app.routing.kv_index import KvIndex
from app.routing.ledger import Ledger
from app.routing.load import LoadReport
from app.routing.policies import Policy
from app.routing.replica_state import ReplicaState, ReplicaView, Route
from app.routing.routing_meta import RoutingMeta

BLOCK = 16
IDLE = LoadReport(
    waiting_tokens=0,
    running=0,
    kv_tokens=0,
    referenced=0,
    free=100_000,
    evictable=0,
    num_blocks=100_000,
    block_size=BLOCK,
    prefill_rate=10_000.0,
    step_seconds=0.02,
    waiting=0,
    num_blocked=0,
    num_lacking=0,
    max_running=0,
    first_end=0.0,
    half_ended=0.0,
    all_ended=0.0,
    acknowledged=0,
)


def replica(load: LoadReport | None = IDLE, name: str = "r0", at: float = 0.0, **totals: int) -> ReplicaState:
    """A replica that has reported ``load``, with so much booked there."""
    state = ReplicaState(name, route=Route(name, 1), load=load, reported_at=at)
    for total, value in totals.items():
        setattr(state, total, value)
    return state


def view(state: ReplicaState, fleet: FleetEstimates) -> ReplicaView:
    """As the ledger makes it."""
    assert state.load is not None
    return view_of(state, state.load, state.reported_at, fleet, fleet.outputs.tokens)


class Fleet:
    """A ledger, its index, and routes to replicas ``r0``, ``r1``, … that have reported to be idle and empty."""

    def __init__(
        self,
        size: int,
        policy: Policy = Policy.PREFIX,
        reported: bool = True,
        synced: bool = True,
        index: KvIndex | None = None,
    ) -> None:
        self.now = 1000.0  # as of a process that has not just started
        self.index = KvIndex() if index is None else index
        self.ledger = Ledger(policy, self.index, lambda: self.now)
        self.routes = [Route(f"r{place}", place + 1) for place in range(size)]
        self.attempts = 0
        for route in self.routes:
            self.open(route, reported, synced)

    def open(self, route: Route, reported: bool = True, synced: bool = True) -> None:
        self.ledger.open(route)
        if synced:
            self.index.snapshot(route.replica, route.epoch, 0, [])
        if reported:
            self.report(route)

    def report(self, route: Route, load: LoadReport = IDLE, seen: int | None = None) -> None:
        acknowledged = self.attempts if seen is None else seen
        assert self.ledger.report(route, replace(load, acknowledged=acknowledged))

    def store(self, place: int, keys: Sequence[int], sequence: int = 1) -> None:
        route = self.routes[place]
        assert self.index.apply(route.replica, route.epoch, sequence, keys, [], False)

    def send(self, tokens: int, keys: Sequence[int] = (), output: int = 100, **options: Any) -> str:
        """``options``: ``members`` and ``likely_victims`` as ``Ledger.book`` takes them, others of the meta."""
        self.attempts += 1
        self.ledger.expect(self.attempts)
        choice = {name: options.pop(name) for name in ("members", "likely_victims") if name in options}
        name = f"request-{self.attempts}"
        meta = RoutingMeta(name, self.attempts, tokens, output, keys=keys, **options)
        return self.ledger.book(meta, **choice).route.replica

    @property
    def cached(self) -> int:
        """Tokens that the last request finds, as the choice had it."""
        booking = self.ledger.booking(self.attempts)
        assert booking is not None
        return booking.cached

    def finish(self, attempt: int | None = None) -> None:
        attempt = self.attempts if attempt is None else attempt
        self.ledger.first_token(attempt)
        assert self.ledger.release(attempt, generated=100)


class Engines:
    """What several ingresses send to the same replicas: each computes its prompts one after another."""

    def __init__(self, *entries: Fleet) -> None:
        self.entries = entries
        self.queues: dict[str, list[tuple[Fleet, int, int]]] = {
            route.replica: [] for route in entries[0].routes
        }

    def take(self, entry: Fleet, replica: str, tokens: int) -> None:
        """The last request of ``entry``."""
        self.queues[replica].append((entry, entry.attempts, tokens))

    def waiting(self, replica: str) -> int:
        return sum(tokens for _, _, tokens in self.queues[replica])

    def work(self, tokens: int, **others: int) -> None:
        """Each replica computes so many tokens, and ends what is complete; then all ingresses hear of it."""
        for replica, queue in self.queues.items():
            left = others.get(replica, tokens)
            while queue and left:
                entry, attempt, rest = queue.pop(0)
                if rest > left:
                    queue.insert(0, (entry, attempt, rest - left))
                    break
                left -= rest
                entry.finish(attempt)
        for entry in self.entries:
            for route in entry.routes:
                entry.report(route, replace(IDLE, waiting_tokens=self.waiting(route.replica)))


def prefix(name: int, blocks: int) -> list[int]:
    return [name << 32 | block for block in range(blocks)]


def prompt(shared: Sequence[int], own: int, name: int) -> tuple[int, list[int]]:
    """Tokens and keys of a prompt that goes on from ``shared`` with ``own`` blocks, and a little more."""
    keys = [*shared, *prefix(name, own)]
    return len(keys) * BLOCK + 7, keys
