"""Connections of channels in memory: both real ends, joined by transports that deliver in order.

So tests of the ingress's side can run under a clock that jumps, and break what they like.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, cast

from app.channel.address import Address
from app.channel.channel_server import ChannelOwner, ChannelServer, EngineConnection
from app.channel.engine_channel import EngineChannel
from app.channel.ingress_connection import IngressConnection

_ports = itertools.count(1)
_servers: dict[int, LoopbackServer] = {}


class MemoryTransport:
    """One direction: what is written reaches ``receiver`` in a later turn, once ``gate`` is open."""

    def __init__(self, sender: asyncio.Protocol, receiver: asyncio.Protocol, gate: asyncio.Event) -> None:
        self._sender, self._receiver, self._gate = sender, receiver, gate
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._closing = False
        self.peer: MemoryTransport | None = None
        self._task = asyncio.get_running_loop().create_task(self._deliver())

    def write(self, data: bytes) -> None:
        assert not self._closing
        self._queue.put_nowait(data)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._queue.put_nowait(None)

    write_eof = close

    def abort(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()
        self._closing = False
        self.close()

    async def _deliver(self) -> None:
        while (data := await self._queue.get()) is not None:
            await self._gate.wait()
            self._receiver.data_received(data)
        self._sender.connection_lost(None)
        assert self.peer is not None
        if not self.peer._closing:
            self.peer._closing = True
            await self._gate.wait()
            self._receiver.connection_lost(None)


class LoopbackServer(ChannelServer):
    """Accepts in memory. While ``deaf``, connections are made, and nothing arrives on them."""

    def __init__(
        self, run: Callable[[str, int, bytes], Awaitable[dict[str, Any]]], gate: asyncio.Event
    ) -> None:
        super().__init__(run)
        self.port = next(_ports)
        self.deaf = self.closed = False
        self.gate = gate
        self.transports: list[MemoryTransport] = []
        _servers[self.port] = self

    def expect(self, channel: EngineChannel, owner: ChannelOwner) -> Address | None:
        key = f"{self.port:032x}{next(_ports):032x}"
        self._expected[key] = channel, owner
        return Address("loopback", self.port, key)

    def cut(self) -> None:
        """Break every connection, as an end of the network would."""
        for transport in self.transports:
            transport.abort()
        self.transports.clear()


async def possible_in_memory(host: str, port: int) -> bool:
    """Instead of ``IngressConnection.possible``."""
    await asyncio.sleep(0)
    return not _servers[port].closed


async def open_in_memory(
    address: Address, on_frame: Callable[[bytes], None], on_answer: Callable[[int, dict[str, Any]], None]
) -> IngressConnection:
    """Instead of ``IngressConnection.open``."""
    await asyncio.sleep(0)
    server = _servers[address.port]
    if server.closed:
        raise ConnectionRefusedError("nothing listens there")
    ours, theirs = IngressConnection(on_frame, on_answer), EngineConnection(server)
    always = asyncio.Event()
    if not server.deaf:
        always.set()
    there = MemoryTransport(ours, theirs, always)
    back = MemoryTransport(theirs, ours, server.gate)
    there.peer, back.peer = back, there
    server.transports += [there, back]
    theirs.connection_made(cast("asyncio.Transport", back))
    ours.connection_made(cast("asyncio.Transport", there))
    ours._write(bytes.fromhex(address.key))
    return ours
