"""All channels of one engine replica, each a multiplexed stream to one ingress process.

Everything here runs on the replica's event loop; the engine's thread passes its outputs with one
``call_soon_threadsafe`` for each step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import asdict, replace
from typing import Any

from app.background import start_task
from app.channel import wire
from app.channel.address import Address
from app.channel.channel_server import ChannelServer
from app.channel.engine_channel import (
    MAX_WAITING_TOKENS,
    Attempt,
    EngineChannel,
    FrameConnection,
    UnknownEpochError,
)
from app.channel.resumption import carry_over
from app.channel.silence import Silence
from app.channel.suspects import SuspectPlace
from app.channel.wire_resume import Resumption, unpack_resumption
from app.channel.wire_sections import Figures
from app.routing.load import LoadReport
from engine.engine_thread import StepOutputs
from engine.errors import EngineDeadError
from engine.kv.kv_events import KvSnapshot
from engine.request import FinishReason, TokenDelta
from engine.scheduling.load_report import EngineLoad

LEASE_S = 5.0
"""A channel stops sending, and keeps its tokens, once its ingress has sent no beat for this long. A broken
channel then ends, with its attempts: without a connection and a beat, the ingress's process is gone.
"""

GRACE_S = 60.0
"""A channel ends, and its attempts with it, when its ingress has sent no beat for this long."""

KEEP_S = 15.0
"""While beats arrive, the attempts of a broken channel continue for this long: the ingress's next channel may
resume them."""

CALL_END_S = 0.05
"""A canceled call aborts its attempt after this time, unless its channel ends first: then the connection broke,
and the attempt may be resumed."""

UNREAD_S = 5.0
"""Waiting tokens are bounded (``MAX_WAITING_TOKENS``) once no frame has left for this long: before that, the
ingress may only be busy with a large one."""

UNREAD = "its tokens were not read in time"

ARRIVAL_S = 4.0
"""Maximum time from the hello to the connection that it offers; after that, frames leave through Serve."""

IDLE_FRAME_S = 1.0
"""An idle channel sends an empty frame this often."""

FIGURES_S = 1.0
"""The replica's figures are sent with the next frame after this long."""

logger = logging.getLogger(__name__)


