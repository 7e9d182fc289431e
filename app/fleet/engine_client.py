"""The engine client: takes one request and yields its tokens, even if replicas fail or stop meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any

from app.background import Background
from app.channel import wire
from app.channel.channel_set import ChannelSet
from app.channel.channel_thread import ChannelThread, routers_loop
from app.channel.kv_feed import KvFeed
from app.channel.wire_resume import AttemptClaim
from app.channel.wire_sections import Figures, KvSection
from app.fleet.attempts import AttemptRunner
from app.fleet.block_map_call import ask_block_map
from app.fleet.cache_reset import CacheReset, reset_prefix_caches
from app.fleet.delta_queue import DeltaQueue
from app.fleet.drain import DRAIN_AFTER_S, Drainer
from app.fleet.faults import Faults
from app.fleet.fleet_limits import FleetLimits, LimitsRecord
from app.fleet.generation import CannotStartError, Delta, GenerateRequest, UnavailableError, ignored
from app.fleet.in_flight import InFlightRequest
from app.fleet.loop_pacer import LoopPacer
from app.fleet.scale_from_zero import ReplicaWaiter
from app.routing.ledger import Booking, Ledger, Route
from app.routing.load import LoadReport
from app.routing.policies import Policy
from app.routing.predictions import Predictions
from app.routing.prefix_flow import PrefixFlow
from engine.kv.block_groups import GroupBy
from engine.kv.block_map import BlockMap

OPENING_S = 1.0
"""How long the first replica's limits wait for those of others that are opening their channels."""

EVENTS_PER_TURN = 64
"""Streams that get their waiting tokens in one turn of the loop, which takes about 3 ms."""

STOPPING = "the server is shutting down; send the request again"

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Running:
    """What an engine client has once it has started."""

    channels: ChannelSet
    kv: KvFeed
    drainer: Drainer
    faults: Faults
    attempts: AttemptRunner


