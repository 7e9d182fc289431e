"""Whatever becomes of one call or of the driver of a request, its client gets tokens or an error."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from engine_client_setting import collect, quiet, request, run, started, until
from kv_loopback import SCHEME, KvReplica
from loopback import LoopbackHandle, expected_tokens, stepping
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from app.channel import ingress_channel
from app.channel.engine_channel import UnknownEpochError
from app.fleet.engine_client import EngineClient
from app.fleet.generation import GenerationError
from app.routing.fleet import NotAcceptedError
from app.routing.ledger import Booking, Route
from app.routing.routing_meta import RoutingMeta
from engine.errors import ClientLimitError
from engine.request import CacheNamespace


def test_a_driver_that_breaks_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        handle, client = await started(1)

        def broken(*_: Any) -> bytes:
            raise ValueError("a test broke it")

        monkeypatch.setattr("app.channel.wire.pack_submission", broken)
        with pytest.raises(GenerationError, match="internal error"):
            await collect(client, request([1]))
        assert quiet(handle, client)
        await client.stop()

    run(test)


@pytest.mark.serve_calls
def test_a_client_beyond_its_budget_learns_when_to_come_back() -> None:
    async def test() -> None:
        handle, client = await started(1)

        async def answer() -> dict[str, Any]:
            return {"limited": ("too long", 2)}

        handle.generate.remote = lambda *_, **__: answer()
        with pytest.raises(ClientLimitError, match="too long") as caught:
            await collect(client, request([1]))
        assert caught.value.retry_after_s == 2
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


@pytest.mark.serve_calls
def test_calls_that_cannot_be_sent_are_tried_again() -> None:
    async def test() -> None:
        handle, client = await started(1)
        send = handle.generate.remote
        failures = [ConnectionError("no router"), RuntimeError("no loop")]

        def remote(*args: Any, **kwargs: Any) -> Any:
            if failures:
                raise failures.pop()
            return send(*args, **kwargs)

        handle.generate.remote = remote
        async with stepping(handle):
            assert await collect(client, request([1])) == expected_tokens([1], 30)
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


@pytest.mark.serve_calls
def test_a_call_that_serve_cancels_is_tried_again() -> None:
    async def test() -> None:
        handle, client = await started(1)
        send = handle.generate.remote
        sent = []

        def remote(*args: Any, **kwargs: Any) -> Any:
            sent.append(kwargs["meta"])
            if len(sent) > 1:
                return send(*args, **kwargs)
            cancelled: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            cancelled.cancel()
            return cancelled

        handle.generate.remote = remote
        async with stepping(handle):
            assert await collect(client, request([1])) == expected_tokens([1], 30)
        assert sent == [Route("replica-0", 1)] * 2
        await client.stop()

    run(test)


def test_a_channel_that_serve_cancels_is_opened_again() -> None:
    async def test() -> None:
        handle, client = await started(1)
        open_channel = handle.channel.remote

        class Cancelled:
            def __aiter__(self) -> Cancelled:
                return self

            async def __anext__(self) -> bytes:
                raise asyncio.CancelledError

            def cancel(self) -> None:
                pass

        def remote(*args: Any, **kwargs: Any) -> Any:
            handle.channel.remote = open_channel
            return Cancelled()

        handle.channel.remote = remote
        (only,) = handle.replicas.values()
        for channel in list(only.hub._channels.values()):
            only.hub.close(channel, "a test broke it")
        async with stepping(handle):
            await until(lambda: handle.channel.remote is open_channel)
            assert await collect(client, request([1])) == expected_tokens([1], 30)
        await client.stop()

    run(test)


def test_a_replica_that_comes_back_is_used_at_once() -> None:
    async def test() -> None:
        handle, client = await started(1, unavailable_after_s=10.0)
        (only,) = handle.replicas.values()
        first = asyncio.ensure_future(collect(client, request([3], 300)))
        await until(lambda: bool(only.engine.live))
        handle.announce()  # its request keeps the channel open
        await until(lambda: client.status()["replicas"] == 0)
        second = asyncio.ensure_future(collect(client, request([4], 5)))
        await asyncio.sleep(0.01)
        handle.announce(only.name)
        await until(lambda: len(only.engine.live) == 2)
        async with stepping(handle):
            assert await first == expected_tokens([3], 300)
            assert await second == expected_tokens([4], 5)
        await client.stop()

    run(test)


def test_the_replica_whose_channel_broke_is_avoided() -> None:
    async def test() -> None:
        handle, client = await started(2)
        jobs = [asyncio.ensure_future(collect(client, request([index], 50))) for index in range(4)]
        victim, other = handle.replicas.values()
        await until(lambda: len(victim.engine.live) == 2)
        victim.kill()
        await until(lambda: len(other.engine.live) == 4)
        avoided = [live.avoid for live in client._parts.attempts.running.values()]
        assert sorted(avoided) == ["", "", victim.name, victim.name]
        async with stepping(handle):
            await asyncio.gather(*jobs)
        await client.stop()

    run(test)


@pytest.mark.serve_calls
def test_a_request_that_comes_before_any_replica_has_its_keys() -> None:
    async def test() -> None:
        handle, prompt = LoopbackHandle(0), list(range(40))
        client = EngineClient(handle, unavailable_after_s=60.0)
        job = asyncio.ensure_future(collect(client, request(prompt)))
        await until(lambda: client.status()["live_requests"] == 1)
        book, sent = handle.fleet.book, []

        def recorded(meta: RoutingMeta) -> Booking:
            sent.append(list(meta.keys))
            return book(meta)

        handle.fleet.book = recorded  # type: ignore[assignment]
        handle.replicas["kv"] = KvReplica("kv")
        handle.announce("kv")
        async with stepping(handle):
            assert await job == expected_tokens(prompt, 30)
        assert sent == [SCHEME.keys(prompt, CacheNamespace())]
        await client.stop()

    run(test)


def test_a_client_accounts_for_itself() -> None:
    async def test() -> None:
        handle, client = await started(2)
        job = asyncio.ensure_future(collect(client, request([1], 5)))
        async with stepping(handle):
            await job
        account = client.inspect()
        assert account["index"].keys() == account["channels"].keys() == handle.replicas.keys()
        assert [state["digest"] for state in account["index"].values()] == [None, None], "they cache nothing"
        assert (account["live_requests"], account["cordoned"], account["faults"]) == (0, [], 0)
        assert account["running"].keys() <= handle.replicas.keys()
        assert account["index_counters"]["gaps"] == 0
        await client.stop()
        assert client.inspect()["index"] == {}

    run(test)


def test_a_client_that_has_not_started_has_nothing_to_tell() -> None:
    async def test() -> None:
        client = EngineClient(LoopbackHandle(2), unavailable_after_s=60.0)
        assert client.inspect()["replicas"] == 0

    run(test)


@pytest.mark.serve_calls
def test_replicas_that_do_not_accept_a_call_have_not_failed_under_it() -> None:
    async def test() -> None:
        handle, client = await started(2)
        send = handle.generate.remote
        left = [6]  # more than the faults that a request is allowed

        def remote(*args: Any, **kwargs: Any) -> Any:
            if not left[0]:
                return send(*args, **kwargs)
            left[0] -= 1
            refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            refused.set_exception(NotAcceptedError("it is full"))
            return refused

        handle.generate.remote = remote
        async with stepping(handle):
            assert await collect(client, request([1])) == expected_tokens([1], 30)
        await client.stop()

    run(test)


@pytest.mark.parametrize("callback", ["on_open", "on_records", "on_suspect", "on_closed"])
def test_a_defect_in_a_callback_of_a_channel_is_logged_and_the_channel_reopened(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, callback: str
) -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        original, failures = getattr(client, callback), [KeyError("planted")]

        def broken(*arguments: Any) -> Any:
            if failures:
                raise failures.pop()
            return original(*arguments)

        monkeypatch.setattr(client, callback, broken)
        if callback in ("on_open", "on_closed"):
            for channel in list(only.hub._channels.values()):
                only.hub.close(channel, "a test broke it")
            await until(lambda: not failures)
        if callback == "on_suspect":
            with monkeypatch.context() as patch:
                patch.setattr(ingress_channel, "SUSPECT_S", -1.0)  # any replica counts as silent
                await until(lambda: not failures)
        async with stepping(handle):
            assert await collect(client, request([1])) == expected_tokens([1], 30)
        assert not failures
        (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert record.exc_info is not None
        assert "planted" in str(record.exc_info[1])
        state = client.inspect()
        assert state["call_faults"] + state["event_faults"] == 1
        await client.stop()

    run(test)


@pytest.mark.parametrize(
    ("error", "defect"),
    [
        (KeyError("planted"), True),
        (RayTaskError("generate", "its traceback", KeyError("planted")).as_instanceof_cause(), True),
        (RayTaskError("generate", "its traceback", UnknownEpochError("planted")).as_instanceof_cause(), False),
        (RayTaskError("generate", "", TypeError("ChannelHub.attach() takes 4 arguments")), True),
        (RayTaskError("generate", "", TypeError("EngineReplica.generate() got an unexpected one")), False),
        (ActorDiedError(), False),
        (ConnectionError("planted"), False),
        (TimeoutError(), False),
        (DeploymentUnavailableError(DeploymentID("engine")), False),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.serve_calls
def test_a_defect_in_a_call_is_logged_with_its_traceback_and_a_lost_replica_is_not(
    caplog: pytest.LogCaptureFixture, error: Exception, defect: bool, sent: bool
) -> None:
    async def test() -> None:
        handle, client = await started(1)
        send, failures = handle.generate.remote, [error]

        def remote(*args: Any, **kwargs: Any) -> Any:
            if not failures:
                return send(*args, **kwargs)
            if not sent:
                raise failures.pop()
            failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            failed.set_exception(failures.pop())
            return failed

        handle.generate.remote = remote
        async with stepping(handle):
            assert await collect(client, request([1])) == expected_tokens([1], 30)
        logged = [record.exc_info for record in caplog.records if record.levelno >= logging.ERROR]
        assert [info[1] for info in logged if info is not None] == ([error] if defect else [])
        assert client.inspect()["call_faults"] == defect
        await client.stop()

    run(test)


@pytest.mark.parametrize("name", ["channel", "beat"])
@pytest.mark.serve_calls
def test_a_channel_or_beat_that_another_version_refuses_is_no_defect(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        method = getattr(handle, name)
        send, defect = method.remote, TypeError(f"ChannelHub.{name}() takes 2 positional arguments")
        failures = [defect, TypeError(f"EngineReplica.{name}() takes 2 positional arguments")]

        def remote(*args: Any, **kwargs: Any) -> Any:
            if failures:
                raise failures.pop()
            return send(*args, **kwargs)

        method.remote = remote
        if name == "channel":
            for channel in list(only.hub._channels.values()):
                only.hub.close(channel, "a test broke it")
        await until(lambda: not failures)
        async with stepping(handle):
            assert await collect(client, request([1])) == expected_tokens([1], 30)
        logged = [record.exc_info for record in caplog.records if record.levelno >= logging.ERROR]
        assert [info[1] for info in logged if info is not None] == [defect]
        assert client.inspect()["call_faults"] == 1
        await client.stop()

    run(test)


def test_an_ingress_is_ready_once_an_engine_is_routable() -> None:
    async def test() -> None:
        handle = LoopbackHandle(0)
        client = EngineClient(handle, unavailable_after_s=1.0)
        ready = asyncio.create_task(client.first_route())
        await asyncio.sleep(30)
        assert not ready.done()
        handle.add()
        await ready
        assert client.status()["routable"] == 1
        await client.stop()

    run(test)
