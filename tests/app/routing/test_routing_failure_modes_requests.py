"""Requests on their way: none loses its keys, none is keyed twice, none fails because one replica says no.

The table in docs/routing.md says which failure each test stands for, and where it was seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from engine_client_setting import collect, quiet, request, run, until
from kv_loopback import SCHEME, KvReplica
from loopback import LoopbackHandle, LoopbackResponse, expected_tokens, stepping

from app.fleet import attempts
from app.fleet.engine_client import EngineClient
from app.fleet.generation import GenerateRequest
from app.routing.ledger import Booking, Route
from app.routing.routing_meta import RoutingMeta
from engine.kv.block_keys import KeyScheme
from engine.request import CacheNamespace
from engine.sampling_params import SamplingParams


class Recorded:
    """A client of replicas with prefix caches; ``sent`` is what each choice of a replica is told."""

    def __init__(self, replicas: int) -> None:
        self.handle = LoopbackHandle(0)
        self.sent: list[RoutingMeta] = []
        self._book = self.handle.fleet.book
        self.handle.fleet.book = self._recorded  # type: ignore[method-assign]
        for number in range(replicas):
            self.add(f"kv-{number}")
        self.client = EngineClient(self.handle, unavailable_after_s=60.0)

    def add(self, name: str) -> None:
        self.handle.replicas[name] = KvReplica(name)
        self.handle.announce(*(name for name, replica in self.handle.replicas.items() if not replica.dead))

    def _recorded(self, meta: RoutingMeta, candidates: Collection[str] | None = None) -> Booking:
        self.sent.append(meta)
        return self._book(meta, candidates)

    async def started(self) -> None:
        await self.client.start()
        await until(lambda: len(self.handle.fleet.ledger.routable()) == len(self.handle.replicas))


@pytest.mark.parametrize("blocks", [0, 3, 400])
def test_no_prompt_goes_without_its_keys(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "INLINE_TOKENS", 1000)  # the longest one's are made in a thread
    prompt = [place % 700 for place in range(16 * blocks + 5)]
    space = CacheNamespace(tenant="a tenant", salt="s")

    async def test() -> None:
        setting = Recorded(2)
        await setting.started()
        async with stepping(setting.handle):
            wanted = GenerateRequest(
                "r", prompt, SamplingParams(max_tokens=3, temperature=0.0), namespace=space
            )
            assert await collect(setting.client, wanted) == expected_tokens(prompt, 3)
        (sent,) = setting.sent
        assert list(sent.keys) == SCHEME.keys(prompt, space)
        assert len(sent.keys) == blocks
        assert sent.prefill == len(prompt)
        await setting.client.stop()

    run(test)


def test_keys_are_made_once_however_many_replicas_there_are_and_however_often_it_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = list(range(100))
    made: list[int] = []
    keys = KeyScheme.keys

    def counted(self: KeyScheme, token_ids: Sequence[int], namespace: CacheNamespace) -> list[int]:
        made.append(len(token_ids))
        return keys(self, token_ids, namespace)

    monkeypatch.setattr(KeyScheme, "keys", counted)

    async def test() -> None:
        setting = Recorded(5)
        await setting.started()
        task = asyncio.create_task(collect(setting.client, request(prompt, max_tokens=40)))
        left: list[str] = []
        for _ in range(3):
            busy = await holder(setting.handle)
            setting.handle.step()
            await asyncio.sleep(0.005)
            left.append(busy.name)
            await setting.client.cordon(left, 600, after_s=0.0)
            await until(lambda busy=busy: not busy.engine.live)  # type: ignore[misc]
        async with stepping(setting.handle):
            assert await task == expected_tokens(prompt, 40)
        assert len(setting.sent) >= 4
        assert {tuple(sent.keys) for sent in setting.sent} == {tuple(keys(SCHEME, prompt, CacheNamespace()))}
        assert made.count(len(prompt)) == 1
        await setting.client.stop()

    run(test)


async def holder(handle: LoopbackHandle) -> Any:
    """The replica at which the only request runs."""

    def busy() -> list[Any]:
        return [replica for replica in handle.replicas.values() if not replica.dead and replica.engine.live]

    await until(lambda: bool(busy()))
    return busy()[0]


def test_a_replica_that_refuses_what_it_was_chosen_for_costs_no_request_while_others_idle() -> None:
    prompts = {name: [name] * 40 for name in range(1, 21)}
    refused: list[str] = []

    async def test() -> None:
        setting = Recorded(3)
        take = setting.handle.generate.remote

        def refuse_first(cid: str, payload: bytes, *, meta: Route) -> LoopbackResponse:
            async def refuse() -> dict[str, Any]:
                refused.append(meta.replica)
                return {"refused": "it is full"}

            if setting.sent[-1].avoid:
                return take(cid, payload, meta=meta)
            return LoopbackResponse(asyncio.get_running_loop().create_task(refuse()))

        setting.handle.generate = SimpleNamespace(remote=refuse_first)
        await setting.started()
        async with stepping(setting.handle):
            made = await asyncio.gather(
                *(
                    collect(setting.client, request(prompt, max_tokens=5, name=f"r{name}"))
                    for name, prompt in prompts.items()
                )
            )
        assert made == [expected_tokens(prompt, 5) for prompt in prompts.values()]
        assert len(refused) == 20
        assert len(setting.sent) == 40  # each refused once, and taken by the next one
        await until(lambda: quiet(setting.handle, setting.client))
        await setting.client.stop()

    run(test)
