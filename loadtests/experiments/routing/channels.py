"""How an ingress hears of replicas: with the tokens of each step, or, without any, after a while."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from app.routing.load import LoadReport
from engine.kv.kv_events import KvBatch
from loadtests.experiments.routing.arms import Router
from loadtests.experiments.routing.constants import CHANNEL_DELAY
from loadtests.experiments.simulated_replica import SimulatedReplica


class Channel:
    """From all replicas to one ingress: what was sent, and when it arrives."""

    def __init__(self, number: int, router: Router) -> None:
        self.number = number
        self.router = router
        self.attempts = itertools.count(1)
        self._inbox: list[tuple[float, int, Callable[[], object]]] = []
        self._sent = itertools.count()

    def send(self, now: float, message: Callable[[], object]) -> None:
        """Send something that, ``CHANNEL_DELAY`` after ``now``, calls the router."""
        heapq.heappush(self._inbox, (now + CHANNEL_DELAY, next(self._sent), message))

    def receive(self, now: float) -> None:
        """Take in all that has arrived."""
        while self._inbox and self._inbox[0][0] <= now:
            heapq.heappop(self._inbox)[2]()


@dataclass(slots=True)
class Feed:
    """A replica's end of its channels: KV events and load, which leave with the next tokens for an ingress."""

    replica: SimulatedReplica
    channels: Sequence[Channel]
    unsent: dict[int, list[KvBatch]] = field(default_factory=dict)
    """By channel; one that is missing knows everything."""

    def step(self, now: float, told: Collection[int]) -> bool:
        """A step has ended that made tokens for the channels ``told``; whether news is left for others."""
        events = self.replica.kv_events
        if not self.channels or events is None:
            return False  # an oracle takes the events from the replica itself
        batch = events.drain()
        load = self.replica.load() if told else None
        for channel in self.channels:
            unsent = self.unsent.setdefault(channel.number, [])
            if batch is not None:
                unsent.append(batch)
            if channel.number in told and load is not None:
                self._send(channel, load, now)
        return bool(self.unsent)

    def flush(self, now: float) -> None:
        """Send the rest to the ingresses for which there were no tokens."""
        load = self.replica.load()
        for channel in self.channels:
            if channel.number in self.unsent:
                self._send(channel, load, now)

    def _send(self, channel: Channel, load: LoadReport, now: float) -> None:
        load = replace(load, acknowledged=self.replica.acknowledged.get(channel.number, 0))
        batches = self.unsent.pop(channel.number)
        arrives = now + CHANNEL_DELAY
        channel.send(now, partial(channel.router.news, self.replica.name, batches, load, arrives))
