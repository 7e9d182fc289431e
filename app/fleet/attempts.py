"""Runs a request: one attempt after another, each on one engine replica, until the request has ended."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.channel import wire
from app.channel.channel_set import ChannelSet
from app.channel.engine_calls import EngineCall, EngineCalls
from app.channel.failures import answer_of, cancel_call, describe, is_defect
from app.channel.kv_feed import KvFeed
from app.channel.silence import Silence
from app.fleet.faults import Faults
from app.fleet.generation import CannotStartError, GenerateRequest, UnavailableError
from app.fleet.in_flight import InFlightRequest
from app.fleet.resubmission_budget import ResubmissionBudget
from app.fleet.scale_from_zero import ReplicaWaiter
from app.routing.fleet import NotAcceptedError
from app.routing.ledger import NoRouteError, Route
from app.routing.policies import Policy
from app.routing.routing_meta import RoutingMeta
from engine.errors import ClientLimitError, InvalidRequestError

MAX_ATTEMPTS = 64
"""Maximum number of attempts at one request, including moves away from replicas that are being stopped."""

CHANNEL_END_S = 1.0
"""A call may fail this long before its replica's channel ends; only the channel shows that the replica died."""

INLINE_TOKENS = 16_384
"""Prompts up to this length are hashed on the event loop, in half a millisecond; longer ones in a thread."""

END_RECORD_S = 5.0
"""Maximum time between the answer of the call and the end record on the channel, whichever comes first.

It does not count while this process is behind: the record may wait unread.
"""

LOOK_S = 0.5
BEHIND_S = 0.1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttemptFailure:
    """Why an attempt ended early; ``fault`` if its replica failed, but not if the attempt never began."""

    reason: str
    fault: bool


