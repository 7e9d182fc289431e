"""Connections of channels over real sockets: keys, strangers, frames, answers, ends."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeAlias

import pytest
import uvloop
from loopback import LIMITS

from app.channel import channel_server, ingress_connection, wire
from app.channel.address import Address
from app.channel.channel_hub import ChannelHub
from app.channel.channel_server import ChannelServer
from app.channel.ingress_connection import IngressConnection
from app.channel.wire_messages import KEY_BYTES, Beat, MessageKind, pack_message
from engine.request import FinishReason, TokenDelta

HOST = "127.0.0.1"

Run: TypeAlias = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


class Replica:
    """The replica's end of one channel, whose call is read here."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, int, bytes]] = []
        self.outcome: Callable[[], Any] = lambda: {"generated": 1}
        self.aborted: list[str] = []
        self.server = ChannelServer(self.run)
        self.hub = ChannelHub(wire.Hello(LIMITS), self.aborted.append, server=self.server)
        self.call: list[wire.Frame] = []  # frames that came through Serve
        self.closed = asyncio.Event()

    async def run(self, cid: str, epoch: int, payload: bytes) -> dict[str, Any]:
        self.runs.append((cid, epoch, payload))
        outcome: dict[str, Any] = self.outcome()
        return outcome

    async def open(self) -> Address:
        hello = asyncio.get_running_loop().create_future()

        async def read() -> None:
            async for data in self.hub.stream("ingress", 1, connects=True):
                frame = wire.unpack_frame(data)
                self.call.append(frame)
                if frame.hello is not None:
                    hello.set_result(frame.hello.address)
            self.closed.set()

        self.reader = asyncio.ensure_future(read())
        address: Address = await hello
        return address

    def token(self, attempt: int, index: int = 0, end: FinishReason | None = None) -> None:
        self.hub.deliver([TokenDelta(f"e{attempt}", index, (7,), end, final=end is not None)])


class Ingress:
    """The ingress's end."""

    def __init__(self) -> None:
        self.frames: list[wire.Frame] = []
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.defect: Exception | None = None

    async def connect(self, address: Address) -> IngressConnection:
        return await IngressConnection.open(address, self.on_frame, lambda *answer: self.answers.append(answer))

    def on_frame(self, data: bytes) -> None:
        if self.defect is not None:
            raise self.defect
        self.frames.append(wire.unpack_frame(data))

    @property
    def tokens(self) -> list[int]:
        return [record.index for frame in self.frames for record in frame.records]


@contextlib.asynccontextmanager
async def replica() -> AsyncIterator[tuple[Replica, Address]]:
    replica = Replica()
    await replica.server.start(HOST)
    try:
        yield replica, await replica.open()
    finally:
        replica.hub.close_all("the test ends")
        replica.server.stop()
        await replica.reader


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a test on a loop of the tests' kind, and of the kind that Serve runs."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(test())

    return run


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  (the condition spans both ends)
            await asyncio.sleep(0.001)


async def connection_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 60) == b""
    except ConnectionError:
        return True


def test_frames_submissions_beats_and_answers_take_the_connection(run: Run) -> None:
    async def test() -> None:
        async with replica() as (there, address):
            here = Ingress()
            connection = await here.connect(address)
            there.hub.attach("ingress", 1, 5, "e5")
            there.token(5)
            await until(lambda: here.tokens == [0])
            assert [frame.sequence for frame in here.frames] == list(range(1, len(here.frames) + 1))
            connection.submit(6, b"payload")
            await until(lambda: bool(there.runs))
            assert there.runs == [("ingress", 1, b"payload")]
            there.outcome = lambda: {"invalid": ("no", "n", None)}
            connection.submit(7, b"")
            await until(lambda: bool(here.answers))
            assert here.answers == [(7, {"invalid": ["no", "n", None]})], "one that went well has no answer"
            connection.beat(Beat(1, [5], [], False))
            await until(lambda: there.aborted == ["e5"])
            assert there.hub.inspect()["ingress"]["acknowledged"] == 1
            assert [frame.sequence for frame in there.call] == [0]
            connection.close()
            await there.closed.wait()

    run(test)


