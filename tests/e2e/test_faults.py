"""Clients that vanish, processes that die or hang, replicas that are told to stop."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
from local_cluster import SOON_S, BreakableCluster, kill_all
from ray.util import placement_group, remove_placement_group

from loadtests.client import Outcome, complete, complete_all, vanish
from loadtests.cluster import gone, wait_for
from loadtests.workloads import prompts

STREAMS = 16
TOKENS = 64
FRAMES = 5  # of an engine, after which its streams are under way
FEW = 6
VANISHING = 250  # clients, 32 at once; loadtests.faults has a thousand
MOVED_S = 30.0  # until which the streams of a stuck engine go on elsewhere; about 11 where nothing else runs
LONG = 300  # tokens of a few streams; enough that a stopping replica is gone before they end


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
def undisturbed(deployed: BreakableCluster) -> list[Outcome]:
    """What ``STREAMS`` streams say when nothing happens to them."""
    deployed.settle(2)
    outcomes = asyncio.run(complete_all(deployed.url, prompts(STREAMS), TOKENS, deployed.instance))
    check_same(outcomes, outcomes)
    return outcomes


async def while_streaming(
    cluster: BreakableCluster, act: Callable[[], object], count: int = STREAMS, tokens: int = TOKENS
) -> list[Outcome]:
    """Start the streams, call ``act`` in a thread once every engine has some running, return all outcomes."""
    streams = asyncio.ensure_future(
        complete_all(cluster.url, prompts(STREAMS)[:count], tokens, cluster.instance)
    )

    def all_busy() -> bool:
        states = cluster.inspect()
        return sum(state["live_requests"] for state in states) == count and all(
            state["running"] > 0 for state in states
        )

    await asyncio.to_thread(wait_for, all_busy, SOON_S, "not every engine is busy")
    begun = await asyncio.to_thread(frames, cluster)
    await asyncio.to_thread(
        wait_for,
        lambda: all(count >= begun[replica] + FRAMES for replica, count in frames(cluster).items()),
        SOON_S,
        "no tokens come",
    )
    await asyncio.to_thread(act)
    return await streams


def test_many_clients_vanish(cluster: BreakableCluster) -> None:
    before = cluster.channels()
    asyncio.run(vanish(cluster.url, VANISHING, seed=7, instance=cluster.instance))
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")
    wait_for(lambda: cluster.health()["live_requests"] == 0, SOON_S, "the ingress still has requests")
    assert cluster.channels() == before
    assert set(cluster.health()["booked_tokens"].values()) == {0}
    wait_for(lambda: cluster.connections() == 0, SOON_S, "connections are left")


def test_channel_outlives_its_first_client(cluster: BreakableCluster) -> None:
    # A fresh ingress process: nobody has used its channels.
    old = cluster.channels()
    cluster.kill(cluster.ingress_pids()[0])
    wait_for(lambda: cluster.channels() and not cluster.channels() & old, SOON_S, "no new ingress has come")
    cluster.wait_routable(2)
    fresh = cluster.channels()

    async def first_leaves() -> Outcome:
        second = asyncio.ensure_future(complete_at(cluster, "The first rule is", 48))
        await complete_at(cluster, "Once upon a time", 200, leave_after=2)
        return await second

    outcome = asyncio.run(first_leaves())
    assert outcome.done
    assert outcome.finish_reason == "length"
    assert cluster.channels() == fresh


def test_engine_killed_amid_streams(cluster: BreakableCluster, undisturbed: list[Outcome]) -> None:
    victim = cluster.inspect()[0]
    outcomes = asyncio.run(while_streaming(cluster, lambda: cluster.kill(victim["pid"])))
    check_same(outcomes, undisturbed)
    cluster.wait_routable(2, timeout_s=SOON_S)
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")


def test_node_killed_amid_streams(cluster: BreakableCluster, undisturbed: list[Outcome]) -> None:
    """Of two nodes one is switched off: its streams go on on the other, and so does its engine."""
    taken = placement_group([{"CPU": 6}])  # all that the first node has left, so a third engine fits the second
    try:
        with cluster.second_node() as node:
            ray.get(taken.ready(), timeout=SOON_S)
            cluster.scale(3)
            cluster.wait_routable(3)
            on_second = {child.pid for child in node.children(recursive=True)}
            there = [state["pid"] for state in cluster.inspect() if state["pid"] in on_second]
            assert len(there) == 1
            remove_placement_group(taken)
            outcomes = asyncio.run(while_streaming(cluster, lambda: kill_all(node)))
            check_same(outcomes, undisturbed)
            assert gone(there[0])
            wait_for(lambda: len(cluster.engine_pids()) == 3, SOON_S, "no engine has come in its place")
            cluster.wait_routable(3, timeout_s=SOON_S)
            wait_for(cluster.idle, SOON_S, "requests or blocks are left")
    finally:
        remove_placement_group(taken)
        cluster.scale(2)
        cluster.wait_routable(2)


def test_engine_that_dies_inside_is_replaced(cluster: BreakableCluster, undisturbed: list[Outcome]) -> None:
    victim = cluster.inspect()[0]
    outcomes = asyncio.run(while_streaming(cluster, lambda: cluster.break_engine(victim["replica"])))
    check_same(outcomes, undisturbed)
    wait_for(lambda: gone(victim["pid"]), SOON_S, "Serve still keeps the replica without an engine")
    cluster.wait_routable(2, timeout_s=SOON_S)
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")


def test_engine_that_is_stuck_inside_is_replaced(cluster: BreakableCluster, undisturbed: list[Outcome]) -> None:
    victim = cluster.inspect()[0]
    outcomes = asyncio.run(while_streaming(cluster, lambda: cluster.stick_engine(victim["replica"])))
    check_same(outcomes, undisturbed)
    assert max(gap for outcome in outcomes for gap in outcome.gaps) < MOVED_S
    wait_for(lambda: gone(victim["pid"]), SOON_S, "Serve still keeps the replica whose engine is stuck")
    cluster.wait_routable(2, timeout_s=SOON_S)
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")


def test_hung_engine_loses_its_requests(cluster: BreakableCluster, undisturbed: list[Outcome]) -> None:
    victim = cluster.inspect()[0]
    try:
        outcomes = asyncio.run(while_streaming(cluster, lambda: cluster.kill(victim["pid"], signal.SIGSTOP)))
    finally:
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
        return sum(sum(ingress["routed"].values()) for ingress in wait_for(cluster.ingresses, SOON_S, "silent"))

    def made() -> int:
        return sum(state["generated_tokens"] for state in cluster.inspect())

    before = routed(), made(), cluster.health()["resubmitted"]
    channels = cluster.channels()

    def cut() -> None:
        for state in cluster.inspect():
            cluster.cut_channels(state["replica"])

    outcomes = asyncio.run(while_streaming(cluster, cut))
    check_same(outcomes, undisturbed)
    assert not cluster.channels() & channels
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")
    after = routed(), made(), cluster.health()["resubmitted"]
    assert after == (before[0] + STREAMS, before[1] + STREAMS * TOKENS, before[2])
    assert [state["kept_attempts"] for state in cluster.inspect()] == [0, 0]


def test_ingress_killed_amid_streams(cluster: BreakableCluster) -> None:
    before = cluster.channels()

    async def kill() -> None:
        streams = asyncio.gather(
            *(complete_at(cluster, text, LONG) for text in prompts(8)),
            return_exceptions=True,
        )
        await asyncio.to_thread(
            wait_for, lambda: sum(state["running"] for state in cluster.inspect()) == 8, SOON_S, "not all run"
        )
        cluster.kill(cluster.ingress_pids()[0])
        await streams

    asyncio.run(kill())
    wait_for(cluster.idle, SOON_S, "a dead ingress still holds blocks")
    wait_for(lambda: not cluster.channels() & before, SOON_S, "a dead ingress still holds channels")
    cluster.wait_routable(2, timeout_s=SOON_S)
    assert asyncio.run(complete_at(cluster, "Hello", 4)).done


def test_garbage_is_not_sought_in_what_an_engine_has_loaded(cluster: BreakableCluster) -> None:
    """It would stop every stream for a tenth of a second."""
    assert all(state["frozen_objects"] > 100_000 for state in cluster.inspect())


def test_idle_replica_stops_at_once(cluster: BreakableCluster) -> None:
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")
    before = cluster.engine_pids()
    cluster.scale(1)
    try:
        wait_for(lambda: len(cluster.inspect()) == 1, SOON_S, "no replica was told to stop")
        (left,) = (state["pid"] for state in cluster.inspect())
        (stopped,) = (pid for pid in before if pid != left)
        wait_for(lambda: gone(stopped), SOON_S, "the idle replica is still there")
        assert asyncio.run(complete_at(cluster, "Hello", 4)).done
    finally:
        cluster.scale(2)


def test_stopping_replica_hands_its_streams_over(cluster: BreakableCluster, undisturbed: list[Outcome]) -> None:
    before = cluster.engine_pids()
    still_running = []

    def stop_one() -> None:
        cluster.scale(1)
        wait_for(lambda: len(cluster.inspect()) == 1, SOON_S, "no replica was told to stop")
        (left,) = (state["pid"] for state in cluster.inspect())
        (stopped,) = (pid for pid in before if pid != left)
        wait_for(lambda: gone(stopped), SOON_S, "the replica is still there")
        still_running.extend(state["live_requests"] for state in cluster.inspect())

    try:
        outcomes = asyncio.run(while_streaming(cluster, stop_one, FEW, LONG))
    finally:
        cluster.scale(2)
    check_same(outcomes, undisturbed)
    assert still_running == [FEW], "the replica waited for its streams"
