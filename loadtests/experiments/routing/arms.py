"""The ways to choose a replica that are compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum

from app.routing.kv_index import KvIndex
from app.routing.ledger import Ledger, Route
from app.routing.load import LoadReport
from app.routing.policies import Policy
from app.routing.routing_meta import RoutingMeta
from engine.kv.kv_events import KvBatch
from loadtests.experiments.routing.approximate import ApproximateIndex
from loadtests.experiments.routing.workloads import Job
from loadtests.experiments.simulated_replica import SimulatedReplica

EPOCH = 1
_FOREVER = 1e9
_UNBOUNDED = 1 << 40


class Arm(StrEnum):
    """Names as they stand in tables."""

    PREFIX = "prefix"
    ORACLE = "oracle"
    APPROXIMATE = "approximate tree"
    LEAST_TOKENS = "least tokens"
    COUNT = "count of requests"
    ROUND_ROBIN = "round robin"


class Router:
    """The routing of one ingress, which hears nothing unless it says so. Times are simulated seconds."""

    hears = False
    """Whether news of replicas is of any use to it."""

    def add(self, replica: SimulatedReplica) -> None:
        raise NotImplementedError

    def choose(self, job: Job, attempt: int, now: float) -> str:
        raise NotImplementedError

    def news(self, replica: str, batches: Sequence[KvBatch], load: LoadReport, now: float) -> None:
        """KV events and load of a replica."""

    def first_token(self, attempt: int) -> None:
        """A request has its first token."""

    def end(self, attempt: int, made: int) -> None:
        """A request has ended with ``made`` tokens."""


class LedgerRouter(Router):
    """The application's ledger with its cost, and an index of some kind."""

    def __init__(self, policy: Policy, index: KvIndex | ApproximateIndex | None) -> None:
        self._now = 0.0
        self._index = index
        self.hears = index is not None
        self.ledger = Ledger(policy, index, clock=lambda: self._now)

    def add(self, replica: SimulatedReplica) -> None:
        """Open its channel, with a snapshot of an empty cache."""
        self.ledger.open(Route(replica.name, EPOCH))
        if isinstance(self._index, KvIndex):
            self._index.snapshot(replica.name, EPOCH, 0, ())

    def choose(self, job: Job, attempt: int, now: float) -> str:
        self._now = now
        self.ledger.expect(attempt)
        tokens = len(job.prompt.tokens)
        meta = RoutingMeta(str(job.number), attempt, tokens, job.max_tokens, keys=job.prompt.keys)
        booking = self.ledger.book(meta)
        if self.ledger.faults:
            raise RuntimeError("the ledger failed to choose and fell back to the least booked replica")
        return booking.route.replica

    def news(self, replica: str, batches: Sequence[KvBatch], load: LoadReport, now: float) -> None:
        """Events first, as the channel has them."""
        self._now = now
        if isinstance(self._index, KvIndex):
            for batch in batches:
                if not self._index.apply(replica, EPOCH, batch.sequence, batch.stored, batch.removed):
                    raise RuntimeError(f"the index of a simulated router lost track of {replica}")
        self.ledger.report(Route(replica, EPOCH), load)

    def first_token(self, attempt: int) -> None:
        self.ledger.first_token(attempt)

    def end(self, attempt: int, made: int) -> None:
        self.ledger.release(attempt, made)


class LastingIndex(KvIndex):
    """The application's index, in which a block that was sent for is expected until it is withdrawn."""

    def claim(self, replica: str, keys: Sequence[int], now: float, deadline: float, blocks: int = 0) -> None:
        """The replica is about to hold these."""
        super().claim(replica, keys, now, now + _FOREVER, blocks)


class OracleRouter(LedgerRouter):
    """The same cost on perfect knowledge: every ingress asks this one, and it looks into the replicas."""

    def __init__(self) -> None:
        self._exact = LastingIndex(max_claimed=_UNBOUNDED)
        super().__init__(Policy.PREFIX, self._exact)
        self.hears = False
        self._replicas: list[SimulatedReplica] = []
        self._sent: dict[int, tuple[str, Job]] = {}

    def add(self, replica: SimulatedReplica) -> None:
        super().add(replica)
        self._replicas.append(replica)

    def choose(self, job: Job, attempt: int, now: float) -> str:
        for replica in self._replicas:
            assert replica.kv_events is not None
            batch = replica.kv_events.drain()
            self.news(replica.name, [] if batch is None else [batch], replica.load(), now)
        name = super().choose(job, attempt, now)
        self._sent[attempt] = (name, job)
        return name

    def first_token(self, attempt: int) -> None:
        """The blocks of its prompt are there."""
        super().first_token(attempt)
        name, job = self._sent.pop(attempt)
        self._exact.withdraw(name, job.prompt.keys)


class CountRouter(Router):
    """The less busy of two replicas drawn at random, by the number of their requests at this moment.

    Requests on their way there count, too: a burst is not sent to one replica.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._replicas: dict[str, int] = {}
        self._booked: dict[int, str] = {}

    def add(self, replica: SimulatedReplica) -> None:
        self._replicas[replica.name] = 0

    def choose(self, job: Job, attempt: int, now: float) -> str:
        names = list(self._replicas)
        drawn = self._random.sample(names, min(2, len(names)))
        name = min(drawn, key=lambda name: self._replicas[name])
        self._replicas[name] += 1
        self._booked[attempt] = name
        return name

    def end(self, attempt: int, made: int) -> None:
        self._replicas[self._booked.pop(attempt)] -= 1


def make_routers(arm: Arm, ingresses: int, blocks: int, seed: int) -> list[Router]:
    """One for each ingress; routers that know everything are one and the same."""
    if arm is Arm.ORACLE:
        return [OracleRouter()] * ingresses
    if arm is Arm.COUNT:
        return [CountRouter(seed)] * ingresses
    if arm is Arm.PREFIX:
        return [LedgerRouter(Policy.PREFIX, KvIndex()) for _ in range(ingresses)]
    if arm is Arm.APPROXIMATE:
        return [LedgerRouter(Policy.PREFIX, ApproximateIndex(blocks)) for _ in range(ingresses)]
    policy = Policy.LEAST_TOKENS if arm is Arm.LEAST_TOKENS else Policy.ROUND_ROBIN
    return [LedgerRouter(policy, None) for _ in range(ingresses)]
