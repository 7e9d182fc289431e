"""Requests whose attempts take the channels' own connections: answers, and connections that fail."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from engine_client_setting import calls_through_serve, collect, connected, quiet, request, started, until
from engine_client_setting import run as run_test
from loopback import LoopbackHandle, LoopbackReplica, expected_tokens, stepping
from ray.serve.exceptions import RequestCancelledError
from virtual_time import loop_time

from app.channel.channel_hub import ARRIVAL_S
from app.channel.ingress_channel import END_S, RECONNECT_S
from app.fleet.engine_client import EngineClient
from app.fleet.generation import GenerationError, UnavailableError
from app.routing.routing_meta import RoutingMeta
from engine.errors import ClientLimitError, InvalidRequestError

CONNECTED = (True,)
"""See ``conftest``."""


def answering(replica: LoopbackReplica, *outcomes: Any) -> None:
    """Have the next attempts end with these outcomes, or errors."""
    left = list(outcomes)
    assert replica.server is not None
    run = replica.server.run

    async def answer(cid: str, epoch: int, payload: bytes) -> dict[str, Any]:
        if not left:
            return await run(cid, epoch, payload)
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return dict(outcome)

    replica.server.run = answer


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        ({"invalid": ("too hot", "temperature", None)}, InvalidRequestError),
        ({"limited": ("too much", 2)}, ClientLimitError),
        ({"failed": "no grammar"}, UnavailableError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_answer_ends_a_request(outcome: dict[str, Any], error: type[Exception]) -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        answering(only, outcome)
        with pytest.raises(error):
            await collect(client, request([1]))
        await until(lambda: quiet(handle, client))
        await client.stop()

    run_test(test)


def test_a_refused_attempt_is_made_again_without_blame(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        answering(only, *[{"refused": "no such channel"}] * 7)  # more than the faults that a request may have
        async with stepping(handle):
            assert await collect(client, request([1])) == expected_tokens([1], 30)
        await until(lambda: quiet(handle, client))
        assert client.inspect()["call_faults"] == 0
        await client.stop()

    run_test(test)
    assert "no such channel" in caplog.text


def test_a_defect_of_a_replica_is_counted_and_the_attempt_made_again(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        answering(only, KeyError("planted"))
        async with stepping(handle):
            assert await collect(client, request([1])) == expected_tokens([1], 30)
        assert client.inspect()["call_faults"] == 1
        await client.stop()

    run_test(test)
    assert "planted" in caplog.text


def test_a_request_that_nothing_but_defects_answers_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        answering(only, *[KeyError("planted")] * 64)
        with pytest.raises(GenerationError, match="5 attempts at this request failed") as caught:
            await collect(client, request([1]))
        assert "planted" not in str(caught.value)
        await until(lambda: quiet(handle, client))
        await client.stop()

    run_test(test)
    assert "planted" in caplog.text


def test_a_connection_that_breaks_alone_costs_no_token_and_no_attempt() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        assert only.server is not None
        through_serve = calls_through_serve(handle)
        jobs = [asyncio.ensure_future(collect(client, request([index], 5000))) for index in range(5)]
        await until(lambda: len(only.engine.live) == 5)
        async with stepping(handle):
            for _ in range(4):
                await asyncio.sleep(0.5)
                only.server.cut()
            for index, job in enumerate(jobs):
                assert await job == expected_tokens([index], 5000)
        assert only.hub.inspect()[client._parts.channels.cid]["epoch"] == 5
        assert client.status()["unconnected"] == []
        assert not through_serve
        assert client._parts.attempts.budget.resubmitted == 0
        await until(lambda: quiet(handle, client))
        await client.stop()

    run_test(test)


def test_nobody_need_look_at_the_calls_of_channels_that_are_closed() -> None:
    """Or each replica that leaves would cost a traceback in the ingress's log."""

    async def test() -> None:
        handle, client = await started(2)
        assert connected(client)
        tasks = asyncio.all_tasks()
        handle.announce("replica-0")
        await until(lambda: client.status()["channels"].keys() == {"replica-0"})
        await client.stop()
        await until(lambda: sum(task.done() and not task.cancelled() for task in tasks) >= 2)
        ended = [task for task in tasks if task.done() and not task.cancelled()]
        # True of those that the loop logs when they are destroyed; asking for the error would change it.
        assert [task for task in ended if task._log_traceback] == []  # type: ignore[attr-defined]
        assert sum(isinstance(task.exception(), RequestCancelledError) for task in ended) == 2

    run_test(test)


def test_where_nothing_listens_attempts_go_through_serve(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        handle = LoopbackHandle(1)
        (only,) = handle.replicas.values()
        assert only.server is not None
        only.server.closed = True
        client = EngineClient(handle, unavailable_after_s=60.0)
        await client.start()
        await until(lambda: bool(handle.fleet.ledger.routable()))
        through_serve = calls_through_serve(handle)
        async with stepping(handle, 0.005):
            assert await collect(client, request([1])) == expected_tokens([1], 30)
            for channel in list(only.hub._channels.values()):
                only.hub.close(channel, "a test broke it")
            assert await collect(client, request([2])) == expected_tokens([2], 30)
            assert len(through_serve) >= 2
            assert client.status()["unconnected"] == [only.name]
            job = asyncio.ensure_future(collect(client, request([3], 9000)))
            await asyncio.sleep(RECONNECT_S / 2)
            assert client.status()["unconnected"] == [only.name]
            only.server.closed = False
            await until(lambda: connected(client))
            assert await collect(client, request([4])) == expected_tokens([4], 30)
            calls = len(through_serve)
            assert await job == expected_tokens([3], 9000), "what has begun goes on"
        assert len(through_serve) == calls
        await client.stop()

    run_test(test)
    warnings = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert sum("take Ray Serve's connections for 30 s" in one.getMessage() for one in warnings) == 1


def test_a_connection_on_which_nothing_arrives_is_given_up() -> None:
    async def test() -> None:
        handle = LoopbackHandle(1)
        (only,) = handle.replicas.values()
        assert only.server is not None
        only.server.deaf = True
        client = EngineClient(handle, unavailable_after_s=60.0)
        began = loop_time()
        async with stepping(handle):
            assert await collect(client, request([1])) == expected_tokens([1], 30)
        assert loop_time() - began < ARRIVAL_S + END_S + 1.0, "it need not be silent first"
        assert client.status()["unconnected"] == [only.name]
        assert client.status()["channels"] == {only.name: "open"}
        await client.stop()

    run_test(test)


def test_routers_of_serve_choose_for_attempts_that_go_through_serve() -> None:
    async def test() -> None:
        handle, client = await started(2, serve_chooses=True)
        through_serve = calls_through_serve(handle)
        async with stepping(handle):
            assert await collect(client, request([1])) == expected_tokens([1], 30)
        assert connected(client), "frames and beats take connections all the same"
        assert [type(meta) for meta in through_serve] == [RoutingMeta]
        await client.stop()

    run_test(test)


def test_a_crowd_of_sequences_that_stop_strings_have_ended_is_told_in_several_beats() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        (channel,) = client._parts.channels._channels.values()
        ended: list[tuple[str, int]] = []
        only.hub._end_sequence = lambda engine_id, number: ended.append((engine_id, number))
        job = asyncio.ensure_future(collect(client, request([1], 300)))
        await until(lambda: bool(only.engine.live))
        for sequence in range(70_000):  # more than the count of a beat can say
            channel.end_sequence(channel._epoch, 1, sequence)
        await until(lambda: len(ended) == 70_000)
        assert client.inspect()["call_faults"] == 0
        async with stepping(handle):
            await job
        await client.stop()

    run_test(test)
