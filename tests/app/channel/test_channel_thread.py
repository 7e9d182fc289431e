"""The thread of the channels: that of Serve's routers where there is one."""

from __future__ import annotations

import asyncio
import threading

import pytest
from ray.serve._private.router import SingletonThreadRouter

from app.channel import channel_thread
from app.channel.channel_thread import ChannelThread, routers_loop

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
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(10)
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
    channels.stop()
    assert not channels.thread.is_alive()
    assert channels.loop.is_closed()


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
