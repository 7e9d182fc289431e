"""When an ingress counts as started, and what changes in it while it runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ingress_support import ingress_for, only_model
from loopback import LoopbackHandle

from app import config
from app.fleet.generation import UnavailableError
from app.ingress import IngressReplica
from engine.errors import ConfigError
from engine.models.folders import BUNDLED_NAME

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .*__del__.* was never awaited")


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, one_tokenizer: None) -> None:
    monkeypatch.setattr("app.ingress_model.tokenizer_digest", lambda _: "tokenizer")
    monkeypatch.setattr("app.fleet.victim_feed._read_internal_kv", lambda _: None)


def with_ingress(
    test: Callable[[IngressReplica, LoopbackHandle], Awaitable[None]], replicas: int, **options: Any
) -> None:
    async def run() -> None:
        handle = LoopbackHandle(replicas)
        ingress = ingress_for(config.load({"instance": "test", **options}, {}), handle)
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
        only = only_model(ingress)
        assert only.service.engine_wait_s == 7.0
        assert only.client._parts.attempts.unavailable_after_s == 7.0
        assert only.client._limits.expected_s == 7.0
        only.overload.update()
        assert only.overload.inspect()["limit_s"] == 63.0  # with the grace for replicas that start
        await ingress.reconfigure({"max_lag_s": 7})
        assert ingress.server.lag.limit_s == 7.0
        assert (await ingress.inspect())["lag"]["behind"] is False

    with_ingress(test, 1)


def with_two(
    test: Callable[[IngressReplica, LoopbackHandle, LoopbackHandle], Awaitable[None]], **other: Any
) -> None:
    """An ingress for the built-in model and another one with the options ``other``."""

    async def run() -> None:
        handles = LoopbackHandle(0), LoopbackHandle(0)
        models = {"small": {"model": BUNDLED_NAME}, "other": {"model": BUNDLED_NAME, **other}}
        ingress = ingress_for(config.load({"instance": "test", "models": models}, {}), *handles)
        try:
            await test(ingress, *handles)
        finally:
            await ingress.__del__()

    asyncio.run(run())


def test_of_several_models_one_that_can_answer_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engines of the other may never start."""
    monkeypatch.setattr("app.ingress.LATER_S", 0.0)

    async def test(ingress: IngressReplica, small: LoopbackHandle, other: LoopbackHandle) -> None:
        starting = asyncio.create_task(ingress.reconfigure({}))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not starting.done()
        other.add()
        await asyncio.wait_for(starting, 30)
        states = {service.model: service.state.health()["status"] for service in ingress.server.services}
        assert states == {"small": "unavailable", "other": "ok"}
        assert {name: state["replicas"] for name, state in (await ingress.inspect())["models"].items()} == {
            "small": 0,
            "other": 1,
        }
        assert [(process.name, process.model) for process in await ingress.figures()] == [
            (ingress._name, "small"),
            (ingress._name, "other"),
        ]
        await ingress.cordon(["replica-0"], 60.0)
        assert [model.client.status()["cordoned"] for model in ingress._models.values()] == [["replica-0"]] * 2

    with_two(test)


def test_a_model_that_sleeps_lets_the_ingress_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ingress.LATER_S", 0.0)

    async def test(ingress: IngressReplica, small: LoopbackHandle, other: LoopbackHandle) -> None:
        await asyncio.wait_for(ingress.reconfigure({}), 30)

    with_two(test, max_replicas=2, min_replicas=0)


def test_live_options_reach_every_model_unless_it_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(ingress: IngressReplica, small: LoopbackHandle, other: LoopbackHandle) -> None:
        small.add()
        other.add()
        await ingress.reconfigure({"tool_parser": "mistral", "max_live_choices": 7})
        options = [service.options for service in ingress.server.services]
        assert [each.tool_parser for each in options] == ["mistral", "pythonic"]
        assert {each.max_live_choices for each in (*options, ingress.server.options)} == {7}

    with_two(test, tool_parser="pythonic")


@pytest.mark.parametrize("error", [ConfigError("there is no folder /gone"), PermissionError("/gone")])
def test_a_model_that_cannot_be_loaded_takes_no_other_down(
    error: Exception, monkeypatch: pytest.MonkeyPatch, bundled_model: Path
) -> None:
    """It is tried again, since its folder may come."""
    found: list[Path] = []
    refused: list[str] = []
    read_in: list[int] = []  # threads

    def resolve(model: str) -> Path:
        if model == "/gone" and not found:
            refused.append(model)
            raise error
        if found:
            read_in.append(threading.get_ident())
        return bundled_model

    monkeypatch.setattr("app.ingress_model.resolve", resolve)
    monkeypatch.setattr("app.ingress.RETRY_S", 0.0)

    async def test(ingress: IngressReplica, small: LoopbackHandle, other: LoopbackHandle) -> None:
        small.add()
        other.add()
        await ingress.reconfigure({})
        assert ingress.server.choose(None, None).model == "small"
        with pytest.raises(UnavailableError, match="'other' cannot be served now"):
            ingress.server.choose("other", None)
        async with asyncio.timeout(60):
            while len(refused) < 3:  # at the start, and in one retry at least
                await asyncio.sleep(0.01)
                await ingress.check_health()
            found.append(bundled_model)
            while ingress.server.broken:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await ingress._models["other"].answers()
        assert ingress.server.choose("other", None).model == "other"
        assert read_in
        assert threading.get_ident() not in read_in, "the event loop serves the other models"

    with_two(test, model="/gone")


def test_the_only_model_that_cannot_be_loaded_fails_the_deployment() -> None:
    with pytest.raises(ConfigError, match="'/gone' is not a folder"):
        ingress_for(config.load({"instance": "test", "model": "/gone"}, {}), LoopbackHandle(0))
