"""Moves requests away, a few at a time, from replicas that are leaving or have been cordoned for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from app.background import Background
from app.fleet.in_flight import InFlightRequest
from app.routing.fleet import Fleet

DRAIN_AFTER_S = 5.0
"""By default a request moves once its replica has been cordoned for this long; most end before that."""

LEAVE_AFTER_S = 0.5
"""It moves once its replica has left the members for this long: one that died may leave them before its channel
ends, and its requests must not pass for moved ones."""

CHECK_EVERY_S = 0.1

WORK_S = 0.25
"""Maximum prompt work of moving requests, in seconds of the other replicas; further requests wait."""

PATIENCE_S = 5.0
"""A request that has received no token for this long after its move no longer holds up others."""


@dataclass(slots=True, eq=False)
class Drainer:
    """Runs on the ingress's event loop. ``running`` has the request of each attempt.

    ``leaving`` returns, for each replica that has left the members, since when, by the loop's clock.

    A request moves only if a replica that neither leaves nor is cordoned can run it, and continue its output:
    neither cordon nor stop ends a request. All its tokens so far are computed again there, so requests move as
    fast as the other replicas can compute them, those with the fewest tokens first.
    """

    fleet: Fleet
    running: Mapping[int, InFlightRequest]
    leaving: Callable[[], Mapping[str, float]]
    background: Background = field(default_factory=Background)
    moved: int = 0
    """Requests so far."""
    _after_s: float = DRAIN_AFTER_S
    _moving: dict[InFlightRequest, tuple[int, float]] = field(default_factory=dict)  # tokens, since when
    _task: asyncio.Task[None] | None = None

    def cordon(self, replicas: Collection[str], lasts_s: float, after_s: float = DRAIN_AFTER_S) -> None:
        """Cordon exactly ``replicas``: no new requests for ``lasts_s``; running ones move after ``after_s``.

        Raises:
            ValueError: a time is negative or not a number.
        """
        if not after_s >= 0:
            raise ValueError(f"after_s is {after_s} but must be at least 0")
        self.fleet.cordon.set(replicas, lasts_s)
        self._after_s = after_s
        self.watch()

    def watch(self) -> None:
        """Look for requests to move, as long as any replica leaves or is cordoned."""
        if self._task is None or self._task.done():
            self._task = self.background.start("drain", self._watch())

    def stop(self) -> None:
        """Stop moving requests."""
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while self.leaving() or self.fleet.cordon.names():
            self.step()
            await asyncio.sleep(CHECK_EVERY_S)
        self._moving.clear()

    def step(self) -> None:
        """Move what may move now."""
        now = asyncio.get_running_loop().time()
        due = {replica for replica, since in self.leaving().items() if now - since >= LEAVE_AFTER_S}
        due |= self.fleet.cordon.longer_than(self._after_s)
        ledger = self.fleet.ledger
        # The channel of a silent replica takes care of its requests.
        due.intersection_update(ledger.routable())
        others = self.fleet.members - due - self.fleet.cordon.names()
        if not due or not ledger.routable(others):
            return
        self._moving = {
            request: (tokens, since)
            for request, (tokens, since) in self._moving.items()
            if not request.ended and request.moving and now - since < PATIENCE_S
        }
        work = sum(tokens for tokens, _ in self._moving.values())
        limit = WORK_S * ledger.prefill_rate(others, self.fleet.likely_victims.names())
        on_due = [self.running[attempt] for attempt in ledger.attempts_on(due) if attempt in self.running]
        for request in sorted(on_due, key=lambda request: request.context_tokens):
            if request.ended or request.interrupt.is_set():
                continue
            tokens = request.context_tokens
            if work and work + tokens > limit:
                return
            if ledger.routable(others, request.requirement()):
                request.move()
                self.moved += 1
                self._moving[request] = tokens, now
                work += tokens
