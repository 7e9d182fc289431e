"""A request that kills its engine: two engines at most, and no other request with it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from engine_client_setting import collect, quiet, request, run, started, until
from loopback import LoopbackHandle, LoopbackReplica, expected_tokens, model, stepping

from app.api.errors import fault_of
from app.channel import wire
from app.channel.engine_attempt import run_attempt
from app.channel.engine_channel import Attempt
from app.channel.suspects import NEWS_S
from app.fleet.engine_client import EngineClient
from app.fleet.faults import PROOF_TOKENS
from app.fleet.generation import EngineDeathsError, GenerationError
from app.fleet.in_flight import InFlightRequest
from app.routing.load import LoadReport
from engine.request import TokenDelta
from engine.sampling_params import SamplingParams
from engine.scheduling.load_report import EngineLoad

LOAD = LoadReport(*[0] * 15, num_blocks=0, block_size=0, acknowledged=0)
POISON = 999
STEP_S, LONG = 0.004, 200  # tokens; a step is slow, so that few of them last until two engines have died

Death = Callable[[LoopbackHandle, LoopbackReplica], Coroutine[Any, Any, None]]


def members(handle: LoopbackHandle) -> list[str]:
    return [name for name, replica in handle.replicas.items() if not replica.dead]


async def killed(handle: LoopbackHandle, replica: LoopbackReplica) -> None:
    """The process dies; the controller learns of it later."""
    replica.kill()
    await asyncio.sleep(0.2)


async def removed_first(handle: LoopbackHandle, replica: LoopbackReplica) -> None:
    """Serve's router learns of the death before the channel does."""
    handle.announce(*[name for name in members(handle) if name != replica.name])
    await asyncio.sleep(0.1)
    replica.kill()


async def removed_at_once(handle: LoopbackHandle, replica: LoopbackReplica) -> None:
    replica.kill()
    handle.announce(*members(handle))


async def ended_by_itself(handle: LoopbackHandle, replica: LoopbackReplica) -> None:
    """The engine's thread dies; the calls return before the channel ends."""
    for attempt in list(replica.hub._attempts.values()):
        replica.hub._drop(attempt)
    await asyncio.sleep(0.05)
    replica.hub.close_all("the engine died: planted")
    await asyncio.sleep(0.1)
    replica.kill()


@contextlib.asynccontextmanager
async def fragile(handle: LoopbackHandle, death: Death, after: int = 0) -> AsyncIterator[list[str]]:
    """Engines that step, and die ``after`` tokens of a poisonous prompt; others replace them."""
    died: list[str] = []

    async def die(replica: LoopbackReplica) -> None:
        replica.engine.step = lambda: None  # type: ignore[method-assign]
        await death(handle, replica)
        handle.add()
        handle.announce(*members(handle))

    async def watch() -> None:
        dying = set()
        while True:
            for replica in list(handle.replicas.values()):
                for name, live in replica.engine.live.items():
                    poisonous = live.token_ids[0] == POISON
                    made = replica.engine.made[name].get(0, 0) - live.generated_before
                    if poisonous and made >= after and replica.name not in died:
                        died.append(replica.name)
                        dying.add(asyncio.ensure_future(die(replica)))
            await asyncio.sleep(0.001)

    watching = asyncio.ensure_future(watch())
    async with stepping(handle, STEP_S):
        yield died
    watching.cancel()


async def neighbors_of_poison(
    handle: LoopbackHandle, client: EngineClient, death: Death, after: int = 0, count: int = 16
) -> list[str]:
    """Run a poisonous request amid others, which must all complete; returns the engines that died."""
    jobs = [asyncio.ensure_future(collect(client, request([index], LONG))) for index in range(count)]
    async with fragile(handle, death, after) as died:
        await until(lambda: sum(len(replica.engine.live) for replica in handle.replicas.values()) == count)
        await asyncio.sleep(0.05)
        with pytest.raises(EngineDeathsError, match="2 engines died while they ran this request"):
            await collect(client, request([POISON], LONG, "poison"))
        assert await asyncio.gather(*jobs) == [expected_tokens([index], LONG) for index in range(count)]
        await until(lambda: quiet(handle, client))
    return died


