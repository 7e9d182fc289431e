"""The ingress's end of a channel's TCP connection; see ``channel_server.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from app.channel.address import Address
from app.channel.wire import WireError
from app.channel.wire_messages import Beat, MessageKind, Messages, pack_beat, pack_submit, unpack_answer

CONNECT_S = 3.0
"""Maximum time to connect; a lost packet of it is sent again after 1 s."""

FLUSH_S = 5.0
"""Maximum time for what has been sent to leave once the connection is closed."""


class IngressConnection(asyncio.Protocol):
    """Runs on the channels' event loop; made by :meth:`open`.

    ``on_frame`` gets each frame, ``on_answer`` the attempt and outcome of each answer. ``ended`` is done once
    the connection has ended, with the error if one of them raised one. ``answered``: a frame has arrived.
    """

    def __init__(
        self, on_frame: Callable[[bytes], None], on_answer: Callable[[int, dict[str, Any]], None]
    ) -> None:
        self._on_frame = on_frame
        self._on_answer = on_answer
        self._messages = Messages()
        self._transport: asyncio.Transport | None = None
        self.answered = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls,
        address: Address,
        on_frame: Callable[[bytes], None],
        on_answer: Callable[[int, dict[str, Any]], None],
    ) -> IngressConnection:
        """Connect to a replica.

        Raises:
            OSError: it cannot be reached there within ``CONNECT_S`` seconds.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: cls(on_frame, on_answer), address.host, address.port
                )
        except TimeoutError as error:
            raise TimeoutError(str(error) or f"no answer within {CONNECT_S:g} s") from None
        connection._write(bytes.fromhex(address.key))
        return connection

    @staticmethod
    async def possible(host: str, port: int) -> bool:
        """Whether a replica can be reached there within ``CONNECT_S`` seconds."""
        try:
            async with asyncio.timeout(CONNECT_S):
                _, writer = await asyncio.open_connection(host, port)
        except OSError:
            return False
        writer.transport.abort()
        return True

    def submit(self, attempt: int, submission: bytes) -> None:
        """Submit an attempt. If it ends without a final record, there will be an answer."""
        self._write(pack_submit(attempt, submission))

    def beat(self, beat: Beat) -> None:
        """Send a beat, which has no answer: if it is lost, so is the channel."""
        self._write(pack_beat(beat))

    def close(self) -> None:
        """Close the connection after all that has been sent, or after ``FLUSH_S``."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            asyncio.get_running_loop().call_later(FLUSH_S, self._transport.abort)

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an assertion: transports of uvloop, which Serve runs, have the methods but not the class.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for kind, body in self._messages.feed(data):
                if self.ended.done():
                    return
                if kind == MessageKind.FRAME:
                    self._on_frame(body)
                    self.answered = True
                elif kind == MessageKind.ANSWER:
                    self._on_answer(*unpack_answer(body))
                else:
                    raise WireError(f"a message of unknown kind {kind}")
        except Exception as error:  # noqa: BLE001  (whoever waits for the end raises it)
            self._end(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)
                self.ended.exception()  # nobody may be left to wait for it
        if self._transport is not None:
            self._transport.abort()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
