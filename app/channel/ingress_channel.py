"""The ingress's end of one channel: opens it, reads frames, sends beats, reopens it.

Runs on the channels' event loop, in tasks with an empty context: a call made in the context of an HTTP request
is canceled with that request.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import enum
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from app.background import Background
from app.channel import wire
from app.channel.address import Address
from app.channel.channel_events import ChannelEvents
from app.channel.channel_thread import read_on_this_loop
from app.channel.engine_calls import EngineCall, EngineCalls
from app.channel.engine_channel import UnknownEpochError
from app.channel.failures import cancel_call, describe, is_defect
from app.channel.ingress_connection import IngressConnection
from app.channel.silence import Silence
from app.channel.wire_messages import Beat
from app.channel.wire_resume import AttemptClaim, pack_resumption
from app.channel.wire_sections import KvSection, SnapshotSlice
from app.routing.ledger import Route

BEAT_S = 1.0
LOOK_S = 0.5

SUSPECT_S = 3.0
"""A replica that has been silent for this long gets no new requests."""

DEAD_S = 10.0
"""A channel that has been silent for this long is closed; see ``Silence`` for what counts."""

RESUME_S = 5.0
"""After a channel has ended, maximum time for the replica to open one on which its attempts continue."""

RECONNECT_S, MAX_RECONNECT_S = 30.0, 600.0
"""After a connection has failed, channels do without for this long; the time doubles with each failure."""

END_S = 1.0
"""Of a channel's call and its connection, the other one ends within this time."""

CLAIMS_S = 5.0
"""Maximum time for the owner, which may be behind, to say which attempts are to continue."""

MAX_BACKOFF_S = 2.0
FRAMES_PER_BEAT = 128
"""Acknowledge at least every this many frames, to stay below the engine's limit of unacknowledged ones."""

RESYNC_S = 2.0
"""Minimum time between two requests for a snapshot of a replica's prefix cache."""

MAX_BEATS_IN_FLIGHT = 4
MAX_STALE = 64

logger = logging.getLogger(__name__)


class ChannelState(enum.Enum):
    """State of one channel; requests are routed only to open ones."""

    OPENING = "opening"
    OPEN = "open"
    SUSPECT = "suspect"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class _Broken:
    """A channel that has ended and whose attempts may continue on the next one; ``claims`` are these.

    ``beats`` continues until they do, or are lost; without it, the engine would assume that this process died.
    """

    route: Route
    reason: str
    fault: bool
    claims: asyncio.Future[Sequence[AttemptClaim]]
    beats: asyncio.Task[None]