class AttemptRunner:
    """One for each ingress process; runs on its event loop.

    ``handle`` is the Serve handle of the engine deployment. ``running`` maps the number of each current
    attempt, unique in this process, to its request. If ``serve_chooses`` the replicas, all attempts go through
    Serve; otherwise only those to replicas whose channel lacks a connection of its own.
    """

    def __init__(
        self,
        handle: Any,
        channels: ChannelSet,
        kv: KvFeed,
        waiter: ReplicaWaiter,
        faults: Faults,
        policy: Policy,
        unavailable_after_s: float,
        on_attempt_ended: Callable[[], None],
        num_live: Callable[[], int],
        why_unavailable: Callable[[], str] = lambda: "",
        serve_chooses: bool = False,
    ) -> None:
        self._serve_chooses = serve_chooses
        # The first options() makes Serve create the router, which reports its members.
        self._generate = handle.options(_by_reference=False).generate
        self._channels = channels
        self._ledger = channels.fleet.ledger
        self._kv = kv
        self._waiter = waiter
        self._faults = faults
        self._policy = policy
        self.unavailable_after_s = unavailable_after_s
        self._on_attempt_ended = on_attempt_ended
        self._why = why_unavailable
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}  # of attempts on channels' connections
        self._late_answers: set[asyncio.Future[Any]] = set()
        self.running: dict[int, InFlightRequest] = {}
        self.defects = 0
        """Calls that failed for reasons other than the connection."""
        self.budget = ResubmissionBudget(num_live, asyncio.get_running_loop().time)

    async def run(self, request: InFlightRequest) -> None:
        """Make attempts until the request needs no more."""
        for count in range(1, MAX_ATTEMPTS + 1):
            if request.satisfied:
                return
            if count == 1:
                self.budget.submitted()
            elif not request.moving:  # moves that are planned have a pace of their own
                await self.budget.take()
            if request.ended or not await self._wait_for_replica(request):
                return
            if not request.block_keys:  # not earlier: the first channel to open says how they are made
                request.block_keys = await self._block_keys(request.request)
            if request.satisfied:
                return
            failure = await self._attempt(request, next(self._numbers))
            if failure is not None and not request.ended:
                request.notes.failure = failure.reason
                if failure.fault:
                    self._faults.attempt_failed(request, failure.reason)
                logger.warning(
                    "request %s is retried after %d tokens: %s",
                    request.request.request_id,
                    request.num_tokens,
                    failure.reason,
                )
                await asyncio.sleep(min(0.05 * count, 1.0) * random.uniform(0.5, 1.5))
        request.fail(UnavailableError(f"no engine replica completed the request in {MAX_ATTEMPTS} attempts"))

    async def _wait_for_replica(self, request: InFlightRequest) -> bool:
        """Wait for a replica that can run the request; fails the request if none comes in time."""
        limit = self.unavailable_after_s

        def ready() -> bool:  # one that has ended must not ask for its turn again
            return request.ended or self._faults.may_run(request)

        if request.suspect:
            if await self._waiter.wait_until(ready, limit / 2):
                return not request.ended
            self._faults.clear(request)  # it cannot be alone
        if await self._waiter.wait_until(ready, limit):
            return not request.ended
        if self._waiter.failure:
            request.fail(CannotStartError(self._waiter.failure))
        elif request.model is not None:
            request.fail(
                UnavailableError(
                    f"no engine replica of the model that generated the first {request.num_tokens} tokens "
                    f"({request.fingerprint}) came back within {limit:g} s, and no other may continue them; "
                    "send the request again"
                )
            )
        elif self._channels.routable():
            request.fail(
                UnavailableError(
                    f"no engine replica that is large enough for this request came back within {limit:g} s"
                )
            )
        else:
            request.fail(UnavailableError(f"no engine replica became ready within {limit:g} s{self._why()}"))
        return False

    async def _block_keys(self, request: GenerateRequest) -> list[int]:
        """Keys of the prompt's full blocks; empty if unknown, or if the routing policy does not use them."""
        scheme = self._kv.keys
        if scheme is None or self._policy is not Policy.PREFIX:
            return []
        if len(request.token_ids) <= INLINE_TOKENS:
            return scheme.keys(request.token_ids, request.namespace)
        return await asyncio.to_thread(scheme.keys, request.token_ids, request.namespace)

    async def _attempt(self, request: InFlightRequest, number: int) -> AttemptFailure | None:
        """Make one attempt; ``None`` when the request has ended or was told to move."""
        request.begin_attempt(number, self._ledger.typical_output)
        self.running[number] = request
        self._ledger.expect(number)
        self._faults.begin(number, request)
        try:
            return await self._send(request, number)
        finally:
            del self.running[number]
            booking = self._ledger.booking(number)
            if booking is not None:
                request.notes.book(booking)
            request.notes.ended = time.monotonic()
            request.end_attempt(booking.route.replica if booking is not None else None)
            self._ledger.release(number, request.mean_output)
            self._faults.end(number, request)
            self._on_attempt_ended()

    def on_answer(self, attempt: int, outcome: dict[str, Any]) -> None:
        """An attempt that was submitted on a channel's connection has ended without a final record."""
        answer = self._answers.get(attempt)
        if answer is not None and not answer.done():
            answer.set_result(outcome)

    async def _send(self, request: InFlightRequest, number: int) -> AttemptFailure | None:
        """Choose a replica, unless Serve does, and send the attempt there."""
        meta = request.routing_meta(number)
        if self._serve_chooses:
            return await self._call(request, number, meta)
        try:
            route = self._channels.fleet.book(meta).route
        except NoRouteError as error:
            return AttemptFailure(str(error), fault=False)
        if self._channels.lacks_connection(route.replica):
            return await self._call(request, number, route)
        return await self._submit(request, number, route)

    async def _submit(self, request: InFlightRequest, number: int, route: Route) -> AttemptFailure | None:
        """Submit the attempt on the connection of its replica's channel, on which all else comes back."""
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        interrupted = asyncio.ensure_future(request.interrupt.wait())
        try:
            submission = wire.pack_submission(request.submission(number))
            self._channels.submit(route, number, submission)
            await asyncio.wait((answer, interrupted), return_when=asyncio.FIRST_COMPLETED)
            return await self._finish(request, answer.result(), interrupted) if answer.done() else None
        finally:
            interrupted.cancel()
            del self._answers[number]
            left = not request.complete and not answer.done()
            if left and (held := self._ledger.booking(number)) is not None:
                self._channels.forget(held.route, [number])  # it may have been resumed on another route

    async def _call(
        self, request: InFlightRequest, number: int, meta: Route | RoutingMeta
    ) -> AttemptFailure | None:
        """Call the engine through Serve, until the attempt ends. Its tokens come on the channel.

        ``meta`` tells the router where the attempt is booked, or what it needs to choose a replica itself.
        """
        payload = wire.pack_submission(request.submission(number))
        call = EngineCall(EngineCalls.generate, self._channels.cid, payload, meta=meta)
        try:
            response = call.send(self._generate)
        except Exception as error:  # noqa: BLE001  (like any failure of a call below)
            return self._failed(request, call, error)
        answer = asyncio.ensure_future(answer_of(response))
        interrupted = asyncio.ensure_future(request.interrupt.wait())
        try:
            await asyncio.wait((answer, interrupted), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return None
            try:
                outcome = answer.result()
            except (NoRouteError, NotAcceptedError) as error:
                return AttemptFailure(str(error), fault=False)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001
                # Any failure of a call moves the request on; Serve also raises CancelledError for calls that
                # nobody here has canceled.
                failed_at, failure = asyncio.get_running_loop().time(), self._failed(request, call, error)
                lost = await self._unless_lost(request, interrupted, failure)
                if lost is not None and request.resumed_at >= failed_at - CHANNEL_END_S:
                    # The connection broke, and the attempt goes on without its call. If the engine has ended it
                    # with the call, an end record says so.
                    await interrupted
                    return None
                return lost
            return await self._finish(request, outcome, interrupted)
        finally:
            interrupted.cancel()
            if request.complete:
                self._await_late_answer(answer, response)
            else:
                if not answer.done():
                    _cancel(answer, response)
                elif not answer.cancelled():
                    answer.exception()  # or the loop complains that nobody has looked at it
                # The engine does not abort a canceled call at once, since its connection may have broken.
                if (booking := self._ledger.booking(number)) is not None:
                    self._channels.forget(booking.route, [number])

    async def _unless_lost(
        self, request: InFlightRequest, interrupted: asyncio.Future[Any], failure: AttemptFailure
    ) -> AttemptFailure | None:
        """``None`` if the replica's channel ends, too: the attempt stays booked until then, and counts."""
        await asyncio.wait((interrupted,), timeout=CHANNEL_END_S)
        while request.held:
            await asyncio.wait((interrupted,), timeout=LOOK_S)
        return None if request.interrupt.is_set() else failure

    def _failed(self, request: InFlightRequest, call: EngineCall, error: BaseException) -> AttemptFailure:
        """A call failed; a defect is logged in full, since its one-line warning reads like a lost replica."""
        if is_defect(error, call):
            self.defects += 1
            logger.error("a call for request %s failed", request.request.request_id, exc_info=error)
        return AttemptFailure(describe(error), fault=True)

    async def _finish(
        self, request: InFlightRequest, outcome: dict[str, Any], interrupted: asyncio.Future[Any]
    ) -> AttemptFailure | None:
        """The attempt has been answered. If all went well, the end record on the channel ends the request."""
        if "invalid" in outcome:
            request.fail(InvalidRequestError(*outcome["invalid"]))
            return None
        if "limited" in outcome:
            request.fail(ClientLimitError(*outcome["limited"]))
            return None
        if "failed" in outcome:
            request.fail(UnavailableError(str(outcome["failed"])))
            return None
        if "defect" in outcome:
            self.defects += 1
            failure = AttemptFailure(f"the engine replica failed: {outcome['defect']}", fault=True)
            return await self._unless_lost(request, interrupted, failure)
        if "refused" in outcome:
            refused = AttemptFailure(str(outcome["refused"]), fault=False)
            return await self._unless_lost(request, interrupted, refused)
        if not request.ended:
            silence, looks = Silence(LOOK_S, asyncio.get_running_loop().time), itertools.count()
            while not interrupted.done():
                behind = self._channels.relay.lag_s > BEHIND_S
                if silence.look(next(looks) if behind else None) >= END_RECORD_S:
                    # Lost on its way, or dropped here: the engine has done its work.
                    return AttemptFailure("the end record did not arrive", fault=False)
                await asyncio.wait((interrupted,), timeout=LOOK_S)
        return None

    def _await_late_answer(self, answer: asyncio.Future[Any], response: Any) -> None:
        """Wait for the answer, which the end record has overtaken: canceling the call would cost more."""
        limit = asyncio.get_running_loop().call_later(END_RECORD_S, _cancel, answer, response)

        def done(answer: asyncio.Future[Any]) -> None:
            limit.cancel()
            self._late_answers.discard(answer)
            if not answer.cancelled() and answer.exception() is not None:
                logger.info("a call failed after its last token: %s", answer.exception())

        self._late_answers.add(answer)
        answer.add_done_callback(done)


def _cancel(answer: asyncio.Future[Any], response: Any) -> None:
    """The task first: awaiting a canceled response raises."""
    answer.cancel()
    cancel_call(response)
