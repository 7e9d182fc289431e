"""Channels in a thread of their own: a busy or stopped ingress loses nothing, and looks dead to nobody."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from engine_client_setting import collect, quiet, request, run, started, until
from loopback import LIMITS, LoopbackHandle, expected_tokens, stepping
from virtual_time import run_virtually

from app.channel import wire
from app.channel.channel_hub import GRACE_S, ChannelHub
from app.channel.channel_set import ChannelSet
from app.channel.channel_thread import ChannelThread
from app.channel.ingress_channel import DEAD_S, ChannelState
from app.channel.relay import RECORDS, SLICE_S, Relay
from app.channel.wire_resume import AttemptClaim
from app.channel.wire_sections import KvSection
from app.fleet.attempts import END_RECORD_S
from app.routing import fleet
from app.routing.ledger import Route
from app.routing.load import LoadReport

ROUTE = Route("replica", 1)
WAIT_S = 60.0  # until which another thread has done what is waited for


class Recorder:
    """An owner, and the channels of a relay; remembers what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.threads: set[int] = set()
        self.act: Callable[[], None] = lambda: None
        self.unknown: list[int] = []
        self.fits = True
        self.claims: list[AttemptClaim] = []

    def _note(self, *call: Any) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append(call)
        self.act()

    def on_open(self, route: Route, hello: wire.Hello, ended: Route | None) -> None:
        self._note("open", route)

    def on_broken(self, route: Route) -> list[AttemptClaim]:
        self._note("broken", route)
        return self.claims

    def on_answer(self, route: Route, attempt: int, outcome: dict[str, Any]) -> None:
        self._note("answer", (attempt, outcome))

    def on_records(self, route: Route, records: list[wire.Record]) -> list[int]:
        self._note("records", [record.attempt for record in records])
        return self.unknown

    def on_kv(self, route: Route, section: KvSection) -> bool:
        self._note("kv")
        return self.fits

    def on_load(self, route: Route, load: LoadReport) -> None:
        self._note("load")

    def on_suspect(self, route: Route, suspected: bool) -> None:
        self._note("suspect", suspected)

    def on_closed(self, route: Route, reason: str, fault: bool) -> None:
        self._note("closed", reason, fault)

    def on_members(self) -> None:
        pass

    def forget(self, route: Route, attempts: list[int]) -> None:
        self._note("forget", route, attempts)

    def resync(self, route: Route) -> None:
        self._note("resync", route)

    def fail(self, route: Route, reason: str) -> None:
        self._note("fail", route, reason)

    def resume(self, route: Route, claims: Sequence[AttemptClaim]) -> None:
        self._note("resume", route, claims)


def test_events_come_in_order_and_answers_go_back() -> None:
    async def test() -> None:
        recorder = Recorder()
        recorder.unknown, recorder.fits = [7], False
        relay = Relay(recorder, recorder)
        relay.on_open(ROUTE, wire.Hello(LIMITS), None)
        assert relay.on_records(ROUTE, [wire.Record(7, 0, [1])]) == []
        assert relay.on_kv(ROUTE, None)  # type: ignore[arg-type]
        relay.on_frame_end(lambda: recorder._note("handled"))
        relay.on_suspect(ROUTE, True)
        relay.on_closed(ROUTE, "a test", False)
        assert recorder.calls == []
        await asyncio.sleep(1.0)
        assert recorder.calls == [
            ("open", ROUTE),
            ("records", [7]),
            ("forget", ROUTE, [7]),
            ("kv",),
            ("resync", ROUTE),
            ("handled",),
            ("suspect", True),
            ("closed", "a test", False),
        ]

    run_virtually(test())


def test_a_defect_at_the_opening_loses_what_was_to_continue() -> None:
    async def test() -> None:
        recorder = Recorder()

        def on_open(route: Route, hello: wire.Hello, ended: Route | None) -> None:
            raise KeyError("planted")

        recorder.on_open = on_open  # type: ignore[method-assign]
        relay = Relay(recorder, recorder)
        for ended in (None, Route("r", 0)):
            relay.on_open(ROUTE, wire.Hello(LIMITS), ended)
        relay.on_answer(ROUTE, 3, {"failed": "so"})
        await asyncio.sleep(1.0)
        assert recorder.calls == [
            ("fail", ROUTE, "KeyError: 'planted'"),
            ("closed", "its next channel could not be opened", False),
            ("fail", ROUTE, "KeyError: 'planted'"),
            ("answer", (3, {"failed": "so"})),
        ]

    run_virtually(test())