def test_the_last_tokens_arrive_before_the_end(run: Run) -> None:
    async def test() -> None:
        async with replica() as (there, address):
            here = Ingress()
            connection = await here.connect(address)
            there.hub.attach("ingress", 1, 5, "e5")
            await until(lambda: bool(here.frames) or there.hub._channels["ingress"].connection is not None)
            there.token(5)
            there.hub.close_all("the engine died")
            await connection.ended
            assert here.tokens == [0]
            await there.closed.wait()

    run(test)


def test_without_its_connection_a_channel_keeps_to_serve(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.channel.channel_hub.ARRIVAL_S", 0.05)

    async def test() -> None:
        async with replica() as (there, address):
            there.hub.attach("ingress", 1, 5, "e5")
            there.token(5)
            await until(lambda: len(there.call) == 2)
            assert [record.index for record in there.call[1].records] == [0]
            late = Ingress()
            connection = await late.connect(address)
            await connection.ended
            assert not connection.answered
            there.token(5, 1)
            await until(lambda: len(there.call) == 3)

    run(test)


def test_a_key_is_valid_once_and_others_never(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with replica() as (there, address):
            for key in (b"\0" * KEY_BYTES, b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(key)
                assert await connection_closed(reader)
            here, second = Ingress(), Ingress()
            await here.connect(address)
            await until(lambda: there.hub._channels["ingress"].connection is not None)
            connection = await second.connect(address)
            await connection.ended
            assert not connection.answered
            there.hub.attach("ingress", 1, 5, "e5")
            there.token(5)
            await until(lambda: here.tokens == [0])
            assert not there.server.strangers
            assert there.server._refused == 3

    run(test)
    assert caplog.text.count("sent keys that this replica does not expect, 1 in all") == 1, "of three"


def test_a_key_may_come_in_pieces_with_the_first_messages_behind_it(run: Run) -> None:
    async def test() -> None:
        async with replica() as (there, address):
            _, writer = await asyncio.open_connection(address.host, address.port)
            data = bytes.fromhex(address.key) + pack_message(MessageKind.SUBMIT, b"\5" + b"\0" * 7, b"x")
            for place in range(len(data)):
                writer.write(data[place : place + 1])
                await asyncio.sleep(0)
            await until(lambda: there.runs == [("ingress", 1, b"x")])
            writer.close()

    run(test)


def test_strangers_are_few_and_do_not_stay(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_server, "MAX_STRANGERS", 8)
    monkeypatch.setattr(channel_server, "KEY_S", 600.0)

    async def test() -> None:
        async with replica() as (there, address):
            silent = [await asyncio.open_connection(address.host, address.port) for _ in range(20)]
            ends = [asyncio.ensure_future(connection_closed(reader)) for reader, _ in silent]
            await until(lambda: sum(end.done() for end in ends) == 12)
            assert [end.done() for end in ends] == [True] * 12 + [False] * 8, "the oldest"
            assert len(there.server.strangers) == 8
            monkeypatch.setattr(channel_server, "KEY_S", 0.1)
            for end, (_, writer) in zip(ends, silent, strict=True):
                if not end.done():
                    writer.close()
            await until(lambda: not there.server.strangers)
            reader, _ = await asyncio.open_connection(address.host, address.port)
            assert await connection_closed(reader)
            here = Ingress()
            await here.connect(address)
            await until(lambda: bool(there.hub._channels["ingress"].connection))
            await asyncio.gather(*ends)

    run(test)


def test_an_attempt_that_waits_for_its_grammar_ends_with_its_client(run: Run) -> None:
    async def test() -> None:
        async with replica() as (there, address):
            here, canceled = Ingress(), asyncio.Event()

            async def compile_for_ever(cid: str, epoch: int, payload: bytes) -> dict[str, Any]:
                there.runs.append((cid, epoch, payload))
                try:
                    await asyncio.Event().wait()
                finally:
                    canceled.set()
                raise AssertionError

            there.server.run = compile_for_ever
            connection = await here.connect(address)
            connection.submit(3, b"")
            await until(lambda: bool(there.runs))
            connection.beat(Beat(0, [3]))
            async with asyncio.timeout(60):
                await canceled.wait()
            assert not here.answers

    run(test)


def test_what_cannot_be_read_ends_the_channel_and_nothing_else(run: Run) -> None:
    async def test() -> None:
        for message in (
            pack_message(MessageKind.BEAT, b"x"),
            pack_message(MessageKind.SUBMIT, b"x"),
            pack_message(MessageKind.FRAME, b""),
            b"\xff\xff\xff\xff\1",
        ):
            async with replica() as (there, address):
                reader, writer = await asyncio.open_connection(address.host, address.port)
                writer.write(bytes.fromhex(address.key) + message)
                assert await connection_closed(reader)
                await there.closed.wait()
                assert there.hub.inspect() == {}
                writer.close()

    run(test)


def test_a_defect_of_the_replica_is_an_answer(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with replica() as (there, address):
            here = Ingress()
            connection = await here.connect(address)

            def fail() -> None:
                raise KeyError("planted")

            there.outcome = fail
            connection.submit(3, b"")
            await until(lambda: bool(here.answers))
            assert here.answers == [(3, {"defect": "KeyError: 'planted'"})]

    run(test)
    assert "attempt 3 of channel ingress failed" in caplog.text


def test_a_defect_of_the_ingress_ends_the_connection(run: Run) -> None:
    async def test() -> None:
        async with replica() as (there, address):
            here = Ingress()
            here.defect = KeyError("planted")
            connection = await here.connect(address)
            there.hub.attach("ingress", 1, 5, "e5")
            there.token(5)
            with pytest.raises(KeyError, match="planted"):
                await connection.ended
            await there.closed.wait()
            assert there.hub.num_kept == 1, "its attempts may be resumed"

    run(test)


def test_the_end_is_no_reset_while_messages_are_on_their_way(run: Run) -> None:
    """Or the reset would hide why the channel has ended, and the last frames with it."""

    async def test() -> None:
        async with replica() as (there, address):
            here = Ingress()
            connection = await here.connect(address)
            there.hub.attach("ingress", 1, 5, "e5")
            there.token(5)
            await until(lambda: here.tokens == [0])
            for attempt in range(200):
                connection.submit(attempt, bytes(10_000))
            there.token(5, 1)
            there.hub.close_all("the engine died")
            await there.closed.wait()
            for attempt in range(200):
                connection.submit(attempt, bytes(10_000))
            await connection.ended
            assert here.tokens == [0, 1]

    run(test)


def test_what_is_no_replica_has_not_answered(run: Run) -> None:
    async def test() -> None:
        async def web_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()

        server = await asyncio.start_server(web_server, HOST, 0)
        port = server.sockets[0].getsockname()[1]
        connection = await Ingress().connect(Address(HOST, port, "00" * KEY_BYTES))
        with pytest.raises(wire.WireError):
            await connection.ended
        assert not connection.answered
        assert await IngressConnection.possible(HOST, port)
        server.close()
        await server.wait_closed()
        assert not await IngressConnection.possible(HOST, port)

    run(test)


def test_an_attempt_whose_connection_is_gone_is_told_on_the_next_channel(run: Run) -> None:
    async def test() -> None:
        async with replica() as (there, address):
            here, fails = Ingress(), asyncio.Event()

            async def fail_later(cid: str, epoch: int, payload: bytes) -> dict[str, Any]:
                there.runs.append((cid, epoch, payload))
                await fails.wait()
                return {"invalid": ("late", None, None)}

            there.server.run = fail_later
            connection = await here.connect(address)
            connection.submit(9, b"")
            await until(lambda: bool(there.runs))
            connection.close()
            await there.closed.wait()
            frames = there.hub.stream("ingress", 2)
            await anext(frames)
            fails.set()
            records = wire.unpack_frame(await anext(frames)).records
            assert [(one.attempt, one.end, one.final) for one in records] == [(9, FinishReason.ABORT, True)]
            await frames.aclose()  # type: ignore[attr-defined]

    run(test)


def test_frames_wait_for_a_reader_that_is_behind(run: Run) -> None:
    async def test() -> None:
        async with replica() as (there, address):
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
            writer.write(bytes.fromhex(address.key))
            there.hub.attach("ingress", 1, 5, "e5")
            await until(lambda: there.hub._channels["ingress"].connection is not None)
            channel, index = there.hub._channels["ingress"], 0
            for _ in range(1000):
                if channel.congested:
                    break
                there.hub.deliver([TokenDelta("e5", index, (7,) * 10_000)])
                index += 10_000
                await asyncio.sleep(0)
            sent = channel.sequence
            assert sent < 500, "fewer than may be unacknowledged"
            for _ in range(10):
                there.hub.deliver([TokenDelta("e5", index, (7,))])
                index += 1
                await asyncio.sleep(0)
            assert channel.sequence == sent
            unread = asyncio.ensure_future(reader.readexactly(4 * index))
            await unread
            assert channel.sequence > sent
            assert not channel.unsent
            writer.close()

    run(test)


def test_an_address_that_nobody_listens_at_is_an_error_of_the_connection(run: Run) -> None:
    async def test() -> None:
        async with replica() as (there, address):
            there.server.stop()
            await asyncio.sleep(0)
            with pytest.raises(OSError, match=r"[Cc]onnect"):
                await Ingress().connect(address)
            assert there.server.expect(there.hub._channels["ingress"], there.hub) is None

    run(test)


def test_the_key_is_in_no_text() -> None:
    assert "secret" not in str(Address(HOST, 1, "secret"))


@contextlib.contextmanager
def deaf_listener() -> Iterator[tuple[socket.socket, Address]]:
    """A socket that accepts connections; nothing reads them."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen()
        yield listener, Address(HOST, listener.getsockname()[1], "00" * KEY_BYTES)


def test_a_closed_connection_ends_though_nothing_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_connection, "FLUSH_S", 0.05)

    async def test() -> None:
        with deaf_listener() as (_, address):
            connection = await Ingress().connect(address)
            connection.submit(1, bytes(2**26))  # more than the kernel takes
            connection.close()
            async with asyncio.timeout(60):
                await connection.ended

    asyncio.run(test())


@pytest.mark.skipif(sys.platform != "linux", reason="needs a socket that drops packets")
def test_one_lost_packet_does_not_keep_a_channel_from_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel sends it again after a second, and after two more."""
    assert ingress_connection.CONNECT_S > 2.0
    monkeypatch.setattr(ingress_connection, "CONNECT_S", 60.0)  # this loop may be late with letting it pass
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a filter that passes no packet
    program = struct.pack("HP", 1, ctypes.addressof(nothing))
    attach_filter, detach_filter = 26, 27  # SO_ATTACH_FILTER, SO_DETACH_FILTER

    async def test() -> None:
        with deaf_listener() as (listener, address):
            listener.setsockopt(socket.SOL_SOCKET, attach_filter, program)
            connecting = asyncio.ensure_future(Ingress().connect(address))
            for _ in range(3):  # turns of the loop, in which the first packet leaves
                await asyncio.sleep(0.05)
            listener.setsockopt(socket.SOL_SOCKET, detach_filter, 0)
            (await connecting).close()

    asyncio.run(test())
