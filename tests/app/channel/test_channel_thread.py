"""The thread of the channels: that of Serve's routers where there is one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import RequestMetadata
from ray.serve._private.replica_result import gRPCReplicaResult
from ray.serve._private.router import SingletonThreadRouter
from ray.serve.generated.serve_pb2 import ASGIResponse
from ray.serve.handle import DeploymentResponseGenerator

from app.channel import channel_thread
from app.channel.channel_thread import ChannelThread, read_on_this_loop, routers_loop

NAME = "_get_singleton_asyncio_loop"


def test_channels_share_the_thread_of_serves_routers_and_leave_it_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.new_event_loop()
    routers = threading.Thread(target=loop.run_forever, daemon=True)
    routers.start()
    assert hasattr(SingletonThreadRouter, NAME), "Serve has another name for it"
    monkeypatch.setattr(channel_thread, "ray_runs", lambda: True)
    monkeypatch.setattr(SingletonThreadRouter, NAME, lambda component: loop)
    try:
        channels = ChannelThread(routers_loop())
        assert channels.loop is loop
        assert channels.thread is routers
        channels.stop()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        routers.join(30)
        loop.close()


def test_without_that_loop_they_have_a_thread_of_their_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel_thread, "ray_runs", lambda: True)
    monkeypatch.delattr(SingletonThreadRouter, NAME)
    channels = ChannelThread(routers_loop())
    assert "this Ray differs" in caplog.text
    assert channels.thread is not threading.current_thread()
    assert channels.thread.is_alive()
    ended = concurrent.futures.Future[bool]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set_result(True)

    asyncio.run_coroutine_threadsafe(work(), channels.loop)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), channels.loop).result(60)
    channels.stop()
    assert not channels.thread.is_alive()
    assert channels.loop.is_closed()
    assert ended.done(), "tasks end before their loop does"


def test_a_process_without_ray_starts_none_for_that_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_thread, "ray_runs", lambda: False)  # end-to-end tests may have started one here
    monkeypatch.setattr(SingletonThreadRouter, NAME, lambda component: pytest.fail("Ray would be started"))
    assert routers_loop() is None


def test_a_loop_that_hangs_ends_the_start_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_thread, "WITHIN_S", 0.01)
    loop = asyncio.new_event_loop()  # nothing runs it
    try:
        with pytest.raises(TimeoutError, match="event loop for channels has not answered"):
            ChannelThread(loop)
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


class Call:
    """A call over Serve's transport whose messages are here."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = messages

    async def __aiter__(self) -> AsyncIterator[ASGIResponse]:
        for message in self._messages:
            yield ASGIResponse(serialized_message=pickle.dumps(message))

    def add_done_callback(self, callback: Any) -> None:
        pass


def serves_stream(loop: asyncio.AbstractEventLoop, *messages: bytes) -> DeploymentResponseGenerator[bytes]:
    """A stream of Serve that arrives on ``loop``."""
    metadata = RequestMetadata("request", "internal", is_streaming=True, _on_separate_loop=True)
    result: concurrent.futures.Future[Any] = concurrent.futures.Future()
    result.set_result(gRPCReplicaResult(Call(*messages), metadata, None, loop))
    return DeploymentResponseGenerator(result, metadata)


def test_a_stream_is_read_without_futures_on_the_loop_on_which_it_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        stream = serves_stream(asyncio.get_running_loop(), b"a", b"b", b"c")
        assert await anext(stream) == b"a"
        read_on_this_loop(stream)
        monkeypatch.setattr(asyncio, "wrap_future", lambda future: pytest.fail("a future is made"))
        assert [message async for message in stream] == [b"b", b"c"]

    asyncio.run(test())


def test_a_stream_that_arrives_elsewhere_is_read_as_serve_does() -> None:
    other = ChannelThread()

    async def make() -> DeploymentResponseGenerator[bytes]:
        return serves_stream(asyncio.get_running_loop(), b"a", b"b")

    async def test() -> None:
        stream = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), other.loop))
        assert await anext(stream) == b"a"
        read_on_this_loop(stream)
        assert [message async for message in stream] == [b"b"]

    try:
        asyncio.run(test())
    finally:
        other.stop()


def test_a_stream_of_another_kind_is_left_alone() -> None:
    async def test() -> None:
        bare = SimpleNamespace(_grpc_call_loop=asyncio.get_running_loop())
        for stream in (
            SimpleNamespace(),
            SimpleNamespace(_replica_result=None),
            SimpleNamespace(_replica_result=bare),
        ):
            read_on_this_loop(stream)
        assert not hasattr(bare, "_calling_from_same_loop")

    asyncio.run(test())