def test_a_defect_ends_its_channel_and_no_other_event_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        recorder = Recorder()

        def fail() -> None:
            if len(recorder.calls) == 1:
                raise KeyError("planted")

        recorder.act = fail
        relay = Relay(recorder, recorder)
        relay.on_records(ROUTE, [wire.Record(1, 0, [1])])
        relay.on_records(ROUTE, [wire.Record(2, 0, [1])])
        relay.on_frame_end(lambda: None)
        await asyncio.sleep(1.0)
        assert recorder.calls == [
            ("records", [1]),
            ("fail", ROUTE, "KeyError: 'planted'"),
            ("records", [2]),
        ]
        assert relay.faults == 1

    run_virtually(test())
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_a_backlog_leaves_the_loop_to_others_and_shows_its_age() -> None:
    async def test() -> None:
        recorder = Recorder()
        loop: Any = asyncio.get_running_loop()

        def take_long() -> None:
            loop._jumping.now += SLICE_S / 2

        recorder.act = take_long
        relay = Relay(recorder, recorder)
        for _ in range(10):
            relay.on_suspect(ROUTE, True)
        assert relay.lag_s == 0.0
        seen = []
        while len(recorder.calls) < 10:
            await asyncio.sleep(0)
            seen.append((len(recorder.calls), relay.lag_s))
        assert [count for count, _ in seen if count] == [2, 4, 6, 8, 10]
        ages = [age for count, age in seen if 0 < count < 10]
        assert ages == sorted(ages)
        assert ages[-1] > 3 * SLICE_S
        assert relay.lag_s == 0.0

    run_virtually(test())


def test_events_that_keep_coming_leave_the_loop_to_others() -> None:
    async def test() -> None:
        recorder = Recorder()
        loop: Any = asyncio.get_running_loop()

        def take_long() -> None:
            loop._jumping.now += SLICE_S / 2
            if len(recorder.calls) < 10:
                relay.on_suspect(ROUTE, True)

        recorder.act = take_long
        relay = Relay(recorder, recorder)
        relay.on_suspect(ROUTE, True)
        relay.on_suspect(ROUTE, True)
        seen = []
        while relay.lag_s or len(recorder.calls) < 11:
            await asyncio.sleep(0)
            seen.append(len(recorder.calls))
        assert [count for count in seen if count] == [2, 4, 6, 8, 10, 11]

    run_virtually(test())


