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


def deployed(**options: Any) -> dict[str, Any]:
    """What the application's builder hands the ingress."""
    return config.load(options, {}).user_config("ingress")


def test_it_has_started_once_an_engine_is_routable() -> None:
    """Else a deploy would stop the ingress before while the new one has nobody to send to."""

    async def test(ingress: IngressReplica, handle: LoopbackHandle) -> None:
        starting = asyncio.create_task(ingress.reconfigure(deployed()))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not starting.done()
        handle.add()
        await starting
        handle.announce()
        await asyncio.wait_for(ingress.reconfigure(deployed(log_level="WARNING")), 30)  # only the start waits

    with_ingress(test, 0)


def test_it_does_not_wait_for_engines_that_sleep() -> None:
    async def test(ingress: IngressReplica, handle: LoopbackHandle) -> None:
        await ingress.reconfigure(deployed(max_replicas=2, min_replicas=0))

    with_ingress(test, 0, max_replicas=2, min_replicas=0)


def test_options_of_others_than_its_group_change_in_it_while_it_runs() -> None:
    async def test(ingress: IngressReplica, handle: LoopbackHandle) -> None:
        await ingress.reconfigure(deployed())
        assert ingress._victims is None
        now = deployed(max_replicas=4, min_replicas=0, startup_s=50, ttft_target_s=3, unavailable_after_s=7)
        await ingress.reconfigure(now)
        assert ingress._victims is not None
        assert ingress.service.engine_wait_s == 100.0  # twice the startup, since there may be no engine
        assert ingress._client._parts.attempts.unavailable_after_s == 100.0
        ingress._overload.update()
        assert ingress._overload.inspect()["limit_s"] == 53.0
        await ingress.reconfigure(deployed(unavailable_after_s=7))
        assert ingress._victims is None
        assert ingress.service.engine_wait_s == 7.0

    with_ingress(test, 1)
