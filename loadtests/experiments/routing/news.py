"""How news of a replica reaches an ingress: with the tokens of each step, or by themselves after a while."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator, Sequence

from loadtests.experiments.routing.arms import Flush, Router, report
from loadtests.experiments.routing.constants import CHANNEL_DELAY
from loadtests.experiments.routing.replica import Replica

Changes = tuple[int, list[int], list[int]]
"""Sequence, keys stored, keys removed."""


class Channel:
    """From all replicas to one ingress: what was sent, and when it gets there."""

    def __init__(self, number: int, router: Router) -> None:
        self.number = number
        self.router = router
        self.attempts = itertools.count(1)
        self._inbox: list[tuple[float, int, Flush | tuple[int, int]]] = []
        self._sent = itertools.count()

    def send(self, message: Flush | tuple[int, int], at: float) -> None:
        """Deliver a flush, or (attempt, tokens made; 0 for the first token), at a time."""
        heapq.heappush(self._inbox, (at, next(self._sent), message))

    def receive(self, now: float) -> None:
        """Take in all that has arrived."""
        inbox, router = self._inbox, self.router
        while inbox and inbox[0][0] <= now:
            at, _, message = heapq.heappop(inbox)
            if isinstance(message, Flush):
                router.flush(message, at)
            elif message[1]:
                router.end(*message)
            else:
                router.first_token(message[0])


class Feed:
    """A replica's end of its channels. What it has to say leaves with the next tokens for that ingress."""

    def __init__(self, replica: Replica, channels: Sequence[Channel]) -> None:
        self._replica = replica
        self._channels = channels
        self._sequence = 0
        self._unsent: dict[int, list[Changes]] = {}
        """By channel; one that is missing knows everything."""

    def step(self, now: float, told: Collection[int]) -> bool:
        """A step has ended that made tokens for the channels ``told``; whether news is left for others."""
        if not self._channels:
            return False  # whoever knows without news takes the changes out of the pool itself
        stored, removed = self._replica.pool.drain()
        changes = []
        if stored or removed:
            self._sequence += 1
            changes = [(self._sequence, stored, removed)]
        for channel in self._channels:
            self._unsent.setdefault(channel.number, []).extend(changes)
            if channel.number in told:
                self._send(channel, now)
        return bool(self._unsent)

    def flush(self, now: float) -> None:
        """Send what is left, to whom no tokens went."""
        for channel in self._channels:
            if channel.number in self._unsent:
                self._send(channel, now)

    def _send(self, channel: Channel, now: float) -> None:
        name, load = self._replica.name, report(self._replica, channel.number)
        for changes in self._unsent.pop(channel.number) or _nothing(self._sequence):
            channel.send(Flush(name, *changes, load), now + CHANNEL_DELAY)


def _nothing(sequence: int) -> Iterator[Changes]:
    yield sequence, [], []
