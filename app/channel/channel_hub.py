"""All channels of one engine replica, each a multiplexed stream to one ingress process.

Everything here runs on the replica's event loop; the engine's thread passes its outputs with one
``call_soon_threadsafe`` for each step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from dataclasses import asdict
from typing import Any

from app.background import start_task
from app.channel import wire
from app.channel.engine_channel import Attempt, EngineChannel, UnknownEpochError
from app.channel.silence import Silence
from app.channel.wire_sections import Figures
from app.routing.load import LoadReport
from engine.engine_thread import StepOutputs
from engine.errors import EngineDeadError
from engine.kv.kv_events import KvSnapshot
from engine.request import TokenDelta
from engine.scheduling.load_report import EngineLoad

LEASE_S = 5.0
"""A channel sends nothing more, and keeps its tokens, once its ingress has sent no beat for this long."""

GRACE_S = 60.0
"""A channel ends, and its attempts with it, when its ingress has sent no beat for this long."""

IDLE_FRAME_S = 1.0
"""An idle channel sends an empty frame this often."""

FIGURES_S = 1.0
"""What the replica has counted goes with the next frame after this long."""

logger = logging.getLogger(__name__)


class ChannelHub:
    """All channels of one engine replica.

    ``abort`` is called with an engine request id when an attempt ends before its end record. ``snapshot``
    returns the contents of the engine's prefix cache; without it channels carry no KV events. ``load`` is what
    new channels report until the engine's first step.
    ``figures`` returns what the replica has counted. ``lost_leases`` is how often a channel was suspended.
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
    ) -> None:
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
        self._attempts: dict[str, Attempt] = {}
        self._refused: str = ""
        self._stalled_s = 0.0

    async def stream(self, cid: str, epoch: int) -> AsyncIterator[bytes]:
        """Frames of one channel until it ends; ends an older epoch of the same ingress.

        Raises:
            UnknownEpochError: a newer epoch is open, no beat came, or the replica no longer accepts channels.
        """
        channel = self._open(cid, epoch)
        watcher = self._start(channel, "lease", self._watch(channel))
        try:
            yield wire.pack_hello(epoch, self._next(channel), self._hello)
            while not channel.closed:
                self._fetch_if_wanted(channel)
                await channel.wake.wait()
                if channel.closed:
                    break
                channel.wake.clear()
                if not channel.blocked:
                    records, sections = channel.take_records(), channel.take_sections()
                    if self._clock() >= channel.figures_due:
                        channel.figures_due = self._clock() + FIGURES_S
                        figures = self._figures()
                        if figures is not None:
                            sections.append(figures)
                    yield wire.pack_records(epoch, self._next(channel), records, sections)
            # Tokens generated before the end still count: the ingress continues from there.
            if channel.unsent and not channel.blocked:
                yield wire.pack_records(epoch, self._next(channel), channel.take_records())
            if channel.lapsed:
                raise UnknownEpochError(channel.closed)
        finally:
            watcher.cancel()
            self.close(channel, channel.closed or "the ingress closed it")

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

    def detach(self, attempt: Attempt) -> bool:
        """Remove an attempt and its unsent tokens; true if it had not ended and must be aborted."""
        self._attempts.pop(attempt.engine_id, None)
        live = attempt.channel.attempts.pop(attempt.number, None) is attempt
        if live:
            attempt.channel.unsent.pop(attempt.number, None)
        return live

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

    def deliver(self, deltas: Iterable[TokenDelta]) -> None:
        """Queue the tokens of one engine step."""
        for delta in deltas:
            attempt = self._attempts.get(delta.request_id)
            if attempt is None:
                continue
            channel = attempt.channel
            unsent = channel.unsent.setdefault(attempt.number, {})
            record = unsent.get(delta.sequence)
            if record is None:
                record = wire.Record(
                    attempt.number, delta.index, list(delta.token_ids), sequence=delta.sequence
                )
                unsent[delta.sequence] = record
            else:
                record.token_ids.extend(delta.token_ids)
            record.cached_tokens = delta.cached_tokens
            if delta.logprobs is not None:
                record.logprobs = [*(record.logprobs or ()), *delta.logprobs]
            if delta.prompt_logprobs is not None:
                record.prompt_logprobs = delta.prompt_logprobs
            attempt.generated += len(delta.token_ids)
            if delta.finish_reason is not None:
                record.end = delta.finish_reason
                record.message = delta.error or ""
            if delta.final:
                record.final = True
                unsent[delta.sequence] = unsent.pop(
                    delta.sequence
                )  # it must come after records that waited longer
                del self._attempts[delta.request_id]
                del channel.attempts[attempt.number]
                if not attempt.done.done():
                    attempt.done.set_result(attempt.generated)
            channel.wake.set()

    def beat(
        self, cid: str, epoch: int, acknowledged: int, stale: Iterable[int] = (), resync: bool = False
    ) -> bool:
        """Renew a lease; false if there is no such channel.

        ``stale`` lists attempts that the ingress does not know; ``resync`` asks for a snapshot of the prefix
        cache because KV events were lost.
        """
        channel = self._channels.get(cid)
        if channel is None or channel.epoch != epoch or channel.closed:
            return False
        channel.beats += 1
        was_blocked = channel.blocked
        channel.suspended = False
        channel.acknowledged = max(channel.acknowledged, min(acknowledged, channel.sequence))
        if was_blocked and not channel.blocked:
            channel.wake.set()
        if resync:
            channel.kv.resend()
            channel.wake.set()
        for number in stale:
            attempt = channel.attempts.get(number)
            if attempt is not None:
                logger.warning("aborting attempt %s that its ingress no longer knows", attempt.engine_id)
                self._drop(attempt)
        return True

    def close(self, channel: EngineChannel, reason: str) -> None:
        """End a channel and abort its attempts."""
        if not channel.closed:
            channel.closed = reason
            logger.info("channel %s epoch %d ended: %s", channel.cid, channel.epoch, reason)
        channel.stop()
        if self._channels.get(channel.cid) is channel:
            del self._channels[channel.cid]
        for attempt in list(channel.attempts.values()):
            self._drop(attempt, keep_unsent=True)
        channel.wake.set()

    def close_all(self, reason: str) -> None:
        """End every channel and refuse new ones."""
        self._refused = reason
        for channel in list(self._channels.values()):
            self.close(channel, reason)

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
        older = self._channels.get(cid)
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
        """Run a part of a channel; the channel ends if it fails, and its ingress opens the next one."""
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
                self.close(channel, f"no beat for {self._grace_s:g} s")
            elif silent > self._lease_s:
                if not channel.suspended:
                    self.lost_leases += 1
                    logger.info("channel %s epoch %d is suspended: no beat comes", channel.cid, channel.epoch)
                channel.suspended = True
            elif self._clock() - channel.last_frame >= self._idle_frame_s and not channel.blocked:
                channel.wake.set()

    def _drop(self, attempt: Attempt, keep_unsent: bool = False) -> None:
        self._attempts.pop(attempt.engine_id, None)
        attempt.channel.attempts.pop(attempt.number, None)
        if not keep_unsent:
            attempt.channel.unsent.pop(attempt.number, None)
        self._abort(attempt.engine_id)
        if not attempt.done.done():
            attempt.done.set_exception(UnknownEpochError(attempt.channel.closed or "its ingress forgot it"))

    def _report(self, load: EngineLoad, acknowledged: int) -> LoadReport:
        return LoadReport(
            **asdict(load),
            num_blocks=self._hello.limits.num_blocks,
            block_size=self._hello.limits.block_size,
            acknowledged=acknowledged,
            stalled_s=self._stalled_s,
        )
