"""When an ingress counts as started, and what changes in it while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from loopback import LoopbackHandle

from app import config
from app.ingress import IngressReplica

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .*__del__.* was never awaited")


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, bundled_model: object) -> None:
    monkeypatch.setattr("app.ingress.tokenizer_digest", lambda _: "tokenizer")
    monkeypatch.setattr("app.fleet.victim_feed._read_internal_kv", lambda _: None)


def with_ingress(
    test: Callable[[IngressReplica, LoopbackHandle], Awaitable[None]], replicas: int, **options: Any
) -> None:
    async def run() -> None:
        handle = LoopbackHandle(replicas)
        ingress = IngressReplica(config.load({"instance": "test", **options}, {}), handle)
        try:
            await test(ingress, handle)
        finally:
            await ingress.__del__()

    asyncio.run(run())


def test_it_has_started_once_an_engine_is_routable() -> None:
    """Else a deploy would stop the ingress before while the new one has nobody to send to."""

    async def test(ingress: IngressReplica, handle: LoopbackHandle) -> None:
        starting = asyncio.create_task(ingress.reconfigure({}))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not starting.done()
        handle.add()
        await starting
        handle.announce()
        await asyncio.wait_for(ingress.reconfigure({"log_level": "WARNING"}), 30)  # only the start waits

    with_ingress(test, 0)


def test_it_does_not_wait_for_engines_that_sleep() -> None:
    async def test(ingress: IngressReplica, handle: LoopbackHandle) -> None:
        await ingress.reconfigure({})

    with_ingress(test, 0, max_replicas=2, min_replicas=0)


def test_limits_change_while_it_runs() -> None:
    async def test(ingress: IngressReplica, handle: LoopbackHandle) -> None:
        await ingress.reconfigure({})
        await ingress.reconfigure({"unavailable_after_s": 7, "max_wait_s": 3})
        assert ingress.service.engine_wait_s == 7.0
        assert ingress._client._parts.attempts.unavailable_after_s == 7.0
        assert ingress._client._limits.expected_s == 7.0
        ingress._overload.update()
        assert ingress._overload.inspect()["limit_s"] == 63.0  # with the grace for replicas that start

    with_ingress(test, 1)
