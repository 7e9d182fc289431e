"""A request outlives its replica: whatever breaks, no token is lost or doubled, and no client hangs."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from engine_client_setting import break_at_random, collect, quiet, request, run, started, until
from loopback import LIMITS, expected_tokens, stepping

from app.fleet.fleet_limits import FleetLimits
from app.fleet.generation import GenerateRequest, UnavailableError
from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams


def test_many_requests_share_two_channels() -> None:
    async def test() -> None:
        handle, client = await started(2)
        async with stepping(handle):
            prompts = [[index, 1, 2] for index in range(64)]
            results = await asyncio.gather(*(collect(client, request(prompt)) for prompt in prompts))
        assert results == [expected_tokens(prompt, 30) for prompt in prompts]
        for replica in handle.replicas.values():
            (channel,) = replica.hub.inspect().values()
            assert channel["frames"] < 31 * 4, "one frame a step, not one a request"
        await until(lambda: quiet(handle, client))
        assert client.limits() == FleetLimits((LIMITS,))
        await client.stop()

    run(test)


def test_killed_replica_costs_no_token() -> None:
    async def test() -> None:
        handle, client = await started(2)
        prompts = [[index, 5] for index in range(16)]
        jobs = [asyncio.ensure_future(collect(client, request(prompt, 50))) for prompt in prompts]
        async with stepping(handle):
            victim = next(iter(handle.replicas.values()))
            await until(lambda: len(victim.engine.live) == 8)
            await asyncio.sleep(0.01)
            victim.kill()
            assert await asyncio.gather(*jobs) == [expected_tokens(prompt, 50) for prompt in prompts]
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


def test_leaving_replica_is_emptied_and_closed_at_once() -> None:
    async def test() -> None:
        handle, client = await started(2)
        first, second = handle.replicas.values()
        jobs = [asyncio.ensure_future(collect(client, request([index], 2000))) for index in range(8)]
        async with stepping(handle):
            await until(lambda: len(first.engine.live) == 4)
            await asyncio.sleep(0.01)
            handle.announce(second.name)
            await until(lambda: not first.hub.inspect())
            await asyncio.sleep(0.001)
            assert not first.engine.live
            assert not any(job.done() for job in jobs)
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 2000) for index in range(8)]
        assert client.status()["channels"] == {second.name: "open"}
        await client.stop()

    run(test)


def test_last_replica_finishes_its_requests_before_its_channel_closes() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        job = asyncio.ensure_future(collect(client, request([3], 100)))
        async with stepping(handle):
            await until(lambda: bool(only.engine.live))
            handle.announce()
            assert await job == expected_tokens([3], 100)
            await until(lambda: not only.hub.inspect())
        assert client.status()["channels"] == {}
        await client.stop()

    run(test)


def test_requests_on_a_leaving_replica_move_when_another_comes() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (old,) = handle.replicas.values()
        job = asyncio.ensure_future(collect(client, request([3], 600)))
        async with stepping(handle):
            await until(lambda: bool(old.engine.live))
            handle.announce()
            await asyncio.sleep(0.01)
            new = handle.add()
            handle.announce(new.name)
            await until(lambda: not old.hub.inspect())
            assert new.engine.live or not old.engine.live
            assert await job == expected_tokens([3], 600)
        await client.stop()

    run(test)


def test_vanished_clients_leave_nothing() -> None:
    async def test() -> None:
        rng = random.Random(3)
        handle, client = await started(2)

        async def vanish(index: int) -> None:
            job = asyncio.ensure_future(collect(client, request([index % 900], 500)))
            await asyncio.sleep(rng.random() * 0.02)
            job.cancel()
            await asyncio.wait({job})

        async with stepping(handle):
            for start in range(0, 1000, 100):
                await asyncio.gather(*(vanish(start + index) for index in range(100)))
            await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


def test_no_replica_ends_in_an_error_after_the_bounded_time() -> None:
    async def test() -> None:
        _, client = await started(0, unavailable_after_s=0.05)
        with pytest.raises(UnavailableError, match=r"within 0\.05 s"):
            await collect(client, request([1]))
        await client.stop()

    run(test)


def test_all_replicas_dead_amid_a_stream_ends_in_an_error() -> None:
    async def test() -> None:
        handle, client = await started(2, unavailable_after_s=0.3)
        job = asyncio.ensure_future(collect(client, request([1], 5000)))
        async with stepping(handle):
            await until(lambda: any(replica.engine.live for replica in handle.replicas.values()))
            for replica in handle.replicas.values():
                replica.kill()
            with pytest.raises(UnavailableError):
                await job
        assert client.status()["live_requests"] == 0
        await client.stop()

    run(test)


def test_what_was_checked_by_the_same_limits_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        handle, client = await started(1)
        limits = client.limits()
        assert limits is not None
        times: list[int] = []

        def validate(limits: FleetLimits, token_ids: list[int], params: SamplingParams) -> int:
            times.append(len(token_ids))
            return 0

        monkeypatch.setattr(FleetLimits, "validate", validate)
        other = FleetLimits((replace(limits.each[0], max_model_len=7),))
        async with stepping(handle):
            for size, checked in ((1, None), (2, other), (3, limits), (4, FleetLimits(limits.each))):
                wanted = replace(request([5] * size), checked=checked)
                assert await collect(client, wanted) == expected_tokens([5] * size, 30)
        assert times == [1, 2]
        await client.stop()

    run(test)


def test_impossible_requests_are_refused_before_any_token() -> None:
    async def test() -> None:
        _, client = await started(1)
        with pytest.raises(InvalidRequestError, match="context length"):
            await collect(client, request([1], LIMITS.max_model_len))
        with pytest.raises(InvalidRequestError, match="vocabulary"):
            await collect(client, request([LIMITS.vocab_size]))
        await client.stop()

    run(test)


def test_seed_is_drawn_once_for_all_replicas() -> None:
    async def test() -> None:
        handle, client = await started(2)
        wanted = GenerateRequest("r", [1], SamplingParams(max_tokens=600))
        job = asyncio.ensure_future(collect(client, wanted))
        seeds = []
        async with stepping(handle):
            for _ in range(2):
                await until(lambda: any(r.engine.live for r in handle.replicas.values() if not r.dead))
                busy = next(r for r in handle.replicas.values() if r.engine.live and not r.dead)
                seeds.append(next(iter(busy.engine.live.values())).params.seed)
                if len(seeds) == 1:
                    busy.kill()
            assert await job == expected_tokens([1], 600)
        assert seeds[0] is not None
        assert seeds[0] == seeds[1]
        await client.stop()

    run(test)


def test_stopping_the_client_ends_its_requests_and_channels() -> None:
    async def test() -> None:
        handle, client = await started(2)
        job = asyncio.ensure_future(collect(client, request([1], 5000)))
        async with stepping(handle):
            await until(lambda: any(replica.engine.live for replica in handle.replicas.values()))
            await client.stop()
            with pytest.raises(UnavailableError, match="shutting down"):
                await job
            await until(lambda: not any(replica.hub.inspect() for replica in handle.replicas.values()))
            assert not any(replica.engine.live for replica in handle.replicas.values())

    run(test)


def test_a_request_whose_keys_are_made_while_the_client_stops_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        handle, client = await started(1)
        made = asyncio.Event()

        async def keys(_: GenerateRequest) -> list[int]:
            await made.wait()
            return []

        monkeypatch.setattr(client._parts.attempts, "_block_keys", keys)
        jobs = [asyncio.ensure_future(collect(client, request([1], 50))) for _ in range(2)]
        await asyncio.sleep(0.01)
        jobs[1].cancel()
        await client.stop()
        made.set()
        with pytest.raises(UnavailableError, match="shutting down"):
            await jobs[0]
        with pytest.raises(UnavailableError, match="shutting down"):
            await collect(client, request([1], 50))
        assert (jobs[1].cancelled() or jobs[1].cancelling(), client.status()["live_requests"]) == (True, 0)
        assert not handle.fleet.ledger.load()

    run(test)


@pytest.mark.parametrize("seed", range(5))
def test_random_faults_lose_and_double_nothing(seed: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        handle, client = await started(3, unavailable_after_s=5.0)
        prompts = [[index, seed] for index in range(24)]
        jobs = [asyncio.ensure_future(collect(client, request(prompt, 300))) for prompt in prompts]
        async with stepping(handle):
            await break_at_random(handle, rng)
            assert await asyncio.gather(*jobs) == [expected_tokens(prompt, 300) for prompt in prompts]
            await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)
