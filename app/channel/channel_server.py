"""The replica's end of the channels' TCP connections.

A channel opens through Serve, and its hello carries an address. From then on its frames, submissions and beats
take a connection of their own: Serve's layers cost several times what the rest of a message does.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

from app.autoscaling.fault_counter import FaultCounter
from app.channel.address import Address
from app.channel.engine_channel import EngineChannel
from app.channel.failures import describe
from app.channel.wire_messages import (
    KEY_BYTES,
    MessageKind,
    Messages,
    pack_answer,
    pack_message,
    unpack_beat,
    unpack_submit,
)
from engine.errors import QuireError

KEY_S = 5.0
"""A connection that has not sent its key by then is closed."""

MAX_STRANGERS = 256
"""Maximum number of connections that have not sent their key; beyond it, the oldest is closed."""

REFUSED_S = 60.0
"""Minimum time between two lines of the log about keys that are not expected."""

FLUSH_S = 5.0
"""Maximum time for the last frames of a channel that has ended to leave."""

logger = logging.getLogger(__name__)


class ChannelOwner(Protocol):
    """What a connection needs of ``ChannelHub``, which says what each does."""

    def beat(
        self,
        cid: str,
        epoch: int,
        acknowledged: int,
        stale: list[int],
        unwanted: list[tuple[int, int]],
        resync: bool,
    ) -> bool: ...

    def connected(self, channel: EngineChannel, connection: EngineConnection) -> None: ...

    def unanswered(self, cid: str, attempt: int) -> None: ...

    def close(self, channel: EngineChannel, reason: str) -> None: ...


class ChannelServer:
    """Accepts the connections of channels that are expected; runs on the replica's event loop.

    ``run`` runs an attempt: see ``run_attempt``, whose last arguments it takes.
    """

    def __init__(self, run: Callable[[str, int, bytes], Awaitable[dict[str, Any]]]) -> None:
        self.run = run
        self._server: asyncio.Server | None = None
        self._expected: dict[str, tuple[EngineChannel, ChannelOwner]] = {}
        self.faults = FaultCounter("a message of a channel could not be handled; its channel ends", logger)
        self._refused = 0
        self._next_line = 0.0  # about them
        self.strangers: dict[EngineConnection, None] = {}  # in their order

    async def start(self, host: str) -> None:
        """Listen on a free port of ``host``.

        Raises:
            OSError: this machine has no such address.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: EngineConnection(self), host, 0)

    def stop(self) -> None:
        """Accept no more connections; those that exist end with their channels."""
        if self._server is not None:
            self._server.close()

    def expect(self, channel: EngineChannel, owner: ChannelOwner) -> Address | None:
        """Where the ingress can connect, once; ``None`` if it cannot."""
        if self._server is None or not self._server.is_serving():
            return None
        host, port = self._server.sockets[0].getsockname()[:2]
        key = secrets.token_hex(KEY_BYTES)
        self._expected[key] = channel, owner
        return Address(host, port, key)

    def unexpect(self, address: Address) -> None:
        """The key is no longer valid."""
        self._expected.pop(address.key, None)

    def refused(self) -> None:
        """A connection has sent a key that is not expected; at most one line a minute says so."""
        self._refused += 1
        now = asyncio.get_running_loop().time()
        if now >= self._next_line:
            self._next_line = now + REFUSED_S
            logger.warning(
                "connections for channels sent keys that this replica does not expect, %d in all", self._refused
            )

    def admit(self, key: bytes) -> tuple[EngineChannel, ChannelOwner] | None:
        """The channel that a key names; the key is used up."""
        return self._expected.pop(key.hex(), None)


