"""The ingress's engine client: one request in, its tokens out, whatever happens to replicas meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Collection
from typing import Any

from app.api.generation import Delta, GenerateRequest, GenerationError, UnavailableError
from app.channel import wire
from app.channel.channel_set import ChannelSet
from app.channel.kv_feed import KvFeed
from app.channel.wire_kv import KvSection
from app.fleet.attempt import Attempts
from app.fleet.cache_reset import CacheReset, reset_prefix_caches
from app.fleet.hand_over import AFTER_S, HandOver
from app.fleet.live_request import LiveRequest
from app.fleet.wake import Wake
from app.routing.ledger import Ledger, Route
from app.routing.load import LoadReport
from app.routing.policies import Policy
from app.routing.predictions import Predictions
from engine.errors import QuireError
from engine.request import ModelLimits, validate

__all__ = ["Delta", "EngineClient", "GenerateRequest", "GenerationError", "UnavailableError"]

UNAVAILABLE_AFTER_S = 60.0
"""A request that finds no routable replica for this long ends with ``UnavailableError``."""

MAX_FAULTS = 4
"""Replicas that may fail under one request before it is taken for the cause."""

MAX_ATTEMPTS = 64
"""Of one request, moves away from replicas that were told to stop included."""

INLINE_TOKENS = 16_384
"""Block keys of shorter prompts are made at once, in half a millisecond; those of longer ones in a thread."""

STOPPING = "the server is shutting down; send the request again"

logger = logging.getLogger(__name__)


class EngineClient:
    """Owned by one ingress replica; every method runs on that replica's event loop.

    ``handle`` is the Serve handle of the engine deployment. One that ``sleeps`` may have no replica while there
    is no work, and is woken by requests.
    """

    def __init__(
        self,
        handle: Any,
        unavailable_after_s: float = UNAVAILABLE_AFTER_S,
        policy: Policy = Policy.PREFIX,
        sleeps: bool = False,
    ) -> None:
        self._handle = handle
        self._policy = policy
        self._predictions = Predictions()
        self._unavailable_after_s = unavailable_after_s
        self._attempts = itertools.count(1)
        self._live: dict[int, LiveRequest] = {}  # by attempt
        self._requests: set[LiveRequest] = set()
        self._limits: ModelLimits | None = None
        self._wake = Wake(handle if sleeps else None)
        self._started: ChannelSet | None = None
        self._stopped = False

    async def start(self) -> None:
        """Open channels to the replicas, now and as they come; awaits no replica. Later calls do nothing."""
        if self._started is None:
            self._started = ChannelSet(self._handle, self)
            self._kv = KvFeed(self._started.fleet.ledger, self._started.fleet.index)
            self._hand_over = HandOver(self._started.fleet, self.move_away)
            self._ledger.configure(self._policy)
            # The first options() makes Serve create the router, which reports its members.
            self._calls = Attempts(self._handle.options(_by_reference=False).generate, self._started.cid)

    async def stop(self) -> None:
        """Close every channel; live requests end with ``UnavailableError``, and so do later ones."""
        self._stopped = True
        if self._started is None:
            return
        for live in list(self._requests):
            live.fail(UnavailableError(STOPPING))
        self._hand_over.stop()
        self._wake.stop()
        await self._started.stop()

    def limits(self) -> ModelLimits | None:
        """Of the model, from the replicas' first frames; ``None`` until one has answered."""
        return self._limits

    async def first_limits(self, limit_s: float) -> ModelLimits | None:
        """As ``limits``, once a replica has answered, which wakes an engine deployment that sleeps.

        ``None`` if none does within ``limit_s`` seconds.
        """
        await self._wake.until(lambda: self._limits is not None, limit_s)
        return self._limits

    def status(self) -> dict[str, Any]:
        """For /health: known replicas, those with an open channel, live requests, each channel's state."""
        if self._started is None:
            return {"replicas": 0, "routable": 0, "live_requests": 0, "channels": {}, "booked_tokens": {}}
        return {
            "replicas": self._channels.num_members,
            "routable": len(self._ledger.routable()),
            "live_requests": len(self._requests),
            "channels": self._channels.states(),
            "booked_tokens": self._ledger.load(),
            "asleep": self._wake.asleep(self._channels.num_members),
            "cordoned": sorted(self._channels.fleet.cordon.names()),
            "cached_tokens": dataclasses.asdict(self._predictions.counters),
        }

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield each sequence's tokens in order, none lost or doubled; the last delta of all is ``final``.

        Closing or cancelling the generator aborts the request on the engine.

        Raises:
            InvalidRequestError: before the first delta; the request can never run.
            UnavailableError: no replica could take it (or go on with it) within the bounded time.
            GenerationError: the engine gave it up.
        """
        await self.start()
        if self._limits is not None:
            validate(request.token_ids, request.params, self._limits)
        if request.params.seed is None:
            # Drawn here, so that the draws go on the same on another replica.
            params = dataclasses.replace(request.params, seed=secrets.randbits(63))
            request = dataclasses.replace(request, params=params)
        live = LiveRequest(request)
        if self._stopped:
            raise UnavailableError(STOPPING)
        self._requests.add(live)
        # An empty context: Serve must not take the attempts for children of one HTTP request.
        live.driver = asyncio.get_running_loop().create_task(self._drive(live), context=contextvars.Context())
        live.driver.add_done_callback(live.driver_ended)
        try:
            while True:
                delta = await live.deltas.get()
                if isinstance(delta, QuireError):
                    raise delta
                yield delta
                if delta.final:
                    return
        finally:
            live.ended = True
            self._requests.discard(live)
            if not live.complete:
                live.driver.cancel()

    async def reset_prefix_cache(self) -> CacheReset:
        """Empty the prefix cache of every routable replica.

        Raises:
            UnavailableError: there is none.
        """
        await self.start()
        replicas = self._ledger.routable()
        if not replicas:
            raise UnavailableError("no engine replica has an open channel; try again later")
        return await reset_prefix_caches(self._handle, replicas)

    async def cordon(self, replicas: Collection[str], lasts_s: float, after_s: float = AFTER_S) -> None:
        """Send no new requests to exactly these replicas for ``lasts_s``, as long as others can take them.

        Requests that are there after ``after_s`` go on elsewhere. See ``HandOver.cordon``.

        Raises:
            ValueError: a time is negative or not a number.
        """
        await self.start()
        self._hand_over.cordon(replicas, lasts_s, after_s)

    def inspect(self) -> dict[str, Any]:
        """For tests and debugging: ``status``, and of each replica attempts routed, index and load."""
        if self._started is None:
            return self.status()
        return {
            **self.status(),
            "cid": self._channels.cid,
            "routed": dict(self._channels.fleet.routed),
            "index": self._kv.state(),
            "index_counters": self._kv.counters(),
            **self._ledger.state(),
        }

    async def _keys(self, request: GenerateRequest) -> list[int]:
        """Keys of the prompt's full blocks, made once; none until a replica has said how, or if nobody asks."""
        scheme = self._kv.keys
        if scheme is None or self._policy is not Policy.PREFIX:
            return []
        if len(request.token_ids) <= INLINE_TOKENS:
            return scheme.keys(request.token_ids, request.namespace)
        return await asyncio.to_thread(scheme.keys, request.token_ids, request.namespace)

    @property
    def _channels(self) -> ChannelSet:
        assert self._started is not None, "start() comes first"
        return self._started

    @property
    def _ledger(self) -> Ledger:
        return self._channels.fleet.ledger

    # ---- attempts

    async def _drive(self, live: LiveRequest) -> None:
        """Attempt after attempt until the request has ended."""
        for count in range(1, MAX_ATTEMPTS + 1):
            if live.ended or not await self._routable(live):
                return
            if not live.keys:  # only now: the first replica to open its channel says how they are made
                live.keys = await self._keys(live.request)
            if live.ended:
                return
            live.interrupt.clear()
            live.typical = self._ledger.typical_output
            attempt = next(self._attempts)
            self._live[attempt] = live
            self._ledger.expect(attempt)
            try:
                setback = await self._calls.run(live, attempt)
            finally:
                self._retire(live, attempt)
            if setback is not None and not live.ended:
                if setback.fault:
                    live.fault(setback.reason)
                logger.warning(
                    "request %s tries again after %d tokens: %s",
                    live.request.request_id,
                    live.num_tokens,
                    setback.reason,
                )
                # A call may fail a little before the channel of its replica does.
                await asyncio.sleep(min(0.05 * count, 1.0))
            if live.faults > MAX_FAULTS:
                live.fail(
                    GenerationError(f"given up after {live.faults} replicas failed; last: {live.last_fault}")
                )
        live.fail(UnavailableError(f"no engine replica took the request in {MAX_ATTEMPTS} attempts"))

    def _retire(self, live: LiveRequest, attempt: int) -> None:
        del self._live[attempt]
        booking = self._ledger.booking(attempt)
        if booking is not None:
            live.avoid = booking.route.replica
        self._ledger.release(attempt, live.num_tokens / live.request.params.n if live.complete else None)
        self._channels.settle()

    async def _routable(self, live: LiveRequest) -> bool:
        """Wait for a replica with an open channel; fails the request when none comes."""
        limit = self._unavailable_after_s
        if await self._wake.until(self._channels.routable, limit):
            return True
        live.fail(UnavailableError(f"no engine replica became ready within {limit:g} s"))
        return False

    # ---- channels

    def replicas_in_use(self) -> Collection[str]:
        """See ``ChannelOwner``."""
        bookings = (self._ledger.booking(attempt) for attempt, live in self._live.items() if not live.ended)
        return {booking.route.replica for booking in bookings if booking is not None}

    def move_away(self, replicas: Collection[str]) -> None:
        """See ``ChannelOwner``."""
        for attempt, live in self._live.items():
            booking = self._ledger.booking(attempt)
            if booking is not None and booking.route.replica in replicas:
                live.interrupt.set()

    def on_members(self) -> None:
        """See ``ChannelOwner``: a replica whose channel is open may have come back."""
        self._wake.changed()

    def on_open(self, route: Route, hello: wire.Hello) -> None:
        """See ``ChannelEvents``."""
        self._limits = hello.limits
        self._ledger.open(route)
        self._kv.open(route, hello)
        self._wake.changed()
        self._channels.settle()

    def on_kv(self, route: Route, section: KvSection) -> bool:
        """See ``ChannelEvents``."""
        return self._kv.update(route, section)

    def on_load(self, route: Route, load: LoadReport) -> None:
        """See ``ChannelEvents``."""
        self._ledger.report(route, load)

    def on_suspect(self, route: Route, suspected: bool) -> None:
        """See ``ChannelEvents``."""
        self._ledger.suspect(route.replica, suspected)
        if not suspected:
            self._wake.changed()
            self._channels.settle()

    def on_closed(self, route: Route, reason: str) -> None:
        """See ``ChannelEvents``: the attempts that were booked there go on elsewhere."""
        self._kv.close(route)
        for attempt in self._ledger.close(route):
            live = self._live.get(attempt)
            if live is not None and not live.ended:
                if self._channels.known(route.replica):
                    live.fault(reason)
                live.avoid = route.replica
                live.interrupt.set()
                logger.info("request %s moves on: %s", live.request.request_id, reason)
        self._channels.settle()

    def on_records(self, route: Route, records: list[wire.Record]) -> list[int]:
        """See ``ChannelEvents``."""
        stale = []
        for record in records:
            live = self._live.get(record.attempt)
            if live is None or live.ended or live.interrupt.is_set():
                if live is None and not record.final:
                    stale.append(record.attempt)
                continue
            booking = self._ledger.booking(record.attempt)
            if booking is None or booking.route != route:
                continue
            if not live.is_due(record):
                logger.error(
                    "request %s got tokens of sequence %d from offset %d where others were due",
                    live.request.request_id,
                    record.sequence,
                    record.index,
                )
                live.fault("tokens were lost on the way")
                live.interrupt.set()
                continue
            if record.token_ids:
                if live.cached_tokens is None and live.keys:
                    self._predictions.count(booking.cached, record.cached_tokens)
                self._ledger.first_token(record.attempt)
            live.accept(record)
        return stale
