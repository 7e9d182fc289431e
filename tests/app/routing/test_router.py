"""The router inside Serve's own code: each test holds one private behavior of Ray that Quire relies on."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from ray import cloudpickle
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.router import AsyncioRouter
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RequestRouter
from serve_router import ServeRouter

from app import config
from app.routing import fleet
from app.routing.ledger import NoRouteError, Route
from app.routing.router import EngineRouter, PowerOfTwoRouter

UNAVAILABLE = ActorUnavailableError("no network", None)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(main())


# ---- what is relied on, by name


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (RequestRouter, "_choose_replica_for_request"),
        (RequestRouter, "_backoff"),
        (RequestRouter, "update_replicas"),
        (RequestRouter, "initialize_state"),
        (RequestRouter, "on_replica_actor_died"),
        (RequestRouter, "on_replica_actor_unavailable"),
        (PowerOfTwoChoicesRequestRouter, "choose_replicas"),
        (AsyncioRouter, "_route_and_send_request_once"),
    ],
)
def test_ray_still_has_what_is_overridden_or_called(owner: type, name: str) -> None:
    assert callable(getattr(owner, name, None)), (
        f"this Ray has no {owner.__name__}.{name}: see app/routing/router.py"
    )


def test_ray_still_keeps_replicas_in_a_dict_by_id() -> None:
    async def test() -> None:
        serve = ServeRouter(EngineRouter, "a", "b")
        assert {key.unique_id: value for key, value in serve.router._replicas.items()} == serve.replicas
        assert serve.router._deployment_id == serve.deployment
        serve.announce("b")
        assert [key.unique_id for key in serve.router._replicas] == ["b"]

    run(test)


@pytest.mark.parametrize("option", sorted(config.ROUTERS))
def test_every_choice_names_a_router_that_ray_can_make(option: str) -> None:
    path = config.ROUTERS[option]
    if option == "prefix_affinity":
        pytest.importorskip(path.partition(":")[0], reason="no ray.llm here", exc_type=ImportError)
    made = RequestRouterConfig(request_router_class=path).get_request_router_class()
    assert issubclass(made, RequestRouter)
    assert not inspect.isabstract(made), "this Ray wants more methods of a router"
    assert option != "power_of_two" or issubclass(made, PowerOfTwoChoicesRequestRouter)


def test_a_shipped_router_shares_this_process_fleet() -> None:
    sent = cloudpickle.dumps(RequestRouterConfig(request_router_class="app.routing.router:EngineRouter"))
    shipped = cloudpickle.loads(sent).get_request_router_class()
    assert shipped.initialize_state.__globals__["fleet"] is fleet


# ---- the choice


def test_only_the_epoch_of_the_chosen_route_is_sent_with_the_call() -> None:
    async def test() -> None:
        serve = ServeRouter(EngineRouter, "a")
        await serve.send(meta=serve.meta(keys=(1, 2)))
        (call,) = serve.replicas["a"].calls
        assert call["meta"] == {"epoch": 1}, "keys would cost more to send than to compute"
        assert serve.fleet.routed == {"a": 1}

    run(test)


def test_an_attempt_goes_where_it_is_booked_or_back_to_its_sender() -> None:
    async def test() -> None:
        serve = ServeRouter(EngineRouter, "a", "b")
        for _ in range(3):
            await serve.send(meta=Route("b", 7))
        assert serve.sent() == {"a": 0, "b": 3}
        assert serve.replicas["b"].calls == [{"meta": {"epoch": 7}}] * 3
        serve.announce("a")
        with pytest.raises(fleet.NotAcceptedError, match="engine replica b has left"):
            await serve.send(meta=Route("b", 7))
        await serve.send(target="b")
        assert serve.sent() == {"a": 0, "b": 4}, (
            "while it drains, calls of its channel reach it, and no attempts"
        )
        assert serve.fleet.routed == {}, "it has been counted where it was booked"

    run(test)


@pytest.mark.parametrize("router_class", [EngineRouter, PowerOfTwoRouter])
def test_calls_of_one_http_request_do_not_wait_for_each_other(router_class: type[RequestRouter]) -> None:
    async def test() -> None:
        serve = ServeRouter(router_class, "a", "b")
        await asyncio.gather(*(serve.send("shared", meta=serve.meta()) for _ in range(8)))
        assert sum(serve.sent().values()) == 8

    run(test)


def test_a_burst_is_spread_before_any_replica_answers() -> None:
    async def test() -> None:
        serve = ServeRouter(EngineRouter, "a", "b", "c", "d")
        await asyncio.gather(*(serve.send(str(index), meta=serve.meta()) for index in range(64)))
        assert set(serve.sent().values()) == {16}

    run(test)


@pytest.mark.parametrize("router_class", [EngineRouter, PowerOfTwoRouter])
def test_new_requests_go_only_where_a_channel_is_open_and_no_cordon(router_class: type[RequestRouter]) -> None:
    async def test() -> None:
        serve = ServeRouter(router_class, "a", "b", "c")
        serve.fleet.ledger.suspect("a", True)
        serve.fleet.cordon.set({"b"}, 60)
        for index in range(20):
            await serve.send(str(index), meta=serve.meta())
        assert serve.sent() == {"a": 0, "b": 0, "c": 20}
        serve.fleet.ledger.suspect("c", True)
        await serve.send("last", meta=serve.meta())
        assert serve.sent() == {"a": 0, "b": 1, "c": 20}, "better there than nowhere"

    run(test)


def test_a_choice_that_breaks_takes_the_least_booked_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        serve = ServeRouter(EngineRouter, "a", "b")

        def broken(_: Any) -> Any:
            raise KeyError("a test broke it")

        monkeypatch.setattr(serve.fleet.index, "longest", broken)
        for index in range(10):
            await serve.send(str(index), meta=serve.meta(keys=(1, 2)))
        assert serve.sent() == {"a": 5, "b": 5}
        assert serve.fleet.ledger.faults == 10

    run(test)


# ---- replicas that refuse, die or leave


@pytest.mark.parametrize("router_class", [EngineRouter, PowerOfTwoRouter])
@pytest.mark.parametrize(
    "answer", [False, ActorDiedError(), UNAVAILABLE], ids=["rejects", "died", "unavailable"]
)
def test_an_attempt_that_is_not_accepted_goes_back_to_its_sender(
    router_class: type[RequestRouter], answer: bool | Exception
) -> None:
    async def test() -> None:
        serve = ServeRouter(router_class, "a", "b")
        for replica in serve.replicas.values():
            replica.accepts = answer
        meta = serve.meta()
        with pytest.raises(fleet.NotAcceptedError):
            await serve.send(meta=meta)
        # Serve must not choose again by itself; a dead replica's count is gone.
        assert sum(serve.fleet.routed.values()) == (0 if isinstance(answer, ActorDiedError) else 1)
        first = serve.fleet.ledger.booking(meta.attempt)
        assert first is not None
        assert serve.fleet.ledger.release(meta.attempt)
        assert set(serve.fleet.ledger.load().values()) == {0}
        other = next(name for name in serve.replicas if name != first.route.replica)
        serve.replicas[other].accepts = True
        await serve.send(meta=serve.meta(avoid=first.route.replica))
        assert serve.sent()[other] == 1

    run(test)


def test_a_dead_replica_is_no_member_any_more_and_an_unavailable_one_is() -> None:
    async def test() -> None:
        serve = ServeRouter(EngineRouter, "a", "b")
        heard: list[frozenset[str]] = []
        serve.fleet.listen(heard.append)
        serve.router.on_replica_actor_unavailable(serve.replicas["b"].replica_id)
        assert serve.fleet.members == {"a", "b"}
        serve.router.on_replica_actor_died(serve.replicas["a"].replica_id)
        assert heard == [{"a", "b"}, {"b"}]
        with pytest.raises(fleet.ReplicaGoneError, match="engine replica a is gone"):
            await serve.send(target="a")
        for _ in range(3):
            await serve.send(meta=serve.meta())
        assert serve.sent() == {"a": 0, "b": 3}

    run(test)


@pytest.mark.parametrize("router_class", [EngineRouter, PowerOfTwoRouter])
def test_without_members_a_request_is_told_so_and_with_new_ones_it_is_placed(
    router_class: type[RequestRouter],
) -> None:
    async def test() -> None:
        serve = ServeRouter(router_class, "a", "b")
        for _ in range(2):
            serve.announce()
            assert serve.fleet.members == frozenset()
            with pytest.raises(NoRouteError):
                await serve.send(meta=serve.meta())
            serve.announce("b")
            await serve.send(meta=serve.meta())
        assert serve.sent() == {"a": 0, "b": 2}

    run(test)


def test_pinned_calls_reach_their_replica_or_fail_by_its_name() -> None:
    async def test() -> None:
        serve = ServeRouter(EngineRouter, "a", "b")
        for _ in range(3):
            await serve.send(target="b")
        assert serve.sent() == {"a": 0, "b": 3}
        serve.announce("a")
        await serve.send(target="b")  # its channel is open: beats must reach it while it drains
        assert serve.sent() == {"a": 0, "b": 4}
        serve.fleet.pin("b", False)
        serve.announce("a")
        with pytest.raises(fleet.ReplicaGoneError, match="engine replica b is gone"):
            await serve.send(target="b")
        serve.replicas["a"].accepts = False
        with pytest.raises(fleet.NotAcceptedError):
            await serve.send(target="a")
        assert serve.sent()["b"] == 4, "a pinned call never goes elsewhere"

    run(test)


def test_calls_without_a_destination_need_any_replica() -> None:
    async def test() -> None:
        serve = ServeRouter(EngineRouter, "a")
        await serve.send()
        assert serve.sent() == {"a": 1}
        serve.announce()
        with pytest.raises(fleet.ReplicaGoneError, match="there is no engine replica"):
            await serve.send()

    run(test)


def test_a_call_that_waits_is_held_until_there_is_a_replica() -> None:
    async def test() -> None:
        serve = ServeRouter(EngineRouter, "a")
        serve.announce()
        held = asyncio.ensure_future(serve.send(wait=True))
        left = asyncio.ensure_future(serve.send(wait=True))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not held.done()
        left.cancel()
        serve.announce("a")
        await held
        assert serve.sent() == {"a": 1}
        with pytest.raises(asyncio.CancelledError):
            await left
        await serve.send(wait=True)
        assert serve.sent() == {"a": 2}
        serve.announce()
        again = asyncio.ensure_future(serve.send(wait=True))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not again.done(), "the replica that has gone was taken for one that is there"
        serve.announce("a")
        await again

    run(test)