class ChannelHub:
    """All channels of one engine replica.

    ``abort`` is called with an engine request id when an attempt ends before its end record. When a channel
    breaks, its attempts and unacknowledged frames are kept until no beat has arrived for ``lease_s``, and for
    ``KEEP_S`` at most: see ``app/channel/resumption.py``. ``snapshot`` returns the contents of the engine's
    prefix cache; without it, channels carry no KV events. New channels report ``load`` until the engine's first
    step. ``end_sequence`` is called with an engine request id and the number of a sequence that the ingress no
    longer needs. ``figures`` returns the replica's counters. ``server`` accepts the connections of channels;
    without it, frames leave through Serve. ``lost_leases`` is how often a channel was suspended.
    """

    def __init__(
        self,
        hello: wire.Hello,
        abort: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        lease_s: float = LEASE_S,
        grace_s: float = GRACE_S,
        idle_frame_s: float = IDLE_FRAME_S,
        snapshot: Callable[[], Awaitable[KvSnapshot | None]] | None = None,
        load: EngineLoad | None = None,
        figures: Callable[[], Figures | None] = lambda: None,
        end_sequence: Callable[[str, int], None] = lambda request_id, number: None,
        server: ChannelServer | None = None,
    ) -> None:
        self._end_sequence = end_sequence
        self._server = server
        self._figures = figures
        self.lost_leases = 0
        self._hello = hello
        self._abort = abort
        self._snapshot = snapshot if hello.keys is not None else None
        self._load = load
        self._clock = clock
        self._lease_s = lease_s
        self._grace_s = grace_s
        self._idle_frame_s = idle_frame_s
        self._channels: dict[str, EngineChannel] = {}
        self._kept: dict[str, EngineChannel] = {}  # by ingress, a channel that broke
        self._attempts: dict[str, Attempt] = {}
        self._refused: str = ""
        self._stalled_s = 0.0
        self._suspects = SuspectPlace()
        self._reported_suspects = 0

    async def stream(
        self, cid: str, epoch: int, resumption: bytes = b"", connects: bool = False
    ) -> AsyncIterator[bytes]:
        """Frames of one channel until it ends; ends an older epoch of the same ingress.

        If the ingress ``connects``, only the hello comes here, unless the connection does not arrive.
        ``resumption`` lists the attempts of the older epoch that are to continue; all others are aborted.

        Raises:
            UnknownEpochError: a newer epoch is open, no beat came, or the replica no longer accepts channels.
            WireError: the resumption is unreadable.
        """
        wanted = unpack_resumption(resumption) if resumption else None
        channel = self._open(cid, epoch)
        resumed = self._resume(channel, wanted)
        watcher = self._start(channel, "lease", self._watch(channel))
        address = self._expect(channel) if connects else None
        try:
            hello = replace(self._hello, resumed=tuple(resumed), address=address)
            yield wire.pack_hello(epoch, self._next(channel), hello)
            while not channel.closed:
                self._fetch_if_wanted(channel)
                await channel.wake.wait()
                if channel.closed:
                    break
                channel.wake.clear()
                if not channel.blocked:
                    sections = channel.take_sections()
                    if self._clock() >= channel.figures_due:
                        channel.figures_due = self._clock() + FIGURES_S
                        figures = self._figures()
                        if figures is not None:
                            sections.append(figures)
                    frame = channel.take_frame(self._next(channel), sections)
                    if not channel.send(frame):
                        yield frame
                    elif channel.wake.is_set():  # a snapshot has many frames; let others of the loop in between
                        await asyncio.sleep(0)
            # Tokens generated before the end still count: the ingress continues from there.
            if channel.unsent and not channel.blocked:
                frame = channel.take_frame(self._next(channel))
                if not channel.send(frame):
                    yield frame
            if channel.lapsed:
                raise UnknownEpochError(channel.closed)
        finally:
            watcher.cancel()
            self.close(channel, channel.closed or "the ingress closed it")
            if address is not None and self._server is not None:
                self._server.unexpect(address)
            if channel.connection is not None:
                channel.connection.close()

    def _expect(self, channel: EngineChannel) -> Address | None:
        """Wait with the channel's frames, for ``ARRIVAL_S`` at most, until its connection has arrived."""
        if self._server is None or (address := self._server.expect(channel, self)) is None:
            return None
        loop, server = asyncio.get_running_loop(), self._server
        channel.expects = loop.call_later(ARRIVAL_S, self._missed, channel, server, address)
        return address

    @staticmethod
    def _missed(channel: EngineChannel, server: ChannelServer, address: Address) -> None:
        """The connection has not arrived: the frames leave without it."""
        server.unexpect(address)
        channel.expects = None
        channel.wake.set()

    def unanswered(self, cid: str, attempt: int) -> None:
        """An attempt has ended before the engine had it, and its connection is gone: its channel says so."""
        channel = self._channels.get(cid)
        if channel is not None and attempt not in channel.attempts:
            channel.add(wire.Record(attempt, 0, [], end=FinishReason.ABORT, final=True))
            channel.wake.set()

    def connected(self, channel: EngineChannel, connection: FrameConnection) -> None:
        """The connection of a channel has arrived; it takes the channel's frames from now on."""
        if channel.expects is None or channel.closed:
            connection.close()
            return
        channel.expects.cancel()
        channel.expects = None
        channel.connection = connection
        channel.wake.set()

    def attach(self, cid: str, epoch: int, attempt: int, engine_id: str) -> Attempt:
        """Register an attempt before it is submitted to the engine.

        Raises:
            UnknownEpochError: the attempt's channel is not open.
        """
        channel = self._channels.get(cid)
        if channel is None or channel.epoch != epoch or channel.closed:
            raise UnknownEpochError(f"no open channel {cid} with epoch {epoch}")
        entry = Attempt(attempt, engine_id, channel, asyncio.get_running_loop().create_future())
        channel.attempts[attempt] = entry
        self._attempts[engine_id] = entry
        return entry

    def detach(self, attempt: Attempt) -> None:
        """Remove an attempt that the engine has not accepted."""
        self._attempts.pop(attempt.engine_id, None)
        attempt.channel.attempts.pop(attempt.number, None)
        attempt.done.cancel()  # nobody waits for it, and a suspect gives up its place
        self._report_suspects()

    def leave(self, attempt: Attempt) -> None:
        """The attempt's call has ended: abort it soon, unless it has ended or its channel ends, too."""
        channel = attempt.channel
        if self._attempts.get(attempt.engine_id) is attempt and not channel.closed:
            attempt.leaving = True
            asyncio.get_running_loop().call_later(CALL_END_S, self._abandon, attempt)

    def _abandon(self, attempt: Attempt) -> None:
        channel = attempt.channel
        if self._attempts.get(attempt.engine_id) is attempt and attempt.leaving:
            self._drop(attempt)
            # An ingress that has not given it up must not wait for it.
            channel.add(wire.Record(attempt.number, 0, [], end=FinishReason.ABORT, final=True))
            channel.wake.set()

    def on_step(self, outputs: StepOutputs) -> None:
        """Distribute the outputs of one engine step."""
        self._load = outputs.load
        self._stalled_s = 0.0
        for engine_id in outputs.added:
            attempt = self._attempts.get(engine_id)
            if attempt is not None:
                channel = attempt.channel
                channel.last_received = max(channel.last_received, attempt.number)
        for channel in self._channels.values():
            load = self._report(outputs.load, channel.last_received)
            channel.offer(load, outputs.kv if self._snapshot is not None else None)
        self.deliver(outputs.deltas)

    def on_stall(self, seconds: float) -> None:
        """Report that the engine has made no progress for this long; 0 while it does."""
        if seconds == self._stalled_s or self._load is None:
            return
        self._stalled_s = seconds
        for channel in self._channels.values():
            channel.offer(self._report(self._load, channel.last_received), None)

    def suspect(self, attempt: Attempt, proof_tokens: int) -> bool:
        """Treat an attempt as a suspect until it has made this many tokens; every ingress is told at once.

        Returns whether there is any other ingress than the attempt's own, which knows.

        Raises:
            OccupiedError: another one that may do so runs here.
        """
        self._suspects.take(attempt, proof_tokens)
        self._report_suspects()
        for channel in self._channels.values():
            channel.wake.set()
        return len(self._channels) > 1 or bool(self._kept)

    def _report_suspects(self) -> None:
        count = self._suspects.count
        if count == self._reported_suspects or self._load is None:
            return
        self._reported_suspects = count
        for channel in self._channels.values():
            channel.offer(self._report(self._load, channel.last_received), None)

    def deliver(self, deltas: Iterable[TokenDelta]) -> None:
        """Queue the tokens of one engine step."""
        self._bound_waiting()
        for delta in deltas:
            attempt = self._attempts.get(delta.request_id)
            if attempt is None:
                continue
            channel = attempt.channel
            attempt.generated += len(delta.token_ids)
            record = wire.Record(
                attempt.number,
                delta.index,
                list(delta.token_ids),
                delta.cached_tokens,
                delta.finish_reason,
                delta.error or "",
                delta.sequence,
                delta.final,
                None if delta.logprobs is None else list(delta.logprobs),
                delta.prompt_logprobs,
                delta.stats,
            )
            if attempt.leaving and not delta.final:
                attempt.withheld.append(record)
                continue
            if attempt.leaving:
                attempt.stay()
            channel.add(record)
            if delta.final:
                del self._attempts[delta.request_id]
                del channel.attempts[attempt.number]
                if not attempt.done.done():
                    attempt.done.set_result(attempt.generated)
            channel.wake.set()
        self._report_suspects()

    def _bound_waiting(self) -> None:
        """Where no frame leaves and too many tokens wait, end the attempts that have most of them.

        One step may bring as many, all at once, of a single request: they wait for the next frame only.
        """
        for channel in (*self._channels.values(), *self._kept.values()):
            if channel.waiting_tokens <= MAX_WAITING_TOKENS or self._clock() - channel.last_frame < UNREAD_S:
                continue
            for number in channel.by_waiting_tokens():
                if (attempt := channel.attempts.get(number)) is not None:
                    self._drop(attempt)
                else:
                    channel.drop_records(number)
                channel.add(wire.Record(number, 0, [], end=FinishReason.ABORT, message=UNREAD, final=True))
                logger.warning("attempt %d of %s ended: nobody reads its tokens", number, channel.cid)
                if channel.waiting_tokens <= MAX_WAITING_TOKENS:
                    break

    def beat(
        self,
        cid: str,
        epoch: int,
        acknowledged: int,
        stale: Iterable[int] = (),
        unwanted: Iterable[tuple[int, int]] = (),
        resync: bool = False,
        last: bool = False,
    ) -> bool:
        """Renew a lease; false if there is no such channel. After the ``last`` beat, nothing is kept.

        ``stale`` lists attempts that the ingress has given up or does not know. ``unwanted`` lists sequences
        that it no longer needs, by attempt and number. ``resync`` asks for a snapshot of the prefix cache
        because KV events were lost.
        """
        channel = self._channels.get(cid) or self._kept.get(cid)
        if channel is None or channel.epoch != epoch:
            return False
        if last:
            self._end(channel, "the ingress closed it")
            return True
        if channel.closed:
            if self._kept.get(cid) is channel:
                self._keep(channel)
            return False
        channel.beats += 1
        was_blocked = channel.blocked
        channel.suspended = False
        channel.acknowledge(acknowledged)
        if was_blocked and not channel.blocked:
            channel.wake.set()
        if resync:
            channel.kv.resend()
            channel.wake.set()
        for number in stale:
            if (attempt := channel.attempts.get(number)) is not None:
                self._drop(attempt)
        for number, sequence in unwanted:
            if (attempt := channel.attempts.get(number)) is not None:
                self._end_sequence(attempt.engine_id, sequence)
        return True

    def close(self, channel: EngineChannel, reason: str, keep: bool = True) -> None:
        """End a channel. Its attempts are kept for a while, or aborted if the ingress will not come back."""
        if not channel.closed:
            channel.closed = reason
            logger.info("channel %s epoch %d ended: %s", channel.cid, channel.epoch, reason)
        channel.wake.set()
        if self._channels.get(channel.cid) is not channel:
            return
        del self._channels[channel.cid]
        channel.stop()
        if not keep or self._refused:
            # Tokens generated before the end still count: those that can leave do.
            for attempt in list(channel.attempts.values()):
                self._drop(attempt, keep_unsent=True)
        elif channel.attempts or channel.unsent or channel.sent:
            for attempt in channel.attempts.values():
                attempt.stay()
            self._kept[channel.cid] = channel
            channel.kept_until = self._clock() + KEEP_S
            self._keep(channel)

    def _keep(self, channel: EngineChannel) -> None:
        """The ingress of a broken channel is alive: wait for its next beat, or for its next channel."""
        if channel.expiry is not None:
            channel.expiry.cancel()
        left = min(self._lease_s, channel.kept_until - self._clock())
        channel.expiry = asyncio.get_running_loop().call_later(max(left, 0.0), self._forget, channel.cid)

    def close_all(self, reason: str) -> None:
        """End every channel and refuse new ones."""
        self._refused = reason
        for channel in list(self._channels.values()):
            self.close(channel, reason)
        for cid in list(self._kept):
            self._forget(cid)

    @property
    def num_kept(self) -> int:
        """Attempts whose channel broke and that may be resumed."""
        return sum(len(channel.attempts) for channel in self._kept.values())

    def _end(self, channel: EngineChannel, reason: str) -> None:
        """End a channel, broken or not, and its attempts."""
        if self._kept.get(channel.cid) is channel:
            self._forget(channel.cid)
        else:
            self.close(channel, reason, keep=False)

    def _forget(self, cid: str) -> None:
        """Abort what is kept of a channel that broke."""
        channel = self._kept.pop(cid)
        channel.stop()
        for attempt in list(channel.attempts.values()):
            self._drop(attempt)
        channel.unsent.clear()
        channel.sent.clear()

    def _resume(self, channel: EngineChannel, resumption: Resumption | None) -> list[int]:
        """Take over the claimed attempts of the same ingress's previous channel, and abort the rest."""
        ended = self._kept.get(channel.cid)
        if ended is None:
            return []
        resumed: list[int] = []
        if resumption is not None and resumption.epoch == ended.epoch:
            resumed = carry_over(ended, channel, resumption.claims)
            channel.last_received = ended.last_received
        self._forget(channel.cid)
        if channel.unsent:
            channel.wake.set()
        return resumed

    def inspect(self) -> dict[str, dict[str, int]]:
        """For tests and debugging: the state of each channel."""
        return {
            channel.cid: {
                "epoch": channel.epoch,
                "attempts": len(channel.attempts),
                "unsent": len(channel.unsent),
                "frames": channel.sequence,
                "acknowledged": channel.acknowledged,
            }
            for channel in self._channels.values()
        }

    def _open(self, cid: str, epoch: int) -> EngineChannel:
        if self._refused:
            raise UnknownEpochError(f"this replica accepts no channels: {self._refused}")
        older = self._channels.get(cid) or self._kept.get(cid)
        if older is not None:
            if older.epoch >= epoch:
                raise UnknownEpochError(
                    f"channel {cid} is open with epoch {older.epoch}, not older than {epoch}"
                )
            self.close(older, f"epoch {epoch} replaced it")
        channel = EngineChannel(cid, epoch)
        if self._load is not None:
            channel.load = channel.last_load = self._report(self._load, 0)
            channel.wake.set()
        self._channels[cid] = channel
        logger.info("channel %s epoch %d opened", cid, epoch)
        return channel

    def _next(self, channel: EngineChannel) -> int:
        sequence = channel.sequence
        channel.sequence += 1
        channel.last_frame = self._clock()
        return sequence

    def _start(self, channel: EngineChannel, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a part of a channel; if it fails, the channel ends and its ingress opens the next one."""
        return start_task(f"{name} of channel {channel.cid}", work, lambda why: self.close(channel, why))

    def _fetch_if_wanted(self, channel: EngineChannel) -> None:
        if self._snapshot is None or not channel.kv.wanted or channel.blocked:
            return
        channel.kv.fetch()
        channel.fetch = self._start(channel, "snapshot", self._fetch(channel, self._snapshot))

    async def _fetch(
        self, channel: EngineChannel, snapshot: Callable[[], Awaitable[KvSnapshot | None]]
    ) -> None:
        try:
            contents = await snapshot()
        except EngineDeadError:
            return  # its channels are about to end
        if contents is not None:
            channel.kv.begin(contents)
            channel.wake.set()

    async def _watch(self, channel: EngineChannel) -> None:
        """Suspend the channel when its lease expires, and end it later; send an empty frame when one is due."""
        look_s = self._idle_frame_s / 4
        silence = Silence(look_s, self._clock)
        while not channel.closed:
            await asyncio.sleep(look_s)
            silent = silence.look(channel.beats)
            if silent > self._grace_s:
                channel.lapsed = True
                self._end(channel, f"no beat for {self._grace_s:g} s")
            elif silent > self._lease_s:
                if not channel.suspended:
                    self.lost_leases += 1
                    logger.info("channel %s epoch %d is suspended: no beat arrives", channel.cid, channel.epoch)
                channel.suspended = True
            elif self._clock() - channel.last_frame >= self._idle_frame_s and not channel.blocked:
                channel.wake.set()

    def _drop(self, attempt: Attempt, keep_unsent: bool = False) -> None:
        self._attempts.pop(attempt.engine_id, None)
        attempt.channel.attempts.pop(attempt.number, None)
        if not keep_unsent:
            attempt.channel.drop_records(attempt.number)
        self._abort(attempt.engine_id)
        if not attempt.done.done():
            attempt.done.set_exception(UnknownEpochError(attempt.channel.closed or "its ingress forgot it"))
            attempt.done.exception()  # its call may have been canceled: nobody is left to be told
        self._report_suspects()

    def _report(self, load: EngineLoad, acknowledged: int) -> LoadReport:
        return LoadReport(
            **asdict(load),
            num_blocks=self._hello.limits.num_blocks,
            block_size=self._hello.limits.block_size,
            acknowledged=acknowledged,
            stalled_s=self._stalled_s,
            suspects=self._reported_suspects,
        )
