"""Clients that vanish, processes that die or hang, replicas that are told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from local_cluster import BUDGET, SOON_S, BreakableCluster, deploy_evenly, kill_all
from paced_model import HELD_S
from ray.util import placement_group, remove_placement_group
from side_by_side import SEVERAL, texts_of_several

from loadtests.client import Client, Outcome, complete, complete_all, vanish
from loadtests.cluster import SLOW_POLL_S, gone, wait_for
from loadtests.workloads import prompts

STREAMS = 16
TOKENS = 64
FRAMES = 2  # of an engine, after which its streams are under way
FEW = 6
VANISHING = 250  # clients, 32 at once; loadtests.faults has a thousand
STEP_S = 0.2  # of an engine whose steps are counted
LONG_PROMPT = 15 * BUDGET  # tokens
CROWD, CROWD_PROMPT = 8, 4 * BUDGET  # prompts of one request of many, and their tokens
ROWS, SAMPLED, VOCABULARY = 8, 24, 49_152  # of a batch that samples, tokens of each
LONG = 120  # tokens of a few streams; enough that a stopping replica is gone before they end


@pytest.fixture
def cluster(paced: BreakableCluster) -> BreakableCluster:
    return paced


async def complete_at(cluster: BreakableCluster, text: str, tokens: int, **how: Any) -> Outcome:
    return await complete(cluster.url, text, tokens, instance=cluster.instance, **how)


def check_same(outcomes: list[Outcome], undisturbed: list[Outcome]) -> None:
    """All ended well, and said the same or, with more tokens, began with it."""
    for outcome, expected in zip(outcomes, undisturbed, strict=False):
        assert outcome.errors == []
        assert outcome.done
        assert outcome.finish_reason == "length"
        assert outcome.text[: len(expected.text)] == expected.text
        assert len(outcome.text) >= len(expected.text)


def frames(cluster: BreakableCluster) -> dict[str, int]:
    """Frames that each engine has sent; one for each step that made tokens."""
    return {
        state["replica"]: sum(channel["frames"] for channel in state["channels"].values())
        for state in cluster.inspect()
    }


@pytest.fixture(scope="module")
def undisturbed(bare_cluster: BreakableCluster, paced_model: Path) -> list[Outcome]:
    """What ``STREAMS`` streams say when nothing happens to them."""
    deploy_evenly(bare_cluster, paced_model)
    outcomes = asyncio.run(complete_all(bare_cluster.url, prompts(STREAMS), TOKENS, bare_cluster.instance))
    check_same(outcomes, outcomes)
    assert len({outcome.text for outcome in outcomes}) > STREAMS // 2
    return outcomes


async def while_streaming(
    cluster: BreakableCluster,
    act: Callable[[], object],
    count: int = STREAMS,
    tokens: int = TOKENS,
    beside: int = 0,
) -> list[Outcome]:
    """Start the streams, call ``act`` in a thread once every engine has some running, return all outcomes.

    ``beside``: requests that are there already.
    """
    with cluster.slow_steps():
        streams = asyncio.ensure_future(
            complete_all(cluster.url, prompts(STREAMS)[:count], tokens, cluster.instance)
        )
        under_way = asyncio.ensure_future(asyncio.to_thread(wait_under_way, cluster, count + beside))
        await asyncio.wait((streams, under_way), return_when=asyncio.FIRST_COMPLETED)
        assert not streams.done(), [outcome.fault for outcome in streams.result()]
        await under_way
        with cluster.slow_steps(HELD_S):
            await asyncio.to_thread(act)
            assert not streams.done(), "they ended too soon to be disturbed"
        return await streams


def wait_under_way(cluster: BreakableCluster, count: int) -> None:
    """Until so many requests are live, and every engine has sent tokens of some."""

    def all_busy() -> bool:
        states = cluster.inspect()
        return sum(state["live_requests"] for state in states) == count and all(
            state["running"] > 0 for state in states
        )

    wait_for(all_busy, SOON_S, "not every engine is busy")
    begun = frames(cluster)
    wait_for(
        lambda: all(count >= begun[replica] + FRAMES for replica, count in frames(cluster).items()),
        SOON_S,
        "no tokens come",
    )


def test_many_clients_vanish(cluster: BreakableCluster) -> None:
    before = cluster.channels()
    asyncio.run(vanish(cluster.url, VANISHING, seed=7, instance=cluster.instance))
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")
    wait_for(lambda: cluster.health()["live_requests"] == 0, SOON_S, "the ingress still has requests")
    assert cluster.channels() == before
    booked = lambda: set(cluster.health()["booked_tokens"].values())  # noqa: E731
    wait_for(lambda: booked() == {0}, SOON_S, "tokens are booked for nobody")
    wait_for(lambda: cluster.connections() == 0, SOON_S, "connections are left")


def test_engine_dies_amid_streams(cluster: BreakableCluster, undisturbed: list[Outcome]) -> None:
    """They go on elsewhere, and so do all sequences of a request for several."""

    async def disturbed() -> tuple[list[Outcome], list[str], int]:
        with cluster.slow_steps():
            together = asyncio.ensure_future(texts_of_several(cluster, TOKENS))
            victim = await asyncio.to_thread(wait_for, runs_several, SOON_S, "the sequences do not run")

            def die() -> None:
                assert not together.done()
                cluster.kill(victim["pid"])

            outcomes = await while_streaming(cluster, die, beside=1)
            return outcomes, await together, victim["pid"]

    def runs_several() -> dict[str, Any] | None:
        return next((state for state in cluster.inspect() if state["running"] == SEVERAL), None)

    texts = asyncio.run(texts_of_several(cluster, TOKENS))
    assert len(set(texts)) == SEVERAL
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")
    outcomes, together, died = asyncio.run(disturbed())
    check_same(outcomes, undisturbed)
    assert together == texts
    wait_for(lambda: gone(died), SOON_S, "Serve still keeps the replica without an engine")
    cluster.wait_routable(2, timeout_s=SOON_S)
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")


def test_a_replica_stops_and_a_node_dies_amid_streams(
    cluster: BreakableCluster, undisturbed: list[Outcome]
) -> None:
    """In one go, as the others begin with the one replica that the first leaves."""
    a_stopping_replica_hands_its_streams_over(cluster, undisturbed)
    streams_of_the_only_engine_go_on_with_the_next(cluster, undisturbed)
    streams_of_a_node_that_is_killed_go_on(cluster, undisturbed)


def a_stopping_replica_hands_its_streams_over(cluster: BreakableCluster, undisturbed: list[Outcome]) -> None:
    before = cluster.engine_pids()

    def stop_one() -> None:
        cluster.scale(1)
        wait_for(lambda: len(cluster.inspect()) == 1, SOON_S, "no replica was told to stop")
        (left,) = (state["pid"] for state in cluster.inspect())
        (stopped,) = (pid for pid in before if pid != left)
        wait_for(lambda: gone(stopped), SOON_S, "the replica is still there")
        handed_over = lambda: [state["live_requests"] for state in cluster.inspect()] == [FEW]  # noqa: E731
        wait_for(handed_over, SOON_S, "the replica waited for its streams")

    outcomes = asyncio.run(while_streaming(cluster, stop_one, FEW, LONG))
    check_same(outcomes, undisturbed)


def streams_of_the_only_engine_go_on_with_the_next(
    cluster: BreakableCluster, undisturbed: list[Outcome]
) -> None:
    """The engine dies, and a request that comes before the next one has started waits for it, too."""
    (died,) = cluster.engine_pids()
    new: list[Outcome] = []

    def die() -> None:
        cluster.kill(died)
        wait_for(lambda: cluster.health()["routable"] == 0, SOON_S, "its death is not noticed")
        new.append(asyncio.run(complete_at(cluster, "Once upon a time", 1)))

    outcomes = asyncio.run(while_streaming(cluster, die, FEW, LONG))
    check_same(outcomes, undisturbed)
    assert [outcome.fault for outcome in new] == [""]
    cluster.wait_routable(1, timeout_s=SOON_S)
    assert died not in cluster.engine_pids()
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")


def streams_of_a_node_that_is_killed_go_on(cluster: BreakableCluster, undisturbed: list[Outcome]) -> None:
    """Of two nodes one is switched off: its streams go on on the other, and so does its engine."""
    taken = placement_group(
        [{"CPU": 7}]
    )  # all that the first node has left, so the next engine fits the second
    try:
        with cluster.second_node() as node:
            ray.get(taken.ready(), timeout=SOON_S)
            cluster.scale(2)
            cluster.wait_routable(2)
            on_second = {child.pid for child in node.children(recursive=True)}
            (there,) = (state["pid"] for state in cluster.inspect() if state["pid"] in on_second)
            remove_placement_group(taken)
            outcomes = asyncio.run(while_streaming(cluster, lambda: kill_all(node)))
            check_same(outcomes, undisturbed)
            wait_for(lambda: gone(there), SOON_S, "the node's engine is still there")
            wait_for(
                lambda: len(cluster.engine_pids()) == 2, SOON_S, "no engine has come in its place", SLOW_POLL_S
            )
            cluster.wait_routable(2, timeout_s=SOON_S)
            wait_for(cluster.idle, SOON_S, "requests or blocks are left")
    finally:
        remove_placement_group(taken)


def test_an_engine_dies_while_another_refuses_connections(
    cluster: BreakableCluster, undisturbed: list[Outcome]
) -> None:
    """Only the attempts to the one that refuses them go through Serve; streams go on from either to either."""
    cluster.settle(3)
    blocked, victim, other = cluster.inspect()
    ways = {state["replica"]: cluster.tell(state["replica"], "attempts") for state in (blocked, other)}
    cluster.tell(blocked["replica"], "refuse_connections")

    def refused() -> bool:
        health = cluster.health()
        return health["unconnected"] == [blocked["replica"]] and set(health["channels"].values()) == {"open"}

    def since(state: dict[str, Any]) -> tuple[int, int]:
        connected, through_serve = cluster.tell(state["replica"], "attempts")
        before = ways[state["replica"]]
        return connected - before[0], through_serve - before[1]

    wait_for(refused, SOON_S, "the replica is still connected")
    outcomes = asyncio.run(while_streaming(cluster, lambda: cluster.kill(victim["pid"])))
    check_same(outcomes, undisturbed)
    (to_blocked, called), (submitted, to_other) = since(blocked), since(other)
    assert (to_blocked, to_other) == (0, 0)
    assert min(called, submitted) >= STREAMS // 3
    wait_for(lambda: gone(victim["pid"]), SOON_S, "Serve still keeps the replica without an engine")
    cluster.wait_routable(3, timeout_s=SOON_S)
    wait_for(refused, SOON_S, "another one has no connection, or this one has")
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")
    cluster.kill(blocked["pid"])  # the tests after this one need one that can be connected to
    wait_for(lambda: gone(blocked["pid"]), SOON_S, "it is still there")
    wait_for(lambda: cluster.health()["unconnected"] == [], SOON_S, "it still has a channel")


def test_engine_that_is_stuck_inside_is_replaced(cluster: BreakableCluster, undisturbed: list[Outcome]) -> None:
    victim = cluster.inspect()[0]
    outcomes = asyncio.run(while_streaming(cluster, lambda: cluster.tell(victim["replica"], "stick_engine")))
    check_same(outcomes, undisturbed)
    wait_for(lambda: gone(victim["pid"]), SOON_S, "Serve still keeps the replica whose engine is stuck")
    cluster.wait_routable(2, timeout_s=SOON_S)
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")


def test_hung_engine_loses_its_requests(cluster: BreakableCluster, undisturbed: list[Outcome]) -> None:
    victim = cluster.inspect()[0]
    try:
        outcomes = asyncio.run(while_streaming(cluster, lambda: cluster.kill(victim["pid"], signal.SIGSTOP)))
    finally:
        with contextlib.suppress(ProcessLookupError):  # Serve may have replaced it
            cluster.kill(victim["pid"], signal.SIGCONT)
    check_same(outcomes, undisturbed)
    cluster.wait_routable(2, timeout_s=SOON_S)
    wait_for(cluster.idle, SOON_S, "the engine still computes for nobody")


def test_ingress_stopped_for_7_s_resubmits_nothing_and_loses_nothing(
    cluster: BreakableCluster, undisturbed: list[Outcome]
) -> None:
    before = cluster.health()["resubmitted"]
    channels = cluster.channels()

    def stop_for_a_while() -> None:
        (pid,) = cluster.ingress_pids()
        cluster.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(7)
        finally:
            cluster.kill(pid, signal.SIGCONT)

    outcomes = asyncio.run(while_streaming(cluster, stop_for_a_while))
    check_same(outcomes, undisturbed)
    assert cluster.health()["resubmitted"] == before
    assert cluster.channels() == channels
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")


def test_channels_that_break_amid_streams_cost_no_computation(
    cluster: BreakableCluster, undisturbed: list[Outcome]
) -> None:
    def routed() -> int:
        return sum(sum(ingress["routed"].values()) for ingress in cluster.ingresses())

    def made() -> int:
        return sum(state["generated_tokens"] for state in cluster.inspect())

    before = routed(), made(), cluster.health()["resubmitted"]
    channels = cluster.channels()

    def cut() -> None:
        for state in cluster.inspect():
            cluster.tell(state["replica"], "cut_channels")

    outcomes = asyncio.run(while_streaming(cluster, cut))
    check_same(outcomes, undisturbed)
    assert not cluster.channels() & channels
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")
    after = routed(), made(), cluster.health()["resubmitted"]
    assert after == (before[0] + STREAMS, before[1] + STREAMS * TOKENS, before[2])
    assert [state["kept_attempts"] for state in cluster.inspect()] == [0, 0]


def test_ingress_killed_amid_streams(cluster: BreakableCluster) -> None:
    """The next one begins with channels of its own."""
    before = cluster.channels()

    async def kill() -> None:
        with cluster.slow_steps():
            streams = asyncio.gather(*(complete_at(cluster, text, LONG) for text in prompts(8)))
            run = lambda: sum(state["running"] for state in cluster.inspect()) == 8  # noqa: E731
            await asyncio.to_thread(wait_for, run, SOON_S, "not all run")
            cluster.kill(cluster.ingress_pids()[0])
            await streams

    asyncio.run(kill())
    wait_for(cluster.idle, SOON_S, "a dead ingress still holds blocks")
    wait_for(lambda: not cluster.channels() & before, SOON_S, "a dead ingress still holds channels")
    cluster.wait_routable(2, timeout_s=SOON_S)
    fresh = cluster.channels()
    assert len(fresh) == 2
    channels_outlive_their_first_client(cluster)
    assert cluster.channels() == fresh


def channels_outlive_their_first_client(cluster: BreakableCluster) -> None:
    async def first_leaves() -> Outcome:
        second = asyncio.ensure_future(complete_at(cluster, "The first rule is", 48))
        await complete_at(cluster, "Once upon a time", 200, leave_after=2)
        return await second

    outcome = asyncio.run(first_leaves())
    assert outcome.done
    assert outcome.finish_reason == "length"


def test_garbage_is_not_sought_in_what_an_engine_has_loaded(cluster: BreakableCluster) -> None:
    """It would stop every stream for a tenth of a second."""
    assert all(state["frozen_objects"] > 100_000 for state in cluster.inspect())


@pytest.fixture
def lone(cluster: BreakableCluster) -> Iterator[str]:
    """The only replica that takes anything new."""
    other, one = (state["replica"] for state in cluster.inspect())
    cluster.cordon([other], 10 * SOON_S)
    yield one
    cluster.cordon([], 0.0)


async def running(cluster: BreakableCluster, count: int) -> None:
    """Once so many requests have arrived."""
    live = lambda: sum(state["live_requests"] for state in cluster.inspect()) == count  # noqa: E731
    await asyncio.to_thread(wait_for, live, SOON_S, "not all requests have arrived")


def prompt(first: int, length: int) -> list[int]:
    return [first, *range(1000, 1000 + length - 1)]


def test_a_large_top_k_of_one_row_is_no_cost_of_the_others(cluster: BreakableCluster, lone: str) -> None:
    """By the engine's processor time for a step; together with the others' it was 14 times as much."""

    async def sample(*top_ks: int) -> None:
        async with Client(cluster.url, cluster.instance) as client:
            how = [{"prompt": prompt(k, 8), "top_k": k, "temperature": 1.0, "ignore_eos": True} for k in top_ks]
            with cluster.slow_steps():  # until all are in one batch
                answers = asyncio.gather(*(client.stream("/v1/completions", SAMPLED, **one) for one in how))
                await running(cluster, ROWS)
            outcomes = await answers
        assert [outcome.fault for outcome in outcomes] == [""] * ROWS

    cluster.tell(lone, "sampling_s", ROWS)  # what was before does not count
    spent = []
    for top_ks in (range(5, 5 + ROWS), [*range(5, 4 + ROWS), VOCABULARY - 1]):
        asyncio.run(sample(*top_ks))
        spent.append(cluster.tell(lone, "sampling_s", ROWS))
    small, large = spent
    assert large < 4 * small


def test_a_step_without_memory_is_halved(cluster: BreakableCluster, lone: str) -> None:
    """Until it fits; the engine lives, and says the same."""

    async def ask() -> str:
        async with Client(cluster.url, cluster.instance) as client:
            outcome = await client.complete(prompt(1, 200), 4)
        assert outcome.fault == ""
        return outcome.text

    before = cluster.engine_pids()
    said = asyncio.run(ask())
    cluster.tell(lone, "limit_memory", 64)
    try:
        assert asyncio.run(ask()) == said
    finally:
        computed = cluster.tell(lone, "limit_memory", None)
    assert computed == [200, 200, 100, 50, 50, 100, 50, 50, 1, 1, 1]
    assert cluster.engine_pids() == before


def test_a_long_prompt_and_a_flood_of_one_client_delay_no_other(cluster: BreakableCluster, lone: str) -> None:
    """All on one engine."""

    async def beside_a_long_prompt(client: Client) -> tuple[Outcome, Outcome]:
        with cluster.slow_steps() as go_on:
            long = asyncio.ensure_future(client.complete(prompt(1, LONG_PROMPT), 2))
            await running(cluster, 1)
            short = await client.complete(prompt(2, 16), 2)
            go_on()
            return short, await long

    def of_another_tenant() -> float:
        """When its answer had come."""
        with cluster.http(headers={"x-tenant": "other"}) as http:
            http.post("/v1/completions", json={"prompt": prompt(3, 200), "max_tokens": 4}).raise_for_status()
        return time.perf_counter()

    async def beside_a_flood(client: Client) -> tuple[float, list[Outcome]]:
        with cluster.slow_steps():
            many = [[prompt(10 + CROWD * half + n, CROWD_PROMPT) for n in range(CROWD)] for half in range(2)]
            flood = asyncio.gather(*(client.stream("/v1/completions", 2, prompt=texts) for texts in many))
            await running(cluster, 2 * CROWD)
            with cluster.slow_steps(STEP_S):
                answered = await asyncio.to_thread(of_another_tenant)
        return answered, await flood

    async def everything() -> None:
        async with Client(cluster.url, cluster.instance) as client:
            short, long = await beside_a_long_prompt(client)
            assert (short.fault, long.fault) == ("", "")
            assert short.last < long.first, "it waited for all of the long prompt"
            answered, flood = await beside_a_flood(client)
        assert [outcome.fault for outcome in flood] == ["", ""]
        later = [
            choice["index"]
            for outcome in flood
            for at, event in zip(outcome.times, outcome.events, strict=True)
            for choice in event.get("choices", ())
            if at > answered and choice["finish_reason"]
        ]
        assert len(later) >= CROWD, "it waited for half of the flood, which came before it"

    asyncio.run(everything())
