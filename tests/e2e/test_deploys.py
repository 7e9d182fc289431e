"""Deploys under load: one that cannot work changes nothing, and an option restarts only what it concerns."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from local_cluster import SOON_S, BreakableCluster, deploy_evenly

from loadtests.client import Client, Outcome
from loadtests.cluster import wait_for
from loadtests.workloads import prompts

STREAMS, TOKENS = 6, 40
EVERY_S = 0.2
PROMPTS = prompts(STREAMS, seed=12)


class Load(NamedTuple):
    """What came of it: the streams of each prompt, one after the other, and the short requests beside them."""

    streams: list[list[Outcome]]
    short: list[Outcome]


def replicas(cluster: BreakableCluster) -> tuple[set[int], set[int]]:
    """Processes of engines and ingresses."""
    return set(cluster.engine_pids()), set(cluster.ingress_pids())


def settled(cluster: BreakableCluster) -> tuple[set[int], set[int]]:
    """``replicas`` once none of the deploy before, of whichever test, are left."""
    cluster.settle(2)
    return replicas(cluster)


async def under_load(cluster: BreakableCluster, act: Callable[[], object]) -> Load:
    """``act``, in a thread, while each prompt is streamed again and again and short requests come."""
    over = asyncio.Event()

    async def keep_streaming(prompt: str) -> list[Outcome]:
        outcomes = []
        while not over.is_set():
            outcomes.append(await client.complete(prompt, TOKENS))
        return outcomes

    async def keep_asking() -> list[Outcome]:
        asked = []
        while not over.is_set():
            asked.append(asyncio.ensure_future(client.complete("Hello", 2)))
            await asyncio.sleep(EVERY_S)
        return await asyncio.gather(*asked)

    # Slow steps keep the load up with few events, which cost what the replicas need to start.
    with cluster.slow_steps() as go_on:
        async with Client(cluster.url, cluster.instance) as client:
            streams = asyncio.gather(*(keep_streaming(prompt) for prompt in PROMPTS))
            short = asyncio.ensure_future(keep_asking())
            try:
                await asyncio.to_thread(wait_for, lambda: running(cluster) >= STREAMS, SOON_S, "not all stream")
                await asyncio.to_thread(act)
            finally:
                over.set()
                go_on()
                load = Load(await streams, await short)
    return load


def running(cluster: BreakableCluster) -> int:
    return sum(int(state["running"]) for state in cluster.inspect())


def check(load: Load, said: list[str]) -> None:
    """Nothing failed, nothing was cut, and each prompt was continued as ever."""
    faults = [outcome.fault for outcome in [*itertools.chain(*load.streams), *load.short] if not outcome.whole]
    assert faults == []
    assert [{outcome.text for outcome in outcomes} for outcomes in load.streams] == [{text} for text in said]
    assert len(load.short) > 5


@pytest.fixture(scope="module")
def said(bare_cluster: BreakableCluster, paced_model: Path) -> list[str]:
    """What each stream says when nothing happens."""
    deploy_evenly(bare_cluster, paced_model)
    load = asyncio.run(under_load(bare_cluster, lambda: None))
    texts = [outcomes[0].text for outcomes in load.streams]
    assert len(set(texts)) > STREAMS // 2
    return texts


@pytest.fixture
def restartable(paced: BreakableCluster) -> BreakableCluster:
    """``paced``, for a test that leaves other options."""
    return paced


def test_a_model_that_is_not_there_changes_nothing(paced: BreakableCluster, said: list[str]) -> None:
    cluster = paced
    before = settled(cluster)
    options = dict(cluster.options)
    refused: list[str] = []

    def deploy() -> None:
        with pytest.raises(RuntimeError) as caught:
            cluster.deploy(**{**options, "model": "/no/such/folder"})
        refused.append(str(caught.value))

    try:
        check(asyncio.run(under_load(cluster, deploy)), said)
    finally:
        cluster.options = options
    (message,) = refused
    assert message.splitlines()[-1].startswith("model '/no/such/folder' is not a folder")
    assert "Traceback" not in message
    assert replicas(cluster) == before


def test_an_option_restarts_what_it_concerns(restartable: BreakableCluster, said: list[str]) -> None:
    """Of the ingress first, then of the engines."""
    cluster = restartable
    engines, ingresses = settled(cluster)
    options: dict[str, Any] = {**cluster.options, "unavailable_after_s": 601, "log_level": "WARNING"}
    check(asyncio.run(under_load(cluster, lambda: cluster.deploy(**options))), said)
    after = settled(cluster)
    assert after[0] == engines
    assert not after[1] & ingresses

    options |= {"max_num_seqs": 128}
    check(asyncio.run(under_load(cluster, lambda: cluster.deploy(**options))), said)
    last = settled(cluster)
    assert not last[0] & engines
    assert last[1] == after[1]
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")