def test_all_of_a_frame_is_handled_in_one_turn_after_its_end() -> None:
    async def test() -> None:
        recorder = Recorder()
        relay = Relay(recorder, recorder)
        relay.on_load(ROUTE, None)  # type: ignore[arg-type]
        relay.on_kv(ROUTE, None)  # type: ignore[arg-type]
        relay.on_records(ROUTE, [wire.Record(1, 0, [1])])
        for _ in range(5):  # turns of the loop
            await asyncio.sleep(0)
        assert recorder.calls == []
        relay.on_frame_end(lambda: recorder._note("handled"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert recorder.calls == [("load",), ("kv",), ("records", [1]), ("handled",)]

    run_virtually(test())


def test_what_came_of_a_frame_without_an_end_is_handled_before_the_end_of_its_channel() -> None:
    async def test() -> None:
        recorder = Recorder()
        relay = Relay(recorder, recorder)
        relay.on_records(ROUTE, [wire.Record(1, 0, [1])])
        relay.on_broken(ROUTE)
        await asyncio.sleep(1.0)
        assert [call[0] for call in recorder.calls] == ["records", "broken", "resume"]

    run_virtually(test())


def test_a_large_frame_is_handled_in_parts() -> None:
    async def test() -> None:
        recorder = Recorder()
        relay = Relay(recorder, recorder)
        relay.on_records(ROUTE, [wire.Record(attempt, 0, [1]) for attempt in range(2 * RECORDS + 1)])
        relay.on_frame_end(lambda: None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        parts = [attempts for _, attempts in recorder.calls]
        assert [len(part) for part in parts] == [RECORDS, RECORDS, 1]
        assert [attempt for part in parts for attempt in part] == list(range(2 * RECORDS + 1))

    run_virtually(test())


_names = itertools.count()


class ThreadedHandle:
    """A handle whose replica answers in the thread that calls; ``beats`` are counted there."""

    def __init__(self) -> None:
        self.deployment_id = SimpleNamespace(app_name=f"threaded-{next(_names)}", name="engine")
        self.fleet = fleet.get_fleet(self.deployment_id.app_name)
        self.hub = ChannelHub(wire.Hello(LIMITS), lambda name: None, idle_frame_s=0.01)
        self.beats = threading.Semaphore(0)
        self.channel = SimpleNamespace(remote=self._channel)
        self.beat = SimpleNamespace(remote=self._beat)

    def options(self, **_: Any) -> ThreadedHandle:
        return self

    def _channel(self, cid: str, epoch: int, resumption: bytes, connects: bool, *, target: str) -> Any:
        stream = self.hub.stream(cid, epoch, resumption)

        class Response:
            def __aiter__(self) -> Any:
                return stream

            def cancel(self) -> None:
                pass

        return Response()

    def _beat(self, cid: str, epoch: int, *arguments: Any, target: str) -> Any:
        self.beats.release()
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        done.set_result(self.hub.beat(cid, epoch, *arguments))
        return done


def test_beats_go_on_while_the_owners_loop_is_blocked_and_what_came_is_handled_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.channel.ingress_channel.BEAT_S", 0.0)
    monkeypatch.setattr("app.channel.ingress_channel.LOOK_S", 0.001)

    async def test() -> None:
        thread, handle, recorder = ChannelThread(), ThreadedHandle(), Recorder()
        channels = ChannelSet(handle, recorder, thread.loop)
        handle.fleet.set_members(frozenset({"replica"}))
        while not recorder.calls:  # noqa: ASYNC110  (another thread does it)
            await asyncio.sleep(0.001)
        while handle.beats.acquire(blocking=False):
            pass
        for _ in range(20):  # this loop does nothing else meanwhile
            assert handle.beats.acquire(timeout=WAIT_S)
        thread.loop.call_soon_threadsafe(channels.relay.on_suspect, ROUTE, True)
        while ("suspect", True) not in recorder.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert recorder.threads == {threading.get_ident()}
        assert channels.states() == {"replica": ChannelState.OPEN.value}
        await channels.stop()
        assert recorder.calls[-1][0] == "closed" or channels.relay._waiting
        thread.stop()
        assert thread.loop.is_closed()

    asyncio.run(asyncio.wait_for(test(), WAIT_S))


@contextlib.contextmanager
def stopped(handle: LoopbackHandle, channels: ChannelSet) -> Iterator[None]:
    """The ingress's process is stopped: neither frames nor beats pass, and it looks at no clock."""
    handle.running.clear()
    with pytest.MonkeyPatch.context() as patch:
        for channel in channels._channels.values():
            patch.setattr(channel._silence, "look", lambda seen: 0.0)
        yield
    handle.running.set()


@pytest.mark.parametrize("seconds", [7.0, 2 * DEAD_S, GRACE_S - 5.0])
def test_an_ingress_that_was_stopped_resubmits_nothing_and_loses_nothing(seconds: float) -> None:
    async def test() -> None:
        handle, client = await started(2)
        jobs = [asyncio.ensure_future(collect(client, request([index], 300))) for index in range(8)]
        replicas = list(handle.replicas.values())
        await until(lambda: sum(len(replica.engine.live) for replica in replicas) == 8)
        with stopped(handle, client._parts.channels):
            for _ in range(100):
                handle.step()
                await asyncio.sleep(seconds / 100)
            channels = [channel for replica in replicas for channel in replica.hub._channels.values()]
            assert all(channel.suspended for channel in channels)
        async with stepping(handle):
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 300) for index in range(8)]
        assert sum(len(replica.engine.submitted) for replica in replicas) == 8
        assert not any(replica.engine.aborted for replica in replicas)
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


@pytest.mark.parametrize("own", [True, False])
def test_an_ingress_that_sends_no_beats_blames_no_engine(own: bool) -> None:
    async def test() -> None:
        handle, recorder = LoopbackHandle(1), Recorder()
        channels = ChannelSet(handle, recorder)
        (replica,) = handle.replicas.values()
        await until(lambda: bool(recorder.calls))
        if own:
            with stopped(handle, channels):
                await until(lambda: not replica.hub.inspect())
        else:
            replica.kill()
        await until(lambda: recorder.calls[-1][0] == "closed")
        _, reason, fault = recorder.calls[-1]
        assert fault is not own
        assert ("no beat for 60 s" in reason) is own
        await channels.stop()

    run(test)


def test_an_ingress_that_was_stopped_for_too_long_starts_over_and_blames_no_engine() -> None:
    async def test() -> None:
        handle, client = await started(2)
        jobs = [asyncio.ensure_future(collect(client, request([index], 30))) for index in range(8)]
        replicas = list(handle.replicas.values())
        await until(lambda: sum(len(replica.engine.live) for replica in replicas) == 8)
        requests = list(client._requests)
        with stopped(handle, client._parts.channels):
            await asyncio.sleep(GRACE_S + 1.0)
        await until(lambda: sum(len(replica.engine.submitted) for replica in replicas) == 16)
        assert sum(len(replica.engine.aborted) for replica in replicas) == 8
        async with stepping(handle):
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 30) for index in range(8)]
        assert not any(one.deaths or one.failures for one in requests)
        await client.stop()

    run(test)


@pytest.mark.parametrize("behind", [True, False])
def test_an_end_record_that_waits_unread_is_not_lost(monkeypatch: pytest.MonkeyPatch, behind: bool) -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        job = asyncio.ensure_future(collect(client, request([1], 3)))
        await until(lambda: bool(only.engine.live))
        (one,) = client._requests
        relay = client._parts.channels.relay
        drain, held = relay._drain, []
        monkeypatch.setattr(relay, "_drain", lambda: held.append(1))
        if not behind:
            monkeypatch.setattr(Relay, "lag_s", 0.0)
        for _ in range(3):
            handle.step()
        await asyncio.sleep(3 * END_RECORD_S)
        assert len(only.engine.submitted) == 1 + (not behind)
        monkeypatch.setattr(relay, "_drain", drain)
        drain()
        async with stepping(handle):
            assert await job == expected_tokens([1], 3)
        assert one.deaths == one.failures == 0
        await client.stop()

    run(test)
