"""Requests that wait or end together, and those that have ended: what each costs, and what is left of it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterable
from dataclasses import replace

import pytest
from engine_client_setting import collect, request, run, started, until
from loopback import LIMITS, expected_tokens, model, stepping

from app.channel import channel_hub
from app.fleet.engine_client import EngineClient
from app.fleet.faults import Faults
from app.fleet.generation import Delta
from app.fleet.in_flight import InFlightRequest
from app.routing.fleet import Fleet
from app.routing.load import LoadReport
from app.routing.replica_state import Route
from app.routing.requirement import ReplicaProfile
from engine.errors import QuireError
from engine.request import TokenDelta
from engine.token_logprobs import TokenLogprobs

MANY = 60

LOAD = LoadReport(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, 0)


class Prompt(list[int]):
    """A list with weak references."""


class Asked:
    """Counts what is asked of a ledger."""

    def __init__(self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("routable", "booking"):
            monkeypatch.setattr(fleet.ledger, name, self._counted(getattr(fleet.ledger, name)))

    def _counted(self, method):  # type: ignore[no-untyped-def]
        def counted(*arguments, **named):  # type: ignore[no-untyped-def]
            self.count += 1
            return method(*arguments, **named)

        return counted


@pytest.mark.parametrize(("is_open", "unable"), [(False, 0), (True, 0), (True, MANY // 2), (True, MANY)])
def test_each_of_many_suspects_that_ask_for_their_turn_looks_at_few_others(
    monkeypatch: pytest.MonkeyPatch, is_open: bool, unable: int
) -> None:
    """One at a time; the first ones, ``unable``, have a model that no replica has."""

    async def test() -> None:
        fleet = Fleet()
        fleet.set_members(frozenset({"a"}))
        faults = Faults(fleet, lambda: None)
        suspects = [InFlightRequest(request([place]), arrived=-float(place)) for place in range(MANY)]
        for place, suspect in enumerate(suspects):
            suspect.model = model(500 if place < unable else 0)
        if is_open:
            fleet.ledger.open(Route("a", 1), ReplicaProfile(LIMITS, model()))
        able = suspects[unable:] if is_open else []
        faults.replica_died(suspects, "planted")
        asked = Asked(fleet, monkeypatch)
        running = [suspect for suspect in suspects if faults.may_run(suspect)]
        assert running == able[:1]
        for suspect in running:
            faults.begin(1, suspect)
        for _ in range(3):
            assert not any(faults.may_run(suspect) for suspect in suspects if suspect not in running)
        assert asked.count <= MANY + 20
        for suspect in running:
            faults.clear(suspect)
            faults.end(1, suspect)
        assert [one for one in suspects if one not in running and faults.may_run(one)] == able[1:2]
        fleet.ledger.open(Route("a", 2), ReplicaProfile(LIMITS, model(500 if unable else 0)))
        assert [one for one in suspects if one not in running and faults.may_run(one)] == (
            suspects[:1] if unable or not is_open else suspects[1:2]
        )
        for suspect in suspects:
            faults.forget(suspect)
        assert not any((faults._waiting, faults._unable, faults._entered))

    run(test)


def test_while_a_replica_leaves_a_request_that_ends_does_not_look_at_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        handle, client = await started(3)
        names = list(handle.replicas)
        jobs = [asyncio.ensure_future(collect(client, request([index]))) for index in range(4 * MANY)]
        await until(lambda: sum(len(one.engine.live) for one in handle.replicas.values()) == 4 * MANY)
        handle.announce(*names[1:])
        await until(lambda: bool(client._parts.channels.leaving()))
        asked = Asked(handle.fleet, monkeypatch)
        for job in jobs[::2]:
            job.cancel()
        await asyncio.wait(jobs[::2])
        await until(lambda: sum(len(one.engine.live) for one in handle.replicas.values()) == 2 * MANY)
        assert asked.count <= 10 * len(jobs)
        assert names[0] in client.status()["channels"]
        async with stepping(handle):
            await asyncio.gather(*jobs[1::2])
        await until(lambda: names[0] not in client.status()["channels"])
        await client.stop()

    run(test)


@pytest.mark.parametrize("why", [{"stalled_s": 3.0}, {"suspects": 1}], ids=str)
def test_those_that_wait_look_only_when_a_report_tells_them_something(why: dict[str, float]) -> None:
    """A busy engine reports after each step, and thousands may wait for another replica of their model."""

    async def test() -> None:
        handle, client = await started(1)
        (replica,) = handle.replicas
        ledger, looks = handle.fleet.ledger, 0
        suspect = replace(InFlightRequest(request([1]), 0.0).requirement(), alone=True)
        client.on_load(Route(replica, 1), replace(LOAD, **why))

        def ready() -> bool:
            nonlocal looks
            looks += 1
            return bool(ledger.routable(None, suspect))

        waiting = [asyncio.ensure_future(client._waiter.wait_until(ready, 60.0)) for _ in range(MANY)]
        await asyncio.sleep(1.0)
        before = looks
        for step in range(100):
            client.on_load(Route(replica, 1), replace(LOAD, **why, waiting_tokens=step))
            await asyncio.sleep(0.01)
        assert looks == before
        client.on_load(Route(replica, 1), LOAD)
        assert await asyncio.gather(*waiting) == [True] * MANY
        assert looks <= before + 3 * MANY
        await client.stop()

    run(test)


def test_a_request_that_cannot_say_whether_it_may_run_fails_alone() -> None:
    async def test() -> None:
        _, client = await started(1)
        opened = False

        def broken() -> bool:
            if opened:
                raise RuntimeError("planted")
            return False

        waiting = [
            asyncio.ensure_future(client._waiter.wait_until(ready, 60.0)) for ready in (broken, lambda: opened)
        ]
        await asyncio.sleep(1.0)
        opened = True
        client._waiter.notify()
        failed, ran = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(failed, RuntimeError)
        assert ran is True
        await client.stop()

    run(test)


async def read(client: EngineClient, end: str) -> weakref.ref[Prompt]:
    """A request that has ended in this way, by its prompt."""
    prompt = Prompt([1, 2, 3])

    def refuse(delta: Delta) -> bool:
        raise ConnectionError("planted")

    wanted = replace(request(prompt, 20), take=refuse if end == "its text fails" else None)
    task = asyncio.ensure_future(collect(client, wanted))
    if end in ("left", "failed"):
        await until(lambda: any(live.num_tokens for live in client._requests))
        if end == "left":
            task.cancel()
        else:
            next(iter(client._requests)).fail(QuireError("planted"))
    await asyncio.wait((task,))  # raised here, its error would refer to the prompt
    assert task.cancelled() == (end == "left")
    assert task.cancelled() or (task.exception() is None) == (end == "complete")
    return weakref.ref(prompt)


@pytest.mark.parametrize("end", ["complete", "left", "failed", "its text fails", "no replica"])
def test_nothing_of_a_request_that_has_ended_waits_for_the_garbage_collector(end: str) -> None:
    async def test() -> None:
        handle, client = await started(1, unavailable_after_s=2.0)
        if end == "no replica":
            next(iter(handle.replicas.values())).kill()
            await until(lambda: not handle.fleet.ledger.routable())
        gc.collect()
        gc.disable()
        try:
            async with stepping(handle):
                prompts = [await read(client, end) for _ in range(3)]
                await asyncio.sleep(10.0)  # late answers are waited for
            assert [prompt() for prompt in prompts] == [None] * 3
        finally:
            gc.enable()
        await client.stop()

    run(test)


def test_a_result_above_the_bound_of_waiting_tokens_moves_no_neighbor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_hub, "MAX_WAITING_TOKENS", 500)
    score = TokenLogprobs(-1.0, 1, tuple(range(20)), (-1.0,) * 20)

    def scored(deltas: Iterable[TokenDelta]) -> list[TokenDelta]:
        return [
            replace(delta, prompt_logprobs=(score,) * 99 if delta.request_id.startswith("large") else None)
            for delta in deltas
        ]

    async def test() -> None:
        handle, client = await started(1)
        (replica,) = handle.replicas.values()
        deliver = replica.hub.deliver
        monkeypatch.setattr(replica.hub, "deliver", lambda deltas: deliver(scored(deltas)))
        neighbor, large = request([1], 100), request([2] * 100, 20, "large")
        async with stepping(handle):
            jobs = [asyncio.ensure_future(collect(client, one)) for one in (neighbor, large)]
            assert await asyncio.gather(*jobs) == [expected_tokens([1], 100), expected_tokens([2] * 100, 20)]
        assert [len(one.journal.attempts) for one in (neighbor, large)] == [1, 1]
        await client.stop()

    run(test)