class EngineClient:
    """Owned by one ingress replica; every method runs on that replica's event loop.

    ``handle`` is the Serve handle of the engine deployment. A request that finds no routable replica for
    ``unavailable_after_s`` seconds ends with ``UnavailableError``. With ``to_zero``, the deployment may have no
    replica, and a request then starts one. ``tokenizer`` is the digest of the tokenizer that made the prompts;
    replicas with another one get no requests. If it is empty, any tokenizer is accepted. With
    ``channel_thread``, the channels run in a thread, Serve's if possible, so that a busy loop here does not
    silence them. Serve ends a replica that does not stop within ``drain_timeout_s`` seconds. ``background`` is
    told when a part fails. ``start_failure`` says why replicas cannot start; see ``ReplicaWaiter``. With
    ``serve_chooses``, a router of Serve chooses the replicas, and not ``policy``.
    """

    def __init__(
        self,
        handle: Any,
        unavailable_after_s: float,
        policy: Policy = Policy.PREFIX,
        to_zero: bool = False,
        tokenizer: str = "",
        channel_thread: bool = False,
        drain_timeout_s: float = 600.0,
        background: Background | None = None,
        start_failure: Callable[[], Awaitable[str]] | None = None,
        serve_chooses: bool = False,
    ) -> None:
        self._serve_chooses = serve_chooses
        self._handle = handle
        self._policy = policy
        self._predictions = Predictions()
        self.flow = PrefixFlow()
        self._unavailable_after_s = unavailable_after_s
        self._requests: set[InFlightRequest] = set()
        self._readers = LoopPacer(EVENTS_PER_TURN)
        self._tokenizer = tokenizer
        self._drain_timeout_s = drain_timeout_s
        self._foreign: set[str] = set()  # replicas of another tokenizer
        self.engine_figures: dict[str, tuple[float, ...]] = {}
        """The last of each replica with an open channel; see ``app/metrics/samples.py``."""
        self._defects = 0  # in calls for operators
        self._channel_faults = dict.fromkeys(("lost", "silent", "dead"), 0)
        self._limits = LimitsRecord(unavailable_after_s)
        self._background = background or Background()
        self._changes = 0  # of the ledger, at which those that wait have looked for a replica
        self._waiter = ReplicaWaiter(
            handle if to_zero else None,
            self._background,
            start_failure,
            lambda: self.status()["replicas"] > 0,
            self._widen,
        )
        self._running: _Running | None = None
        self._channel_thread = channel_thread
        self._thread: ChannelThread | None = None
        self._stopped = False

    def configure(self, unavailable_after_s: float) -> None:
        """Change the limit for requests that start to wait from now on; see the class."""
        self._unavailable_after_s = self._limits.expected_s = unavailable_after_s
        if self._running is not None:
            self._running.attempts.unavailable_after_s = unavailable_after_s

    async def start(self) -> None:
        """Open channels to all replicas, present and future; waits for none. Later calls do nothing."""
        if self._running is None:
            self._thread = ChannelThread(routers_loop()) if self._channel_thread else None
            if self._thread is not None:
                self._background.watch(self._thread.thread)
            loop = self._thread.loop if self._thread is not None else None
            channels = ChannelSet(self._handle, self, loop, self._background)
            kv = KvFeed(channels.fleet.ledger, channels.fleet.index)
            channels.fleet.ledger.configure(self._policy)
            faults = Faults(channels.fleet, self._waiter.notify)
            attempts = AttemptRunner(
                self._handle,
                channels,
                kv,
                self._waiter,
                faults,
                self._policy,
                self._unavailable_after_s,
                on_attempt_ended=self._settle,
                num_live=lambda: len(self._requests),
                why_unavailable=self._why_unavailable,
                serve_chooses=self._serve_chooses,
            )
            drainer = Drainer(channels.fleet, attempts.running, channels.leaving, self._background)
            self._running = _Running(channels, kv, drainer, faults, attempts)

    def end_requests(self) -> None:
        """Current and later requests end with ``UnavailableError``."""
        self._stopped = True
        for request in list(self._requests):
            request.fail(UnavailableError(STOPPING))

    async def stop(self) -> None:
        """Close every channel, after :meth:`end_requests`."""
        self.end_requests()
        if self._running is None:
            return
        self._parts.drainer.stop()
        self._waiter.stop()
        await self._running.channels.stop()
        if self._thread is not None:
            self._thread.stop()

    # ---- requests

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Yield each sequence's tokens in order, none lost or doubled; the last delta of all is ``final``.

        All tokens that have arrived since the last delta was read come in one delta. What ``request.take``
        takes is not yielded.

        Closing or canceling the generator aborts the request on the engine.

        Raises:
            InvalidRequestError: before the first delta; the request can never run.
            UnavailableError: no replica could run it, or continue it, within the time limit, or none can start.
            GenerationError: the engine failed to compute it.
            ClientLimitError: its sender has used up its current budget.
        """
        if self._stopped:
            raise UnavailableError(STOPPING)
        await self.start()
        limits = self.limits()
        if limits is not None and limits != request.checked:
            limits.validate(request.token_ids, request.params)
        if request.params.seed is None:
            # Drawn here, so that sampling continues the same on another replica.
            request = dataclasses.replace(request, params=request.params.with_seed(secrets.randbits(63)))
        in_flight = InFlightRequest(request, deltas=DeltaQueue(self._readers, request.take))
        request.text_end.on_sequence_end = partial(self._end_sequence, in_flight)
        self._requests.add(in_flight)
        # In an empty context: Serve must not take the attempts for children of one HTTP request.
        in_flight.runner = asyncio.get_running_loop().create_task(
            self._parts.attempts.run(in_flight), context=contextvars.Context()
        )
        in_flight.runner.add_done_callback(in_flight.on_runner_done)
        try:
            while True:
                delta = await in_flight.deltas.get()
                yield delta
                if delta.final:
                    return
        finally:
            # Or an ended request would refer to itself, and stay in memory until the garbage collector comes.
            request.text_end.on_sequence_end = ignored
            in_flight.ended = True
            self._requests.discard(in_flight)
            booking = self._ledger.booking(in_flight.attempt)
            if booking is not None:  # the attempt ends only after its caller has continued
                in_flight.notes.book(booking)
            self._parts.faults.forget(in_flight)
            if not in_flight.complete and in_flight.runner is not None:
                in_flight.runner.cancel()

    def _end_sequence(self, request: InFlightRequest, sequence: int) -> None:
        request.end_sequence(sequence)
        booking = self._ledger.booking(request.attempt)
        if booking is not None and request.attempt in self._parts.attempts.running:
            self._parts.channels.end_sequence(booking.route, request.attempt, sequence)

    # ---- the deployment

    def lag_s(self) -> float:
        """Seconds that what the channels have reported has waited for this process's loop."""
        unread = 0.0 if self._running is None else self._running.channels.relay.lag_s
        return max(unread, self._readers.lag_s)

    def limits(self) -> FleetLimits | None:
        """The replicas' limits, from their first frames; ``None`` until one has answered."""
        return self._limits.current()

    async def first_route(self) -> None:
        """Wait, without a limit, until a replica is routable."""
        await self.start()
        await self._waiter.changed_until(self._parts.channels.routable, None)

    async def first_limits(self, timeout_s: float) -> FleetLimits | None:
        """The limits once a replica has answered, which wakes a deployment that is scaled to zero.

        ``None`` if none answers within ``timeout_s`` seconds.

        Raises:
            CannotStartError: replicas fail to start.
        """
        await self._waiter.wait_until(lambda: self.limits() is not None, timeout_s)
        if self._running is not None and self._running.channels.opening():
            # Replicas open their channels together, and the next one may have a larger pool.
            await self._waiter.changed_until(lambda: not self._parts.channels.opening(), OPENING_S)
        if self.limits() is None and self._waiter.failure:
            raise CannotStartError(self._waiter.failure)
        return self.limits()

    async def reset_prefix_cache(self) -> CacheReset:
        """Empty the prefix cache of every replica that can be called.

        Raises:
            UnavailableError: there is none.
        """
        await self.start()
        replicas = self._reachable()
        if not replicas:
            raise UnavailableError("no engine replica has an open channel; try again later")
        return await reset_prefix_caches(self._handle, replicas, self._count_defect)

    async def block_map(self, replica: str, by: GroupBy = GroupBy.STATE, keys: Sequence[int] = ()) -> BlockMap:
        """What each KV block of ``replica`` holds; see ``EngineThread.block_map``.

        Raises:
            UnavailableError: it cannot be called, or does not answer.
        """
        await self.start()
        if replica not in self._reachable():
            raise UnavailableError(f"no channel to a replica {replica!r} is open")
        return await ask_block_map(self._handle, replica, by, keys, self._count_defect)

    def _count_defect(self) -> None:
        self._defects += 1

    def _reachable(self) -> set[str]:
        """Replicas that can be called: routable ones, and those outside of this ingress's subset."""
        return {*self._ledger.routable(), *self._elsewhere()}

    def _elsewhere(self) -> frozenset[str]:
        """Replicas to which only other ingresses have channels."""
        engines = self._parts.channels.fleet
        return engines.known - engines.members

    async def cordon(self, replicas: Collection[str], lasts_s: float, after_s: float = DRAIN_AFTER_S) -> None:
        """Send no new requests to exactly these replicas for ``lasts_s``, as long as others are routable.

        Requests that still run there after ``after_s`` move. See ``Drainer.cordon``.

        Raises:
            ValueError: a time is negative or not a number.
        """
        await self.start()
        self._parts.drainer.cordon(replicas, lasts_s, after_s)

    def status(self) -> dict[str, Any]:
        """For /health: known and routable replicas, live requests, the state of each channel."""
        if self._running is None:
            return {"replicas": 0, "routable": 0, "live_requests": 0, "channels": {}, "booked_tokens": {}}
        limits = self.limits()
        return {
            "replicas": self._parts.channels.num_members,
            "routable": len(self._ledger.routable()),
            "live_requests": len(self._requests),
            "channels": self._parts.channels.states(),
            "booked_tokens": self._ledger.load(),
            "pool_tokens": [] if limits is None else limits.pool_tokens,
            "asleep": self._waiter.asleep(self._parts.channels.num_members),
            "stalled": self._ledger.stalled(),
            "resubmitted": self._parts.attempts.budget.resubmitted,
            "resubmissions_waiting": self._parts.attempts.budget.waiting,
            "cordoned": sorted(self._parts.channels.fleet.cordon.names()),
            "foreign": sorted(self._foreign),
            "unconnected": self._running.channels.unconnected(),
            "elsewhere": sorted(self._elsewhere()),
            "cached_tokens": dataclasses.asdict(self._predictions.counters),
        }

    def inspect(self) -> dict[str, Any]:
        """For tests and debugging: ``status``; and for each replica routed attempts, index, and load."""
        if self._running is None:
            return self.status()
        return {
            **self.status(),
            "cid": self._parts.channels.cid,
            "event_faults": self._parts.channels.relay.faults,
            "call_faults": self._defects
            + self._parts.channels.defects
            + self._parts.attempts.defects
            + self._waiter.defects,
            "channel_faults": dict(self._channel_faults),
            "moved": self._parts.drainer.moved,
            "routed": dict(self._parts.channels.fleet.routed),
            "index": self._parts.kv.state(),
            "index_counters": self._parts.kv.counters(),
            **self._ledger.state(),
        }

    @property
    def _parts(self) -> _Running:
        assert self._running is not None, "call start() first"
        return self._running

    @property
    def _ledger(self) -> Ledger:
        return self._parts.channels.fleet.ledger

    # ---- ChannelOwner: what the channels report

    def on_open(self, route: Route, hello: wire.Hello, ended: Route | None) -> None:
        """See ``OwnerEvents``: a replica that does not understand this process's prompts is not routed to."""
        if self._tokenizer and hello.model.tokenizer != self._tokenizer:
            if route.replica not in self._foreign:
                logger.warning(
                    "replica %s gets no requests: its tokenizer or chat template differs from this ingress's",
                    route.replica,
                )
            self._foreign.add(route.replica)
        else:
            self._limits.opened(route.replica, hello.limits)
            if ended is None:
                self._ledger.open(route, hello.profile, hello.build)
            else:
                self._resume(ended, route, hello)
            self._parts.kv.open(route, hello)
        self._waiter.notify()
        self._settle()

    def on_broken(self, route: Route) -> list[AttemptClaim]:
        """See ``OwnerEvents``."""
        self._parts.kv.close(route)
        claims = []
        for number in self._ledger.hold(route):
            request = self._parts.attempts.running.get(number)
            if request is not None and not request.interrupt.is_set() and not request.ended:
                request.hold()
                claims.append(request.claim(number))
        return claims

    def _resume(self, ended: Route, route: Route, hello: wire.Hello) -> None:
        """Give the attempts that continue their new route; the others move, although their replica is alive."""
        running = self._parts.attempts.running
        resumed = frozenset(hello.resumed)
        lost = self._ledger.reopen(ended, route, hello.profile, hello.build, resumed)
        for number in lost:
            if (request := running.get(number)) is not None and not request.ended:
                request.lose_replica(route.replica, "its connection broke and could not be resumed")
        now, left = asyncio.get_running_loop().time(), []
        for number in resumed:
            request = running.get(number)
            if request is None:  # it ended meanwhile; one that is about to end cancels its call, or forgets
                left.append(number)
            else:
                request.resumed(now)
                for sequence in request.unwanted:  # the channel may have ended before it could say so
                    self._parts.channels.end_sequence(route, number, sequence)
        if left:
            self._parts.channels.forget(route, left)
        logger.info("channel to %s: %d attempts continue, %d are lost", route.replica, len(resumed), len(lost))

    def on_records(self, route: Route, records: list[wire.Record]) -> list[int]:
        """See ``OwnerEvents``."""
        stale = []
        running, ledger, faults = self._parts.attempts.running, self._ledger, self._parts.faults
        profile = ledger.profile(route.replica)
        model = None if profile is None else profile.model
        for record in records:
            request = running.get(record.attempt)
            if request is None or request.ended or request.interrupt.is_set():
                if request is None and not record.final:
                    stale.append(record.attempt)
                continue
            booking = ledger.booking(record.attempt)
            if booking is None or booking.route != route:
                continue
            if not request.continues(record):
                logger.error(
                    "request %s: tokens of sequence %d from offset %d do not continue the output",
                    request.request.request_id,
                    record.sequence,
                    record.index,
                )
                request.notes.failure = "tokens were lost on their way"
                request.interrupt.set()
                continue
            if record.token_ids:
                if request.cached_tokens is None and request.block_keys:
                    self._predictions.count(booking.cached, record.cached_tokens)
                before, after = record.index, record.index + len(record.token_ids)
                told = booking.prefilled and before.bit_length() == after.bit_length()
                if not told and len(request.outputs) == 1:
                    ledger.grow(record.attempt, before, after)
                if not booking.prefilled:
                    ledger.first_token(record.attempt)
                    request.notes.book(booking)
                    request.notes.first_token = time.monotonic()
                    self._count_flow(request, booking, record.cached_tokens)
            request.accept(record, model)
            faults.received(record.attempt, request)
        return stale

    def on_answer(self, route: Route, attempt: int, outcome: dict[str, Any]) -> None:
        """See ``OwnerEvents``."""
        self._parts.attempts.on_answer(attempt, outcome)

    def _count_flow(self, request: InFlightRequest, booking: Booking, cached: int) -> None:
        prompt, namespace, to = request.request.token_ids, request.request.namespace, booking.route.replica
        self.flow.add(request.block_keys, to, booking.reason, prompt, cached, namespace.tenant, namespace.salt)

    def on_kv(self, route: Route, section: KvSection) -> bool:
        """See ``OwnerEvents``."""
        return self._parts.kv.update(route, section)

    def on_load(self, route: Route, load: LoadReport) -> None:
        """See ``OwnerEvents``."""
        self._ledger.report(route, load)
        changes = self._ledger.changes
        if changes != self._changes:  # at few of the reports, of which there are up to one a step
            self._changes = changes
            self._waiter.notify()

    def on_figures(self, route: Route, figures: Figures) -> None:
        """See ``OwnerEvents``."""
        self.engine_figures[route.replica] = figures.numbers

    def on_suspect(self, route: Route, suspected: bool) -> None:
        """See ``OwnerEvents``."""
        self._channel_faults["silent"] += suspected
        self._ledger.suspect(route.replica, suspected)
        if not suspected:
            self._waiter.notify()
            self._settle()

    def on_closed(self, route: Route, reason: str, fault: bool) -> None:
        """See ``OwnerEvents``: the attempts that were booked there move."""
        self._parts.kv.close(route)
        self.engine_figures.pop(route.replica, None)
        self._channel_faults["lost"] += fault
        foreign = self._ledger.foreign_suspects(route.replica)
        running = self._parts.attempts.running
        attempts = [attempt for attempt in self._ledger.close(route) if attempt in running]
        lost = [running[attempt] for attempt in attempts if not running[attempt].ended]
        if fault and self._parts.channels.was_lost(route.replica, self._drain_timeout_s):
            self._channel_faults["dead"] += 1
            self._limits.died(route.replica)
            self._parts.faults.replica_died(lost, reason, foreign)
        for request in lost:
            request.lose_replica(route.replica, reason)
            logger.info("request %s moves: %s", request.request.request_id, reason)
        self._forget_absent()
        self._settle()

    def on_members(self) -> None:
        """See ``ChannelOwner``: a replica whose channel is open may have rejoined."""
        self._forget_absent()
        self._waiter.notify()
        self._settle()
        if self._parts.channels.leaving():
            self._parts.drainer.watch()

    def _forget_absent(self) -> None:
        present = self._parts.channels.present()
        self._limits.keep(present)
        self._foreign.intersection_update(present)

    def _widen(self, waited_s: float) -> None:
        if self._running is not None:
            self._running.channels.widen(waited_s)

    def _settle(self) -> None:
        """Close channels that are not needed any more and on which no request runs."""
        self._parts.channels.settle()

    def _why_unavailable(self) -> str:
        """What to add to the error of a request that found no replica."""
        count = len(self._foreign)
        have = "1 replica has" if count == 1 else f"{count} replicas have"
        return f"; {have} another tokenizer or chat template than this ingress" if count else ""