class IngressChannel:
    """The channel to one replica, reopened with a new epoch until ``stop``.

    The first channel after one that broke resumes its attempts. If it does not open, they are lost.

    ``next_epoch`` counts for the whole process. ``loop`` is where the channel runs, by default the caller's;
    its methods may be called from any thread.
    """

    def __init__(
        self,
        handle: Any,
        cid: str,
        replica: str,
        next_epoch: Callable[[], int],
        events: ChannelEvents,
        clock: Callable[[], float] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        background: Background | None = None,
    ) -> None:
        self.replica = replica
        self.defects = 0
        """Errors for reasons other than the connection; each is in the log with its traceback."""
        self._background = background or Background()
        self.state = ChannelState.OPENING
        self.answered = False
        """Whether the replica has opened a channel, or the first try has failed: within ``DEAD_S``."""
        self._stream = handle.options(stream=True, _by_reference=False)
        self._unary = handle.options(_by_reference=False)
        self._cid = cid
        self._next_epoch = next_epoch
        self._events = events
        self._loop = loop or asyncio.get_running_loop()
        self._clock = clock or self._loop.time
        self._route: Route | None = None
        self._stopped = False
        self._generator: Any = None
        self._connects = True  # unless a connection has failed
        self._address: Address | None = None  # of the last one
        self._next_try = 0.0  # to connect again, and after how many seconds
        self._try_after = RECONNECT_S
        self._connection: IngressConnection | None = None
        self._epoch = 0
        self._broken: _Broken | None = None
        self._reset()
        self._beat_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._start, context=contextvars.Context())

    @property
    def connected(self) -> bool:
        """Whether attempts can be submitted here: the channel has a connection of its own."""
        return self._connection is not None

    @property
    def is_open(self) -> bool:
        """Whether the replica has opened the channel, and it has not ended."""
        return self.state in (ChannelState.OPEN, ChannelState.SUSPECT)

    def stop(self) -> None:
        """Close the channel for good; ``on_closed`` follows if it was open."""
        if not self._stopped:
            self._stopped = True
            self._loop.call_soon_threadsafe(self._cancel)

    async def stopped(self) -> None:
        """Wait until ``stop`` has taken effect."""
        await asyncio.wrap_future(self._ended)

    def submit(self, epoch: int, attempt: int, submission: bytes) -> None:
        """Submit an attempt while ``connected``; if it ends without a final record, ``on_answer`` follows."""
        self._loop.call_soon_threadsafe(self._submit, epoch, attempt, submission)

    def forget(self, epoch: int, attempts: list[int]) -> None:
        """Tell the engine at once to abort these attempts."""
        self._loop.call_soon_threadsafe(self._forget, epoch, attempts)

    def end_sequence(self, epoch: int, attempt: int, sequence: int) -> None:
        """Tell the engine at once to end one sequence of an attempt."""
        self._loop.call_soon_threadsafe(self._end_sequence, epoch, attempt, sequence)

    def resync(self, epoch: int) -> None:
        """Request a snapshot, because KV events of this epoch are missing."""
        self._loop.call_soon_threadsafe(self._want_snapshot, epoch)

    def fail(self, epoch: int, reason: str) -> None:
        """End this epoch and its attempts; the next one opens."""
        self._loop.call_soon_threadsafe(self._fail, epoch, reason, False)

    def resume(self, epoch: int, claims: Sequence[AttemptClaim]) -> None:
        """The attempts of this epoch, which has ended, that are to continue on the next one."""
        self._loop.call_soon_threadsafe(self._resume, epoch, claims)

    def _start(self) -> None:
        if self._stopped:
            self._ended.set_result(None)
            return
        self._task = self._background.start(f"channel to {self.replica}", self._run())
        self._task.add_done_callback(lambda _: self._ended.set_result(None))

    def _cancel(self) -> None:
        if self._task is None or self._task.done():
            return
        if self._route is not None:
            # Without it, the engine would keep attempts that may still run for a while.
            self._send_beat(self._epoch, self._handled, last=True)
        self._task.cancel()

    def _send_beat(self, epoch: int, acknowledged: int, last: bool = False) -> None:
        """Send a beat without waiting for the answer."""
        beat = EngineCall(
            EngineCalls.beat, self._cid, epoch, acknowledged, [], [], False, last, target=self.replica
        )
        try:
            beat.send(self._unary.beat)
        except Exception as error:
            if is_defect(error, beat):
                self.defects += 1
                logger.exception("a beat to %s failed", self.replica)

    async def _stay_alive(self, epoch: int) -> None:
        """Send the beats of a channel that has ended, instead of ``_watch``."""
        while True:
            self._send_beat(epoch, 0)
            await asyncio.sleep(BEAT_S)

    def _submit(self, epoch: int, attempt: int, submission: bytes) -> None:
        if epoch == self._epoch and self._connection is not None:
            self._connection.submit(attempt, submission)
        else:
            self._events.on_answer(Route(self.replica, epoch), attempt, {"refused": "its channel has ended"})

    def _forget(self, epoch: int, attempts: list[int]) -> None:
        if epoch == self._epoch:
            self._stale.update(attempts)
            self._beat_now.set()

    def _end_sequence(self, epoch: int, attempt: int, sequence: int) -> None:
        if epoch == self._epoch:
            self._unwanted.add((attempt, sequence))
            self._beat_now.set()

    def _want_snapshot(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._needs_snapshot = True
            if self._clock() >= self._next_resync:
                self._beat_now.set()

    def _fail(self, epoch: int, reason: str, resumable: bool) -> None:
        if epoch == self._epoch:
            self._end_reason, self._failed_here = reason, True
            if not resumable:
                self._resumable = False
            self._beat_now.set()

    def _resume(self, epoch: int, claims: Sequence[AttemptClaim]) -> None:
        broken = self._broken
        if broken is not None and broken.route.epoch == epoch and not broken.claims.done():
            broken.claims.set_result(claims)

    def _reset(self) -> None:
        """Begin to count for a new epoch."""
        self._frames = self._acknowledged = 0
        self._handled = 0  # frames
        self._silence = Silence(LOOK_S, self._clock)
        self._stale: set[int] = set()
        self._unwanted: set[tuple[int, int]] = set()  # sequences of attempts
        self._needs_snapshot = False  # KV events are missing
        self._next_resync = 0.0
        self._end_reason = ""
        self._failed_here = False
        self._resumable = True
        self._resumed = False
        self._beats = 0  # on the connection
        self._unknown = 0  # beats that the replica could not attribute

    async def _run(self) -> None:
        try:
            backoff = 0.0
            while not self._stopped:
                resumption = await self._resumption()
                if not resumption or self._resumed:  # a channel that breaks again may go on doing so
                    await asyncio.sleep(backoff)
                backoff = await self._open_and_read(resumption, backoff)
        finally:
            self._lose()

    async def _open_and_read(self, resumption: bytes, backoff: float) -> float:
        """One channel from its opening to its end; returns the seconds before the next one."""
        epoch = self._next_epoch()
        self._route = None
        reason, defect, fault = "the replica ended it", False, True
        call = EngineCall(
            EngineCalls.channel, self._cid, epoch, resumption, self._connects, target=self.replica
        )
        try:
            await self._read(epoch, call, RESUME_S if resumption else None)
        except asyncio.CancelledError:
            reason, fault = "closed here", False
            if self._stopped or (self._task is not None and self._task.cancelling()):
                raise
            reason = "Serve canceled it"
        except Exception as error:
            reason, defect = describe(error), is_defect(error, call)
            # No beat came, or frames were lost or unreadable on their way.
            fault = not isinstance(error, UnknownEpochError | wire.WireError) and not self._failed_here
            if defect:
                self.defects += 1
                logger.exception("the channel to %s failed", self.replica)
        finally:
            was_open = self._route is not None
            self._end(reason, fault, not defect)
        # A defect may end each channel right after it opens.
        return 0.1 if was_open and not defect else min(2 * max(backoff, 0.1), MAX_BACKOFF_S)

    async def _resumption(self) -> bytes:
        """The resumption for the next channel; empty if nothing is to continue there."""
        if self._broken is None:
            return b""
        broken = self._broken
        await asyncio.wait((broken.claims,), timeout=CLAIMS_S)
        if broken.claims.done() and (claims := broken.claims.result()):
            return pack_resumption(broken.route.epoch, claims)
        broken.claims.cancel()  # they would come too late
        self._lose()
        return b""

    def _lose(self) -> None:
        """The attempts of the channel that has ended are lost."""
        broken = self._take_broken()
        if broken is not None:
            self._tell_closed(broken.route, broken.reason, broken.fault)

    def _tell_closed(self, route: Route, reason: str, fault: bool) -> None:
        try:
            self._events.on_closed(route, reason, fault)
        except Exception:  # a defect must not keep the channel from being reopened
            self.defects += 1
            logger.exception("the end of the channel to %s failed", self.replica)

    def _take_broken(self) -> _Broken | None:
        broken, self._broken = self._broken, None
        if broken is not None:
            broken.beats.cancel()
        return broken

    def _end(self, reason: str, fault: bool, resumable: bool) -> None:
        """End the engine's generator: only ``cancel`` does, dropping the stream does not."""
        self._disconnect()
        if self._generator is not None:
            cancel_call(self._generator)
            self._generator = None
        self.state, self.answered = ChannelState.CLOSED, True
        route, self._route = self._route, None
        self._lose()  # one that has not opened resumes nothing
        if route is None:
            return
        logger.info("channel to %s epoch %d ended: %s", route.replica, route.epoch, reason)
        looping = self._resumed and self._frames == 1  # what has ended it comes again
        if not (resumable and self._resumable) or looping or self._stopped:
            self._tell_closed(route, reason, fault)
            return
        beats = self._loop.create_task(self._stay_alive(route.epoch))
        self._broken = _Broken(route, reason, fault, self._loop.create_future(), beats)
        try:
            self._events.on_broken(route)
        except Exception:  # a defect must not keep the channel from being reopened
            self.defects += 1
            logger.exception("the end of the channel to %s failed", self.replica)
            self._lose()

    async def _read(self, epoch: int, call: EngineCall, within_s: float | None) -> None:
        self.state = ChannelState.OPENING
        self._epoch = epoch
        self._reset()
        self._generator = call.send(self._stream.channel)
        loop = asyncio.get_running_loop()
        watch: asyncio.Task[None] | None = None
        connection: IngressConnection | None = None
        try:
            async with asyncio.timeout(within_s) as limit:
                watch = loop.create_task(self._watch(epoch, limit))
                async for data in self._generator:
                    frame = wire.unpack_frame(data)
                    if self._frames == 0:
                        read_on_this_loop(self._generator)
                        connection = await self._connect(epoch, frame)
                    self._on_frame(epoch, frame)
                    if self._frames == 1 and not self._end_reason:
                        limit.reschedule(None)
                    if connection is not None:
                        await self._until_both_end(connection)
                        return
        except TimeoutError:
            if not limit.expired():  # but the connection has, for example
                raise
            raise TimeoutError(self._end_reason or f"no answer for {RESUME_S:g} s") from None
        finally:
            if watch is not None:
                watch.cancel()

    async def _connect(self, epoch: int, frame: wire.Frame) -> IngressConnection | None:
        """Connect to where the hello says; all other frames then come there."""
        address = None if frame.hello is None else frame.hello.address
        if address is None:
            return None
        self._address = address
        try:
            connection = await IngressConnection.open(
                address,
                lambda data: self._on_frame(epoch, wire.unpack_frame(data)),
                lambda attempt, outcome: self._events.on_answer(Route(self.replica, epoch), attempt, outcome),
            )
        except OSError as error:
            self._keep_to_serve(f"connecting to {address.host}:{address.port} failed: {describe(error)}")
            if self._broken is None:
                raise ConnectionError("its connection failed") from error  # or the replica would wait for it
            return None
        self._connection = connection
        return connection

    def _keep_to_serve(self, why: str) -> None:
        """Open channels without connections for a while."""
        if not self._connects:
            return
        self._connects = False
        self._next_try = self._clock() + self._try_after
        logger.warning(
            "channels to %s take Ray Serve's connections for %g s, which cost more CPU time: %s",
            self.replica,
            self._try_after,
            why,
        )
        self._try_after = min(2 * self._try_after, MAX_RECONNECT_S)

    async def _try_again(self, epoch: int) -> None:
        """Replace a channel without a connection by one with it, if the replica can be reached now."""
        assert self._address is not None
        if not await IngressConnection.possible(self._address.host, self._address.port):
            self._try_after = min(2 * self._try_after, MAX_RECONNECT_S)
        elif epoch == self._epoch:
            self._connects = True
            self._fail(epoch, "to connect again", True)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _until_both_end(self, connection: IngressConnection) -> None:
        """Wait for the end of the channel's call and of its connection, where its frames arrive meanwhile.

        Raises:
            ConnectionError: the connection has ended, and the call has not.
        """
        call = asyncio.ensure_future(self._read_call())
        call.add_done_callback(_look_at)
        ends = call, connection.ended
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            # The last frames come on the connection, while the call knows why the channel has ended.
            await asyncio.wait(ends, timeout=END_S)
            error = connection.ended.exception() if connection.ended.done() else None
            if error is not None and not isinstance(error, OSError):
                raise error  # of what has arrived here
            if not call.done():
                raise ConnectionError("its connection ended")
            call.result()
        finally:
            call.cancel()
            if connection.answered:
                self._try_after = RECONNECT_S
            elif connection.ended.done():
                self._keep_to_serve("the replica closed a new connection")

    async def _read_call(self) -> None:
        """Wait for the end of the call.

        Raises:
            ConnectionError: a frame came there: the replica has no connection, whatever TCP says here.
        """
        async for _ in self._generator:
            self._keep_to_serve("the replica did not get a connection in time")
            raise ConnectionError("the replica does not use the channel's connection")

    def _on_frame(self, epoch: int, frame: wire.Frame) -> None:
        if frame.epoch != epoch or frame.sequence != self._frames:
            raise wire.WireError(
                f"received frame {frame.epoch}/{frame.sequence} instead of {epoch}/{self._frames}"
            )
        self._frames += 1
        if frame.hello is not None:
            self._route = Route(self.replica, epoch)
            self.state, self.answered = ChannelState.OPEN, True
            broken = self._take_broken()
            self._resumed = broken is not None
            self._events.on_open(self._route, frame.hello, None if broken is None else broken.route)
        elif self._route is None:
            raise wire.WireError("the first frame was not a hello")
        else:
            if frame.load is not None:
                self._events.on_load(self._route, frame.load)
            if frame.figures is not None:
                self._events.on_figures(self._route, frame.figures)
            for section in frame.kv:
                self._on_kv(self._route, section)
            if frame.records:
                self._stale.update(self._events.on_records(self._route, frame.records))
        self._events.on_frame_end(partial(self._on_handled, epoch))

    def _on_handled(self, epoch: int) -> None:
        """A frame has been handled; may run in the thread that handled it."""
        if epoch != self._epoch:
            return
        self._handled += 1
        if self._handled - self._acknowledged == FRAMES_PER_BEAT:
            self._loop.call_soon_threadsafe(self._beat_now.set)

    def _on_kv(self, route: Route, section: KvSection) -> None:
        if not self._events.on_kv(route, section):
            self._want_snapshot(route.epoch)
        elif isinstance(section, SnapshotSlice) and section.part + 1 == section.parts:
            self._needs_snapshot = False

    def _resync_now(self) -> bool:
        """Whether to request a snapshot with this beat."""
        now = self._clock()
        if not self._needs_snapshot or now < self._next_resync:
            return False
        self._next_resync = now + RESYNC_S
        logger.warning("KV events of replica %s are missing; requesting a snapshot", self.replica)
        return True

    async def _watch(self, epoch: int, limit: asyncio.Timeout) -> None:
        """Send a beat every second, and detect silence."""
        loop = asyncio.get_running_loop()
        pending: set[asyncio.Task[None]] = set()

        def start(work: Coroutine[Any, Any, None]) -> None:
            task = loop.create_task(work)
            pending.add(task)
            task.add_done_callback(pending.discard)

        next_beat = self._clock() + BEAT_S
        try:
            while not limit.expired():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):  # wait_for of Python 3.11 may lose a cancellation
                        await self._beat_now.wait()
                if limit.expired():
                    return
                silent = self._silence.look(self._frames)
                if silent >= DEAD_S:
                    self._end_reason = self._end_reason or f"no frame for {DEAD_S:g} s"
                if self._end_reason:
                    limit.reschedule(loop.time())
                    return
                self._suspect(silent > SUSPECT_S)
                due = self._beat_now.is_set() or self._clock() >= next_beat
                self._beat_now.clear()
                if due and self._route is not None and len(pending) < MAX_BEATS_IN_FLIGHT:
                    next_beat = self._clock() + BEAT_S
                    if self._connection is None:
                        start(self._beat(epoch))
                    else:
                        self._beat_connected(epoch, self._connection)
                if not self._connects and self._route is not None and self._clock() >= self._next_try:
                    self._next_try = self._clock() + self._try_after
                    start(self._try_again(epoch))
        except Exception as error:
            self.defects += 1
            logger.exception("the channel to %s failed", self.replica)
            self._end_reason, self._failed_here, self._resumable = describe(error), True, False
            limit.reschedule(loop.time())
        finally:
            for task in pending:
                task.cancel()

    def _suspect(self, silent: bool) -> None:
        if self._route is None:
            return
        if silent != (self.state is ChannelState.SUSPECT):
            self.state = ChannelState.SUSPECT if silent else ChannelState.OPEN
            logger.info("replica %s %s", self.replica, "is silent: busy or lost" if silent else "sends again")
            self._events.on_suspect(self._route, silent)

    def _next_beat(self) -> Beat:
        """What the next beat says; it is not said again."""
        # Not sorted: of a crowd, that would take longer with each beat.
        stale, unwanted = list(islice(self._stale, MAX_STALE)), list(islice(self._unwanted, MAX_STALE))
        self._stale.difference_update(stale)
        self._unwanted.difference_update(unwanted)
        self._acknowledged = self._handled
        return Beat(self._handled, stale, unwanted, self._resync_now())

    def _beat_connected(self, epoch: int, connection: IngressConnection) -> None:
        """Send a beat on the connection. It has no answer: if it is lost, so is the channel."""
        connection.beat(self._next_beat())
        if self._stale or self._unwanted:  # more than one beat takes
            self._beat_now.set()
        self._beats += 1
        if self._beats == 1:  # Ray's boards know a replica by the calls that Serve has counted
            self._send_beat(epoch, self._handled)

    async def _beat(self, epoch: int) -> None:
        said = self._next_beat()
        acknowledged, resync = said.acknowledged, said.resync
        stale, unwanted = list(said.stale), list(said.unwanted)
        arguments = self._cid, epoch, acknowledged, stale, unwanted, resync, False
        beat = EngineCall(EngineCalls.beat, *arguments, target=self.replica)
        response = None
        try:
            response = beat.send(self._unary.beat)
            async with asyncio.timeout(DEAD_S):
                known = await response
        except Exception as error:
            if is_defect(error, beat):
                self.defects += 1
                logger.exception("a beat to %s failed", self.replica)
            else:
                logger.info("a beat to %s failed: %s", self.replica, describe(error))
            if response is not None:
                cancel_call(response)
            if resync:
                self._next_resync = 0.0  # the next beat asks again
            if epoch == self._epoch:  # and says again what it may not have said
                self._stale.update(stale)
                self._unwanted.update(unwanted)
            return
        if not known:
            self._unknown += 1
            if self._unknown > 1:  # else the stream's own end, which says more, is on its way
                self._fail(epoch, "the replica does not know this channel", True)
        elif epoch == self._epoch and (self._stale or self._unwanted):
            self._beat_now.set()  # more than one beat takes, or too many were on their way


def _look_at(call: asyncio.Future[None]) -> None:
    """A canceled call ends with an error of Serve, and the loop logs errors that nobody has looked at."""
    if not call.cancelled():
        call.exception()