class EngineConnection(asyncio.Protocol):
    """One connection; it belongs to no channel until its key has arrived. Its end ends the channel."""

    def __init__(self, server: ChannelServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._key = b""
        self._messages = Messages()
        self._channel: EngineChannel | None = None
        self._owner: ChannelOwner | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._closing = False  # what still arrives is of no use

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an assertion: transports of uvloop, which Serve runs, have the methods but not the class.
        self._transport = cast("asyncio.Transport", transport)
        if len(self._server.strangers) >= MAX_STRANGERS:
            next(iter(self._server.strangers)).abort()
        self._server.strangers[self] = None
        self._deadline = asyncio.get_running_loop().call_later(KEY_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        try:
            if self._channel is None:
                data = self._identify(data)
            if self._channel is not None:
                for kind, body in self._messages.feed(data):
                    self._receive(self._channel, kind, body)
        except QuireError as error:
            self._fail(describe(error))
        except Exception as error:  # noqa: BLE001  (counted; what arrives ends no more than its channel)
            self._server.faults.add()
            self._fail(describe(error))

    def pause_writing(self) -> None:
        if self._channel is not None:
            self._channel.congested = True

    def resume_writing(self) -> None:
        if self._channel is not None:
            self._channel.congested = False
            self._channel.wake.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail("its connection ended" if error is None else describe(error))

    # ---- for the channel

    def send_frame(self, frame: bytes) -> None:
        """Send a frame; see ``EngineChannel.congested``."""
        self._send(pack_message(MessageKind.FRAME, frame))

    def close(self) -> None:
        """End the connection after all that has been sent, or after ``FLUSH_S``.

        The other end closes it: if this one did, what is on its way here would reset the connection, and the
        last frames could be lost.
        """
        transport = self._transport
        if transport is not None and not transport.is_closing() and not self._closing:
            self._closing = True
            transport.write_eof()
            asyncio.get_running_loop().call_later(FLUSH_S, transport.abort)

    def abort(self) -> None:
        """End the connection at once."""
        self._forget_stranger()
        if self._transport is not None:
            self._transport.abort()

    # ---- its parts

    def _identify(self, data: bytes) -> bytes:
        """Read the key; returns what follows it."""
        missing = KEY_BYTES - len(self._key)
        self._key += data[:missing]
        if len(self._key) < KEY_BYTES:
            return b""
        self._forget_stranger()
        admitted = self._server.admit(self._key)
        if admitted is None:
            self._server.refused()
            self.close()
            return b""
        self._channel, self._owner = admitted
        self._owner.connected(self._channel, self)
        return data[missing:]

    def _forget_stranger(self) -> None:
        self._server.strangers.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()

    def _receive(self, channel: EngineChannel, kind: int, body: bytes) -> None:
        assert self._owner is not None
        if kind == MessageKind.SUBMIT:
            attempt, submission = unpack_submit(body)
            # In an empty context: nothing here belongs to the request that opened the channel.
            task = asyncio.get_running_loop().create_task(
                self._run(channel, attempt, submission), context=contextvars.Context()
            )
            self._calls[attempt] = task
            task.add_done_callback(lambda task: self._ended(attempt, task))
        elif kind == MessageKind.BEAT:
            beat = unpack_beat(body)
            stale, unwanted = list(beat.stale), list(beat.unwanted)
            self._owner.beat(channel.cid, channel.epoch, beat.acknowledged, stale, unwanted, beat.resync)
            for attempt in stale:
                if attempt in self._calls:  # the engine may not have it yet
                    self._calls[attempt].cancel()
        else:
            raise QuireError(f"a message of unknown kind {kind}")

    async def _run(self, channel: EngineChannel, attempt: int, submission: bytes) -> None:
        """Run an attempt. If it ends without a final record, the ingress is told why."""
        answer = b""
        try:
            outcome = await self._server.run(channel.cid, channel.epoch, submission)
            if "generated" not in outcome:
                answer = pack_answer(attempt, outcome)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # its client has left
                raise
            answer = pack_answer(attempt, {"refused": describe(error)})
        except Exception as error:  # as through Serve, the ingress is told
            logger.exception("attempt %d of channel %s failed", attempt, channel.cid)
            answer = pack_answer(attempt, {"defect": describe(error)})
        if answer and not self._send(answer) and self._owner is not None:
            self._owner.unanswered(channel.cid, attempt)

    def _ended(self, attempt: int, task: asyncio.Task[None]) -> None:
        if self._calls.get(attempt) is task:
            del self._calls[attempt]

    def _send(self, message: bytes) -> bool:
        if self._closing or self._transport is None or self._transport.is_closing():
            return False
        self._transport.write(message)
        return True

    def _fail(self, reason: str) -> None:
        """End the connection and its channel; the channel's attempts may be resumed."""
        if self._channel is not None and self._owner is not None:
            self._owner.close(self._channel, reason)
        self.abort()
