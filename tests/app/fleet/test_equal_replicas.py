"""Replicas of other weights, other tokenizers and other pools: each request goes where it can and may run."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from engine_client_setting import collect, quiet, request, run, started, until
from loopback import LIMITS, LoopbackHandle, expected_tokens, model, stepping

from app.fleet.engine_client import EngineClient
from app.fleet.fleet_limits import FleetLimits, LimitsRecord
from app.fleet.generation import GenerateRequest, UnavailableError
from app.routing.requirement import ReplicaProfile, Requirement
from engine.errors import InvalidRequestError
from engine.models.identity import ModelIdentity
from engine.sampling_params import SamplingParams

SMALL = replace(LIMITS, num_blocks=64)
LARGE = replace(LIMITS, num_blocks=256)
LONG = [1] * 1500  # 94 blocks


async def answer(client: EngineClient, wanted: GenerateRequest) -> tuple[list[int], set[str]]:
    """The tokens, and the fingerprints that came with them."""
    tokens: list[int] = []
    fingerprints = set()
    async for delta in client.generate(wanted):
        tokens += delta.token_ids
        fingerprints.add(delta.fingerprint)
    return tokens, fingerprints


def test_a_stream_waits_for_its_own_model_and_never_continues_with_another() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (old,) = handle.replicas.values()
        job = asyncio.ensure_future(answer(client, request([3], 400)))
        async with stepping(handle):
            await until(lambda: bool(old.engine.live))
            await asyncio.sleep(0.05)
            other = handle.add(weights=500)
            await until(lambda: len(handle.fleet.ledger.routable()) == 2)
            old.kill()
            handle.announce(other.name)
            later = await answer(client, request([3], 40))
            assert later == (expected_tokens([3], 40, weights=500), {model(500).fingerprint})
            assert not job.done()
            handle.announce(other.name, handle.add().name)
            assert await job == (expected_tokens([3], 400), {model().fingerprint})
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


def test_a_stream_whose_model_does_not_come_back_says_so() -> None:
    async def test() -> None:
        handle, client = await started(1, unavailable_after_s=5.0)
        (old,) = handle.replicas.values()
        job = asyncio.ensure_future(answer(client, request([3], 400)))
        await until(lambda: bool(old.engine.live))
        for _ in range(3):
            handle.step()
        await until(lambda: any(live.num_tokens == 3 for live in client._requests))
        handle.add(weights=500)
        await until(lambda: len(handle.fleet.ledger.routable()) == 2)
        old.kill()
        expected = (
            rf"first 3 tokens \({model().fingerprint}\) came back within 5 s, and no other may continue them"
        )
        async with stepping(handle):
            with pytest.raises(UnavailableError, match=expected):
                await job
        await client.stop()

    run(test)


def test_a_request_without_a_token_may_run_on_another_model() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (old,) = handle.replicas.values()
        job = asyncio.ensure_future(answer(client, request([3], 40)))
        await until(lambda: bool(old.engine.live))
        old.kill()
        handle.announce(handle.add(weights=500).name)
        async with stepping(handle):
            assert await job == (expected_tokens([3], 40, weights=500), {model(500).fingerprint})
        await client.stop()

    run(test)


def test_a_leaving_replica_keeps_the_streams_that_no_other_may_continue() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (old,) = handle.replicas.values()
        jobs = [asyncio.ensure_future(answer(client, request([index], 3000))) for index in range(4)]
        async with stepping(handle):
            await until(lambda: len(old.engine.live) == 4)
            await asyncio.sleep(0.05)
            new = handle.add(weights=500)
            await until(lambda: len(handle.fleet.ledger.routable()) == 2)
            handle.announce(new.name)
            assert await asyncio.gather(*jobs) == [
                (expected_tokens([index], 3000), {model().fingerprint}) for index in range(4)
            ]
            assert not old.engine.aborted
            await until(lambda: not old.hub.inspect())
        await client.stop()

    run(test)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_fails_each_answer_is_wholly_one_models(seed: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        handle, client = await started(2, unavailable_after_s=20.0)
        for _ in range(2):
            handle.add(weights=500)
        await until(lambda: len(handle.fleet.ledger.routable()) == 4)
        prompts = [[index, seed] for index in range(24)]
        jobs = [asyncio.ensure_future(answer(client, request(prompt, 300))) for prompt in prompts]
        async with stepping(handle):
            for fault in rng.sample(("kill", "leave", "leave", "leave"), 4):
                await asyncio.sleep(rng.random() * 0.2)
                members = [name for name, replica in handle.replicas.items() if not replica.dead]
                victim = handle.replicas[rng.choice(members)]
                members.remove(victim.name)
                members.append(handle.add(weights=victim.engine.weights).name)
                if fault == "kill":
                    victim.kill()
                handle.announce(*members)
            for prompt, (tokens, fingerprints) in zip(prompts, await asyncio.gather(*jobs), strict=True):
                (weights,) = (weights for weights in (0, 500) if fingerprints == {model(weights).fingerprint})
                assert tokens == expected_tokens(prompt, 300, weights=weights)
            await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


def test_replicas_of_another_tokenizer_get_nothing() -> None:
    async def test() -> None:
        handle = LoopbackHandle(2)
        client = EngineClient(handle, unavailable_after_s=2.0, tokenizer="another")
        await client.start()
        await until(lambda: list(client.status()["channels"].values()) == ["open", "open"])
        status = client.status()
        assert (status["routable"], status["foreign"]) == (0, sorted(handle.replicas))
        assert status["pool_tokens"] == []
        with pytest.raises(UnavailableError, match="2 replicas have another tokenizer or chat template"):
            await collect(client, request([1]))
        assert client.limits() is None
        handle.announce()
        await until(lambda: not client.status()["channels"])
        assert client.status()["foreign"] == []
        await client.stop()

    run(test)


def test_a_long_prompt_goes_to_the_replica_whose_pool_holds_it() -> None:
    async def test() -> None:
        handle, client = await started(0)
        small, large = handle.add(SMALL), handle.add(LARGE)
        await until(lambda: len(handle.fleet.ledger.routable()) == 2)
        assert client.status()["pool_tokens"] == [4096, 1024]
        jobs = [asyncio.ensure_future(collect(client, request(LONG, 20, f"r{index}"))) for index in range(4)]
        await until(lambda: len(large.engine.live) == 4)
        assert not small.engine.live
        async with stepping(handle):
            assert await asyncio.gather(*jobs) == [expected_tokens(LONG, 20)] * 4
        too_long = [1] * 5000
        with pytest.raises(InvalidRequestError, match="KV pool of 4096 tokens") as refusal:
            await collect(client, request(too_long, 20))
        assert refusal.value.code == "kv_pool_exceeded"
        await client.stop()

    run(test)


def test_a_large_replica_that_died_is_expected_back_and_one_that_was_stopped_is_not() -> None:
    async def test() -> None:
        handle, client = await started(0, unavailable_after_s=30.0)
        small, large = handle.add(SMALL), handle.add(LARGE)
        await until(lambda: len(handle.fleet.ledger.routable()) == 2)
        large.kill()
        await until(lambda: len(handle.fleet.ledger.routable()) == 1)
        handle.announce(small.name)
        job = asyncio.ensure_future(collect(client, request(LONG, 20)))
        async with stepping(handle):
            await asyncio.sleep(1.0)
            assert not job.done()
            again = handle.add(LARGE)
            handle.announce(small.name, again.name)
            assert await job == expected_tokens(LONG, 20)
            await until(lambda: len(handle.fleet.ledger.routable()) == 2)
            handle.announce(small.name)
            await until(lambda: not again.hub.inspect())
        client._limits.expected_s = 0.0  # the first one has been replaced
        with pytest.raises(InvalidRequestError, match="KV pool of 1024 tokens"):
            await collect(client, request(LONG, 20))
        await client.stop()

    run(test)


def test_limits_are_those_of_known_replicas_and_of_dead_ones_for_a_while() -> None:
    now = [0.0]
    record = LimitsRecord(60.0, lambda: now[0])
    assert record.current() is None
    record.opened("a", SMALL)
    record.opened("b", LARGE)
    assert record.current() == FleetLimits((LARGE, SMALL))
    record.died("b")
    record.keep({"a"})
    assert record.current() == FleetLimits((LARGE, SMALL))
    now[0] = 61.0
    assert record.current() == FleetLimits((SMALL,))
    record.keep(set())
    assert record.current() == FleetLimits((SMALL,)), "the last known ones"


def test_a_requirement_names_what_a_replica_lacks() -> None:
    params = SamplingParams(max_tokens=100)
    profile = ReplicaProfile(SMALL, ModelIdentity("a", "float32", "t"))
    assert Requirement(900, params).met_by(profile)
    assert not Requirement(1000, params).met_by(profile)
    assert Requirement(1000, params).met_by(None)
    for changed, met in (
        ({}, True),
        ({"revision": "b"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"tokenizer": "u"}, False),
        ({"output_version": 0}, True),
    ):
        assert Requirement(900, params, replace(profile.model, **changed)).met_by(profile) is met  # type: ignore[arg-type]
