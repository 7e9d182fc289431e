"""A channel breaks while both processes live: nothing is computed again, each client gets each token once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import pytest
from engine_client_setting import collect, collect_all, quiet, request, run, started, until
from loopback import LoopbackHandle, LoopbackReplica, LoopbackStream, expected_tokens, stepping
from virtual_time import loop_time

from app.channel import channel_hub, wire
from app.channel.channel_hub import CALL_END_S, KEEP_S
from app.channel.ingress_channel import MAX_STALE, RESUME_S
from app.fleet.engine_client import EngineClient
from app.fleet.faults import Faults
from app.fleet.generation import GenerateRequest
from engine.sampling_params import SamplingParams

Break = Callable[[LoopbackReplica], None]


def engine_ends_it(replica: LoopbackReplica) -> None:
    for channel in list(replica.hub._channels.values()):
        replica.hub.close(channel, "a test broke it")


def stream_breaks(replica: LoopbackReplica) -> None:
    """What is on its way arrives, then the ingress sees an error and the engine a cancellation."""
    for call in list(replica.calls):
        if "pump" in repr(call.get_coro()):
            call.cancel()


def connection_breaks(replica: LoopbackReplica) -> None:
    """The stream, and every call."""
    for call in list(replica.calls):
        call.cancel()


BREAKS: list[Break] = [engine_ends_it, stream_breaks, connection_breaks]


def submitted(handle: LoopbackHandle) -> int:
    return sum(len(replica.engine.submitted) for replica in handle.replicas.values())


def nothing_kept(handle: LoopbackHandle) -> bool:
    return not any(replica.hub._attempts or replica.hub._kept for replica in handle.replicas.values())


async def one_stream_with_a_short_lease() -> tuple[
    LoopbackHandle, EngineClient, LoopbackReplica, asyncio.Future[list[int]]
]:
    """One replica that has a request of 300 tokens, and takes an ingress for lost after 1.5 s of silence."""
    handle, client = await started(1)
    (only,) = handle.replicas.values()
    only.hub._lease_s = 1.5
    job = asyncio.ensure_future(collect(client, request([1], 300)))
    await until(lambda: submitted(handle) == 1)
    return handle, client, only, job


@pytest.mark.parametrize("break_", BREAKS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_broken_channel_costs_no_computation(replicas: int, break_: Break) -> None:
    async def test() -> None:
        handle, client = await started(replicas)
        jobs = [asyncio.ensure_future(collect(client, request([index], 300))) for index in range(8)]
        async with stepping(handle):
            await until(lambda: submitted(handle) == 8)
            for _ in range(3):
                await asyncio.sleep(0.05)
                for replica in handle.replicas.values():
                    break_(replica)
                await asyncio.sleep(0.03)
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 300) for index in range(8)]
        assert submitted(handle) == 8
        assert not any(replica.engine.aborted for replica in handle.replicas.values())
        assert client.status()["resubmitted"] == 0
        await until(lambda: quiet(handle, client))
        await asyncio.sleep(KEEP_S + 1)
        assert nothing_kept(handle)
        await client.stop()

    run(test)


@pytest.mark.parametrize("turns", range(8))
def test_whenever_a_channel_breaks_its_watch_ends_with_it(turns: int) -> None:
    """Even while it is just being woken: ``asyncio.wait_for`` of Python 3.11 then loses the cancellation."""

    def watches() -> int:
        return sum("_watch" in repr(task.get_coro()) for task in asyncio.all_tasks())

    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        before = watches()
        channel = client._parts.channels._channels[only.name]
        stream_breaks(only)
        for _ in range(turns):
            await asyncio.sleep(0)
        channel.forget(channel._epoch, [1])  # wakes it
        await until(lambda: len(handle.fleet.ledger.routable()) == 1 and channel.is_open)
        await asyncio.sleep(3.0)
        assert watches() == before
        assert client.inspect()["call_faults"] == 0
        await client.stop()

    run(test)


def test_an_ingress_that_is_behind_says_that_it_lives_until_it_can_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        handle, client, only, job = await one_stream_with_a_short_lease()
        relay, late = client._parts.channels.relay, asyncio.Event()
        drain = relay._drain
        monkeypatch.setattr(relay, "_drain", lambda: late.is_set() and drain())
        engine_ends_it(only)
        await asyncio.sleep(4.0)
        late.set()
        drain()
        async with stepping(handle):
            assert await job == expected_tokens([1], 300)
        assert submitted(handle) == 1
        await client.stop()

    run(test)


@pytest.mark.serve_calls
def test_an_ingress_says_that_it_lives_until_the_next_channel_has_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        handle, client, only, job = await one_stream_with_a_short_lease()
        only.opens_after_s = RESUME_S - 1.0
        engine_ends_it(only)
        await asyncio.sleep(RESUME_S)
        beats = handle.beat.remote
        monkeypatch.setattr(
            handle.beat, "remote", lambda cid, epoch, *rest, **named: sent(epoch, cid, *rest, **named)
        )
        epochs: list[int] = []

        def sent(epoch: int, cid: str, *rest: object, **named: object) -> object:
            epochs.append(epoch)
            return beats(cid, epoch, *rest, **named)

        async with stepping(handle):
            await asyncio.sleep(3.0)
            assert await job == expected_tokens([1], 300)
        assert submitted(handle) == 1
        assert set(epochs) == {only.hub.inspect()[client._parts.channels.cid]["epoch"]}  # none of the old one
        await client.stop()

    run(test)


@pytest.mark.parametrize("count", [1, 5 * MAX_STALE])
def test_what_clients_that_leave_have_asked_for_ends_at_once(count: int) -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        stays, *leave = (asyncio.ensure_future(collect(client, request([i], 300))) for i in range(count + 1))
        await until(lambda: submitted(handle) == count + 1)
        left_at = loop_time()
        for job in leave:
            job.cancel()
        await until(lambda: len(only.engine.live) == 1)
        assert loop_time() - left_at < CALL_END_S / 2
        async with stepping(handle):
            assert await stays == expected_tokens([0], 300)
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


def test_sequences_and_waiting_requests_go_on_too() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        params = SamplingParams(max_tokens=60, temperature=0.0, n=3)
        jobs = [asyncio.ensure_future(collect_all(client, GenerateRequest("r", [7], params)))]
        jobs += [asyncio.ensure_future(collect_all(client, GenerateRequest("r", [8], params)))]
        await until(lambda: submitted(handle) == 2)
        connection_breaks(only)  # before the first token
        await asyncio.sleep(0.2)
        async with stepping(handle):
            await asyncio.sleep(0.02)
            engine_ends_it(only)
            for prompt, outputs in zip((7, 8), await asyncio.gather(*jobs), strict=True):
                assert outputs == [expected_tokens([prompt], 60, sequence) for sequence in range(3)]
        assert submitted(handle) == 2
        await client.stop()

    run(test)


def test_booked_work_goes_along_and_ends_with_its_request() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        job = asyncio.ensure_future(collect(client, request([3], 50)))
        await until(lambda: bool(only.engine.live))
        before = handle.fleet.ledger.load()
        epoch = only.hub.inspect()[client._parts.channels.cid]["epoch"]
        (attempt,) = client._parts.attempts.running
        engine_ends_it(only)
        await until(lambda: handle.fleet.ledger._bookings[attempt].route.epoch > epoch)
        assert handle.fleet.ledger.load() == before
        async with stepping(handle):
            assert await job == expected_tokens([3], 50)
        await until(lambda: quiet(handle, client))
        state = handle.fleet.ledger._replicas[only.name]
        assert (state.bookings, state.pending, state.pending_rows, state.pending_prefill) == (0, {}, 0, 0)
        await client.stop()

    run(test)


def test_nothing_is_sent_to_a_replica_whose_channel_is_broken() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        first = asyncio.ensure_future(collect(client, request([3], 50)))
        await until(lambda: bool(only.engine.live))
        open_channel, opened = handle.channel.remote, asyncio.Event()

        def remote(*arguments: object, **named: object) -> object:
            opened.set()
            return open_channel(*arguments, **named)

        handle.channel.remote = remote
        engine_ends_it(only)
        second = asyncio.ensure_future(collect(client, request([4], 5)))
        await opened.wait()
        assert submitted(handle) == 1
        async with stepping(handle):
            assert await first == expected_tokens([3], 50)
            assert await second == expected_tokens([4], 5)
        assert submitted(handle) == 2
        await client.stop()

    run(test)


@pytest.mark.parametrize("turns", [-1, *range(12)])
def test_a_client_that_leaves_while_the_channel_is_broken_leaves_nothing(turns: int) -> None:
    """It leaves shortly before the break, or so many turns of the loop after it."""

    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        stays, leaves = (asyncio.ensure_future(collect(client, request([i], 300))) for i in (1, 2))
        await until(lambda: submitted(handle) == 2)
        if turns < 0:
            leaves.cancel()
            await asyncio.sleep(CALL_END_S / 2)
        connection_breaks(only)
        for _ in range(turns):
            await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.sleep(3.0)  # with the next beat at the latest
        assert len(only.engine.live) == 1
        async with stepping(handle):
            assert await stays == expected_tokens([1], 300)
        await until(lambda: quiet(handle, client))
        assert nothing_kept(handle)
        assert submitted(handle) == 2
        await client.stop()

    run(test)


def test_a_client_that_leaves_after_its_call_was_lost_leaves_nothing() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        job = asyncio.ensure_future(collect(client, request([1], 300)))
        await until(lambda: bool(only.engine.live))
        connection_breaks(only)
        await asyncio.sleep(5.0)
        assert len(only.engine.live) == submitted(handle) == 1
        job.cancel()
        await asyncio.sleep(2.0)
        assert not only.engine.live
        assert quiet(handle, client)
        await client.stop()

    run(test)


def test_a_call_that_is_lost_alone_is_tried_again() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        job = asyncio.ensure_future(collect(client, request([1], 100)))
        await until(lambda: bool(only.engine.live))
        (attempt,) = client._parts.attempts.running
        epoch = handle.fleet.ledger._bookings[attempt].route.epoch
        engine_ends_it(only)
        await until(lambda: handle.fleet.ledger._bookings[attempt].route.epoch > epoch)
        for call in list(only.calls):  # soon after a resumption, too
            if "run_attempt" in repr(call.get_coro()):
                call.cancel()
        async with stepping(handle):
            assert await job == expected_tokens([1], 100)
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


@pytest.mark.parametrize("how", ["refused", "silent", "dead"])
def test_requests_move_when_their_attempts_cannot_be_resumed(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    async def test() -> None:
        handle, client = await started(2)
        first, second = handle.replicas.values()
        jobs = [asyncio.ensure_future(collect(client, request([index], 100))) for index in range(8)]
        await until(lambda: submitted(handle) == 8)
        handle.step()
        await asyncio.sleep(0.01)
        if how == "refused":
            first.hub.close_all("the engine died")
        elif how == "dead":
            first.kill()
        else:
            monkeypatch.setattr(handle.channel, "remote", lambda *_, **__: LoopbackStream(handle))
            engine_ends_it(first)
        broken_at = asyncio.get_running_loop().time()
        await until(lambda: len(second.engine.submitted) > 4)
        assert asyncio.get_running_loop().time() - broken_at < RESUME_S + 0.5
        async with stepping(handle):
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 100) for index in range(8)]
        await client.stop()

    run(test)


def test_a_channel_that_breaks_with_its_first_frame_is_not_resumed_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        job = asyncio.ensure_future(collect(client, request([1], 20)))
        await until(lambda: bool(only.engine.live))
        unpack, poisoned = wire.unpack_frame, 0

        def unpack_poisoned(data: bytes) -> wire.Frame:
            nonlocal poisoned
            frame = unpack(data)
            if frame.records and submitted(handle) == 1:
                poisoned += 1
                raise wire.WireError("planted")
            return frame

        monkeypatch.setattr(wire, "unpack_frame", unpack_poisoned)
        async with stepping(handle):
            assert await job == expected_tokens([1], 20)
        assert (poisoned, submitted(handle)) == (2, 2)
        await client.stop()

    run(test)


@pytest.mark.parametrize("seed", range(12))
def test_random_breaks_resumptions_and_cancellations(seed: int) -> None:
    """Whatever happens, each client sees exactly its tokens, once and in order, and nothing is left."""

    async def test() -> None:
        rng = random.Random(seed)
        handle, client = await started(rng.choice((1, 3)))

        async def one(index: int) -> None:
            await asyncio.sleep(rng.random() * 0.5)
            tokens = rng.randrange(1, 300)
            if rng.random() < 0.3:
                n = rng.randrange(2, 4)
                params = SamplingParams(max_tokens=tokens + n, temperature=0.0, n=n)
                outputs = await collect_all(client, GenerateRequest("r", [index], params))
                assert outputs == [expected_tokens([index], tokens + n, sequence) for sequence in range(n)]
            else:
                assert await collect(client, request([index], tokens)) == expected_tokens([index], tokens)

        jobs = [asyncio.ensure_future(one(index)) for index in range(60)]
        async with stepping(handle):
            for _ in range(25):
                await asyncio.sleep(rng.random() * 0.06)
                if rng.random() < 0.3:
                    rng.choice(jobs).cancel()
                rng.choice(BREAKS)(rng.choice(list(handle.replicas.values())))
            results = await asyncio.gather(*jobs, return_exceptions=True)
            assert [one for one in results if isinstance(one, Exception)] == []
            await until(lambda: quiet(handle, client))
        await asyncio.sleep(KEEP_S + 1)
        assert nothing_kept(handle)
        assert _consistent(handle, client)
        await client.stop()

    run(test)


def _consistent(handle: LoopbackHandle, client: EngineClient) -> bool:
    """No booking, attempt or fault is left."""
    states = handle.fleet.ledger._replicas.values()
    with contextlib.suppress(StopIteration):
        next(iter(client._parts.attempts.running))
        return False
    return not handle.fleet.ledger._bookings and all(
        (one.bookings, one.booked_tokens, one.pending_rows, one.acknowledged_rows) == (0, 0, 0, 0)
        for one in states
    )


@pytest.mark.parametrize("late", [False, True])
def test_an_attempt_whose_tokens_nobody_read_is_retried_and_is_no_fault(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record that ends it comes with the answer of its call, or later."""
    monkeypatch.setattr(channel_hub, "MAX_WAITING_TOKENS", 100)
    monkeypatch.setattr(channel_hub, "UNREAD_S", 1.0)
    faults: list[str] = []
    monkeypatch.setattr(Faults, "attempt_failed", lambda self, request, reason: faults.append(reason))

    async def test() -> None:
        handle, client = await started(1)
        (replica,) = handle.replicas.values()
        wanted = [request([1], 400, "long"), request([2], 150, "short")]
        jobs = [asyncio.ensure_future(collect(client, each)) for each in wanted]
        await until(lambda: len(replica.engine.live) == 2)
        handle.step()
        await asyncio.sleep(0.01)
        (channel,) = replica.hub._channels.values()
        channel.congested = True
        for _ in range(60):
            handle.step()
            await asyncio.sleep(0.001)
        await asyncio.sleep(1.0)
        handle.step()
        assert len(replica.engine.aborted) == 1
        await asyncio.sleep(2.0 if late else 0.0)
        channel.congested = False
        channel.wake.set()
        async with stepping(handle):
            assert await asyncio.gather(*jobs) == [expected_tokens([1], 400), expected_tokens([2], 150)]
        await until(lambda: quiet(handle, client))
        failures = [[attempt.failure for attempt in each.journal.attempts] for each in wanted]
        assert sorted(map(len, failures)) == [1, 2]
        reason = "its ingress forgot it" if late else channel_hub.UNREAD
        assert [each for journal in failures for each in journal if each] == [reason]
        assert sum(each.journal.retries for each in wanted) == 1
        assert client._parts.attempts.defects == 0
        await client.stop()

    run(test)
    assert faults == []