def test_why_an_attempt_failed_is_for_the_log_and_not_for_the_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The texts of errors may name paths and addresses of the server."""

    def defect(*_: object) -> None:
        raise KeyError("/srv/models/private")

    async def test() -> None:
        handle, client = await started(1)
        (only,) = handle.replicas.values()
        monkeypatch.setattr(only.engine, "submit", defect)
        with pytest.raises(GenerationError, match="5 attempts at this request failed") as failed:
            await collect(client, request([1], 5, "r"))
        assert "private" not in str(failed.value)
        await client.stop()

    run(test)
    told = [record.getMessage() for record in caplog.records if record.name == "app.fleet.faults"]
    assert ["request r" in line and "private" in line for line in told] == [True]


@pytest.mark.parametrize("death", [killed, removed_first, removed_at_once, ended_by_itself])
def test_a_poisonous_request_kills_two_engines_and_no_neighbor(death: Death) -> None:
    async def test() -> None:
        handle, client = await started(4)
        assert len(await neighbors_of_poison(handle, client, death)) == 2
        await client.stop()

    run(test)


@pytest.mark.parametrize("after", [1, 7, 30])
def test_what_kills_after_some_tokens_does_so_twice(after: int) -> None:
    async def test() -> None:
        handle, client = await started(4)
        assert len(await neighbors_of_poison(handle, client, removed_at_once, after)) == 2
        await client.stop()

    run(test)


@pytest.mark.parametrize("engines", [1, 2])
def test_two_engines_are_enough_to_convict(engines: int) -> None:
    """Or one and its successor."""

    async def test() -> None:
        handle, client = await started(engines)
        assert len(await neighbors_of_poison(handle, client, removed_at_once, count=6)) == 2
        await client.stop()

    run(test)


def test_suspects_run_one_to_a_replica_the_youngest_first() -> None:
    async def test() -> None:
        handle, client = await started(3)
        victim = handle.replicas["replica-0"]
        jobs = [asyncio.ensure_future(collect(client, request([index], 500))) for index in range(12)]
        await until(lambda: len(victim.engine.live) == 4)
        for _ in range(40):
            handle.step()
        await client.cordon(["replica-1", "replica-2"], 600)
        jobs.append(asyncio.ensure_future(collect(client, request([78], 500))))
        await until(lambda: len(victim.engine.live) == 5)
        await client.cordon([], 0)
        await until(lambda: sum(live.num_tokens for live in client._requests) == 480)
        there = [live.token_ids[0] for live in victim.engine.live.values()]
        victim.kill()
        await until(lambda: sum(live.suspect for live in client._requests) == len(there))
        await asyncio.sleep(2.0)  # no engine steps: nobody is cleared
        placed = [
            live.token_ids[0]
            for replica in handle.replicas.values()
            if not replica.dead
            for live in replica.engine.live.values()
            if live.token_ids[0] in there
        ]
        assert len(placed) == 2
        assert 78 in placed
        async with stepping(handle):
            await asyncio.gather(*jobs)
        assert not any(state.alone for state in handle.fleet.ledger._replicas.values())
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


async def foreign_suspect(replica: LoopbackReplica, proof_tokens: int) -> tuple[Attempt, AsyncIterator[bytes]]:
    """Another ingress has a suspect there; every ingress has been told."""
    replica.hub._load = EngineLoad(1, 0, 0, 0, 0, 0, 100.0, 0.5, 0, 0, 0, 8, 0, 0, 0)
    stream = replica.hub.stream("other", 1)
    await anext(stream)
    attempt = replica.hub.attach("other", 1, 1, "other's")
    replica.hub.suspect(attempt, proof_tokens)
    return attempt, stream


def test_what_dies_of_another_ingresss_suspect_is_blamed_on_nobody_here() -> None:
    async def test() -> None:
        handle, client = await started(2)
        first = handle.replicas["replica-0"]
        jobs = [asyncio.ensure_future(collect(client, request([index], 100))) for index in range(6)]
        await until(lambda: len(first.engine.live) == 3)
        _, stream = await foreign_suspect(first, 10)
        await until(lambda: handle.fleet.ledger.foreign_suspects(first.name))
        first.kill()
        await until(lambda: handle.fleet.ledger.routable() == ["replica-1"])
        assert [(live.deaths, live.suspect) for live in client._requests] == [(0, False)] * 6
        assert not handle.fleet.ledger.foreign_suspects(first.name)
        async with stepping(handle):
            await asyncio.gather(*jobs)
        await stream.aclose()  # type: ignore[attr-defined]
        await client.stop()

    run(test)


@pytest.mark.parametrize("ends", ["cleared", "aborted"])
def test_a_suspect_does_not_join_one_of_another_ingress(ends: str) -> None:
    async def test() -> None:
        handle, client = await started(2)
        victim, other = handle.replicas.values()
        attempt, stream = await foreign_suspect(other, PROOF_TOKENS)
        await until(lambda: handle.fleet.ledger.foreign_suspects(other.name))
        job = asyncio.ensure_future(collect(client, request([7], 60)))
        if not victim.engine.live:
            await client.cordon([other.name], 600)
            job.cancel()
            job = asyncio.ensure_future(collect(client, request([7], 60)))
        await until(lambda: len(victim.engine.live) == 1)
        victim.kill()
        await until(lambda: [live.suspect for live in client._requests] == [True])
        await client.cordon([], 0)
        await asyncio.sleep(2.0)
        assert not other.engine.live, "it waits for its turn"
        if ends == "cleared":
            other.hub.deliver([TokenDelta("other's", 0, (1,) * PROOF_TOKENS, None, 0)])
        else:
            other.hub.detach(attempt)
            other.hub._drop(attempt)
        await until(lambda: len(other.engine.live) == 1)
        async with stepping(handle):
            assert await job == expected_tokens([7], 60)
        await stream.aclose()  # type: ignore[attr-defined]
        await client.stop()

    run(test)


def test_an_engine_runs_one_suspect_at_a_time_whatever_ingresses_believe() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (replica,) = handle.replicas.values()
        attempt, stream = await foreign_suspect(replica, 2)
        payload = wire.pack_submission(
            wire.Submission("r", 2, [1], SamplingParams(max_tokens=5, seed=1), proof_tokens=4)
        )
        outcome = await run_attempt(replica.hub, replica.engine, "other", 1, payload)
        assert "may have killed an engine" in outcome["refused"]
        assert set(replica.hub._attempts) == {"other's"}
        assert not replica.engine.live
        replica.hub.deliver([TokenDelta("other's", 0, (1, 2), None, 0)])
        leaving = asyncio.ensure_future(run_attempt(replica.hub, replica.engine, "other", 1, payload))
        await asyncio.sleep(NEWS_S / 2)
        assert replica.hub._suspects.count == 1
        assert not replica.engine.live, "other ingresses have yet to hear of it"
        leaving.cancel()
        await asyncio.wait((leaving,))
        assert replica.hub._suspects.count == 0
        given_up = asyncio.ensure_future(run_attempt(replica.hub, replica.engine, "other", 1, payload))
        await asyncio.sleep(NEWS_S / 2)
        replica.hub.beat("other", 1, 0, stale=[2])
        assert "forgot it" in (await given_up)["refused"]
        assert not replica.engine.submitted, "nobody would end it"
        running = asyncio.ensure_future(run_attempt(replica.hub, replica.engine, "other", 1, payload))
        async with stepping(handle):
            assert await running == {"generated": 5}
        replica.hub.detach(attempt)
        await stream.aclose()  # type: ignore[attr-defined]
        await client.stop()

    run(test)


def test_a_suspect_waits_for_the_news_to_spread_only_if_there_are_other_ingresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.channel.engine_attempt.NEWS_S", 1e6)

    async def test() -> None:
        handle, client = await started(1)
        (first,) = handle.replicas.values()
        job = asyncio.ensure_future(collect(client, request([7], 60)))
        await until(lambda: len(first.engine.live) == 1)
        first.kill()
        handle.announce(handle.add().name)
        async with stepping(handle):
            assert await job == expected_tokens([7], 60)
        await client.stop()

    run(test)


def test_a_cleared_neighbor_is_not_blamed_for_what_a_suspect_did() -> None:
    async def test() -> None:
        handle, client = await started(1)
        (first,) = handle.replicas.values()
        jobs = [asyncio.ensure_future(collect(client, request([index], 300))) for index in range(2)]
        await until(lambda: len(first.engine.live) == 2)
        second = handle.add()
        await until(lambda: len(handle.fleet.ledger.routable()) == 2)
        first.kill()
        await until(lambda: len(second.engine.live) == 1)
        (cleared,) = (live.token_ids[0] for live in second.engine.live.values())
        for _ in range(PROOF_TOKENS):
            second.engine.step()
        await until(lambda: len(second.engine.live) == 2)
        assert sorted(live.suspect for live in client._requests) == [False, True]
        second.kill()
        handle.announce(handle.add().name)
        async with stepping(handle):
            with pytest.raises(EngineDeathsError):
                await jobs[1 - cleared]
            assert await jobs[cleared] == expected_tokens([cleared], 300)
        await client.stop()

    run(test)


def test_suspects_do_not_wait_for_ever_to_be_alone() -> None:
    async def test() -> None:
        handle, client = await started(2, unavailable_after_s=10.0)
        victim, other = handle.replicas.values()
        jobs = [asyncio.ensure_future(collect(client, request([index], 50))) for index in range(8)]
        await until(lambda: len(victim.engine.live) == 4)
        victim.kill()
        await until(lambda: len(other.engine.live) == 5)
        await asyncio.sleep(4.0)
        assert len(other.engine.live) == 5
        await asyncio.sleep(2.0)
        assert len(other.engine.live) == 8
        async with stepping(handle):
            assert await asyncio.gather(*jobs) == [expected_tokens([index], 50) for index in range(8)]
        await client.stop()

    run(test)


def test_a_suspect_without_a_replica_of_its_model_holds_up_no_other() -> None:
    async def test() -> None:
        handle, client = await started(1, unavailable_after_s=60.0)
        (first,) = handle.replicas.values()
        young = asyncio.ensure_future(collect(client, request([3], 50)))
        await until(lambda: bool(first.engine.live))
        for _ in range(3):
            handle.step()
        await until(lambda: [live.num_tokens for live in client._requests] == [3])
        other = handle.add(weights=500)
        await until(lambda: len(handle.fleet.ledger.routable()) == 2)
        await client.cordon([first.name], 600, after_s=600)
        old = asyncio.ensure_future(collect(client, request([4], 50)))
        await until(lambda: bool(other.engine.live))
        for _ in range(9):
            other.engine.step()
        await until(lambda: sorted(live.num_tokens for live in client._requests) == [3, 9])
        await client.cordon([], 0)
        first.kill()
        other.kill()
        handle.announce(handle.add(weights=500).name)
        async with stepping(handle):
            assert await old == expected_tokens([4], 50, weights=500)
            assert not young.done()
            handle.add()
            handle.announce(*members(handle))
            assert await young == expected_tokens([3], 50)
        await client.stop()

    run(test)


@pytest.mark.parametrize("how", ["has lost its replica", "is placed", "has waited too long"])
def test_when_the_first_suspect_no_longer_waits_for_its_turn_the_next_one_looks(how: str) -> None:
    async def test() -> None:
        handle, client = await started(1)
        handle.add(weights=500)
        ledger, faults = handle.fleet.ledger, client._parts.faults
        await until(lambda: len(ledger.routable()) == 2)
        mine, others = (state.route for state in ledger._replicas.values())
        assert mine is not None
        assert others is not None
        first, second = (InFlightRequest(request([1]), arrived=arrived) for arrived in (2.0, 1.0))
        first.model, second.model = model(), model(500)
        client.on_load(mine, replace(LOAD, suspects=1))
        faults.replica_died([first, second], "planted")
        waiting = asyncio.ensure_future(client._waiter.wait_until(lambda: faults.may_run(second), 60.0))
        await asyncio.sleep(1.0)
        assert not faults.may_run(second)
        if how == "has lost its replica":
            client.on_suspect(mine, True)
        elif how == "is placed":
            client.on_load(mine, LOAD)
            assert faults.may_run(first)
            faults.begin(1, first)
            ledger.expect(1)
            ledger.book(first.routing_meta(1))
        else:
            faults.clear(first)
        client.on_load(others, LOAD)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting.done()
        assert await waiting
        await client.stop()

    run(test)


def test_a_suspect_whose_client_leaves_makes_room() -> None:
    async def test() -> None:
        handle, client = await started(2)
        victim, other = handle.replicas.values()
        jobs = [asyncio.ensure_future(collect(client, request([index], 50))) for index in range(8)]
        await until(lambda: len(victim.engine.live) == 4)
        victim.kill()
        await until(lambda: len(other.engine.live) == 5)
        for live in [live for live in client._requests if live.suspect]:
            jobs[live.request.token_ids[0]].cancel()
        await asyncio.sleep(0.1)
        assert (len(other.engine.live), client._parts.faults._waiting) == (4, [])
        async with stepping(handle):
            await asyncio.gather(*jobs, return_exceptions=True)
        await until(lambda: quiet(handle, client))
        await client.stop()

    run(test)


def test_a_replica_that_is_ended_after_its_time_to_stop_has_not_died() -> None:
    async def test() -> None:
        handle, client = await started(1, drain_timeout_s=5.0)
        (old,) = handle.replicas.values()
        job = asyncio.ensure_future(collect(client, request([3], 50)))
        await until(lambda: bool(old.engine.live))
        handle.announce()
        await asyncio.sleep(6.0)
        old.kill()
        await until(lambda: not handle.fleet.ledger.routable())
        assert [(live.deaths, live.suspect) for live in client._requests] == [(0, False)]
        handle.announce(handle.add().name)
        async with stepping(handle):
            assert await job == expected_tokens([3], 50)
        await client.stop()

    run(test)


def test_what_the_ingress_brought_about_is_no_death() -> None:
    async def test() -> None:
        handle, client = await started(2)
        job = asyncio.ensure_future(collect(client, request([3], 50)))
        await until(lambda: any(replica.engine.live for replica in handle.replicas.values()))
        (attempt,) = client._parts.attempts.running
        booking = handle.fleet.ledger.booking(attempt)
        assert booking is not None
        client.on_closed(booking.route, "no beat came", False)
        assert [(live.deaths, live.suspect) for live in client._requests] == [(0, False)]
        async with stepping(handle):
            assert await job == expected_tokens([3], 50)
        await client.stop()

    run(test)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_dies_a_request_ends_well_or_engines_died_under_it_twice(seed: int) -> None:
    async def test() -> None:
        rng = random.Random(seed)
        handle, client = await started(4, unavailable_after_s=20.0)
        prompts = [[index, seed] for index in range(24)]
        jobs = [asyncio.ensure_future(collect(client, request(prompt, 400))) for prompt in prompts]
        async with stepping(handle):
            for _ in range(6):
                await asyncio.sleep(rng.random() * 0.1)
                victim = handle.replicas[rng.choice(members(handle))]
                handle.add()
                await rng.choice((killed, removed_at_once, removed_first))(handle, victim)
                handle.announce(*members(handle))
            for prompt, outcome in zip(
                prompts, await asyncio.gather(*jobs, return_exceptions=True), strict=True
            ):
                assert isinstance(outcome, EngineDeathsError) or outcome == expected_tokens(prompt, 400)
            await until(lambda: quiet(handle, client))
        assert not any(state.alone for state in handle.fleet.ledger._replicas.values())
        await client.stop()

    run(test)


def test_clients_are_told_not_to_send_a_poisonous_request_again() -> None:
    fault = fault_of(EngineDeathsError("2 engines died"))
    response = fault.to_response()
    assert (fault.status, fault.code, response.headers["x-should-retry"]) == (500, "engine_died", "false")
