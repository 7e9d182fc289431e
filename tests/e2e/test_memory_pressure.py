"""Streams in a KV pool that holds a quarter of what they need say what they say with room for all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_cluster import EVENLY, SHORT_OF_MEMORY, SOON_S, BreakableCluster, deploy_evenly, paced_options
from paced_model import HELD_S

from engine.scheduling.recovery import Recovery
from loadtests.client import Client, Outcome, complete_all
from loadtests.cluster import wait_for
from loadtests.workloads import prompts

STREAMS, TOKENS = 16, 48
PROMPTS = prompts(STREAMS, seed=3)
BLOCK_SIZE = 16
PROMPT_TOKENS = 16  # the most of any prompt
STEP_S = 0.1  # while requests take blocks from each other


@dataclass(frozen=True, slots=True)
class Pressed:
    """What the streams brought, and what their engine did for it."""

    outcomes: list[Outcome]
    preemptions: int
    recoveries: dict[str, int]  # complete ones, by kind

    @property
    def texts(self) -> list[str]:
        """What each stream said."""
        return [outcome.text for outcome in self.outcomes]


def blocks_needed(streams: int, tokens: int) -> int:
    """KV blocks that all streams hold when each is at its end, at most."""
    return streams * -(-(PROMPT_TOKENS + tokens) // BLOCK_SIZE)


def press(cluster: BreakableCluster, texts: Sequence[str], tokens: int) -> Pressed:
    """Run all streams at once, and look at the engine afterwards."""

    async def all_at_once() -> list[Outcome]:
        with cluster.slow_steps() as go_on:  # until the last one has come, the first ones have not ended
            streams = asyncio.ensure_future(complete_all(cluster.url, texts, tokens, cluster.instance))
            come = lambda: streams.done() or all_live()  # noqa: E731
            await asyncio.to_thread(wait_for, come, SOON_S, "not all requests arrive")
            go_on()
            return await streams

    def all_live() -> bool:
        return sum(state["live_requests"] for state in cluster.inspect()) == len(texts)

    outcomes = asyncio.run(all_at_once())
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")
    states = cluster.inspect()
    recoveries = {kind: sum(state["recoveries"][kind] for state in states) for kind in map(str, Recovery)}
    return Pressed(outcomes, sum(state["preemptions"] for state in states), recoveries)


assert SHORT_OF_MEMORY["num_blocks"] == blocks_needed(STREAMS, TOKENS) // 4


@pytest.fixture(scope="module")
def said(bare_cluster: BreakableCluster, paced_model: Path) -> list[str]:
    """What the streams say on two engines whose pools have room for all."""
    deploy_evenly(bare_cluster, paced_model)
    with_room = press(bare_cluster, PROMPTS, TOKENS)
    assert with_room.preemptions == 0
    assert len(set(with_room.texts)) > STREAMS // 2  # greedy, so that some may end up alike
    return with_room.texts


@pytest.fixture
def pressed(said: list[str], bare_cluster: BreakableCluster, paced_model: Path) -> BreakableCluster:
    """One engine with little memory, once ``said`` is known."""
    options = {**paced_options(paced_model), **EVENLY, **SHORT_OF_MEMORY}
    if bare_cluster.options != options:
        bare_cluster.redeploy_one(options)
    return bare_cluster


def test_all_streams_end_with_the_same_tokens(pressed: BreakableCluster, said: list[str]) -> None:
    cluster = pressed
    before = press(cluster, PROMPTS[:1], 1)
    after = press(cluster, PROMPTS, TOKENS)
    assert all(outcome.complete for outcome in after.outcomes)
    assert after.texts == said
    assert after.preemptions > before.preemptions
    assert after.recoveries["swap"] > before.recoveries["swap"]
    (state,) = cluster.inspect()
    assert (state["swapped"], state["host_blocks_used"]) == (0, 0)


def test_a_better_request_takes_the_blocks_that_the_sequences_of_another_share(
    pressed: BreakableCluster,
) -> None:
    """Each of these blocks has several references, all of the victim."""
    cluster = pressed
    several = {"n": 4, "temperature": 1.0, "seed": 7, "priority": 10}
    shared, own = [5, *range(3000, 3063)], [6, *range(4000, 4095)]  # of 4 and of 6 blocks

    async def ask(client: Client) -> Outcome:
        return await client.complete(shared, 28, **several)

    async def both() -> tuple[Outcome, Outcome, Outcome]:
        async with Client(cluster.url, cluster.instance) as client:
            alone = await ask(client)
            with cluster.slow_steps(HELD_S):
                worse = asyncio.ensure_future(ask(client))
                run = lambda: cluster.inspect()[0]["running"] == 4  # noqa: E731
                await asyncio.to_thread(wait_for, run, SOON_S, "the sequences do not run")
                better = asyncio.ensure_future(client.complete(own, 16))
                come = lambda: cluster.inspect()[0]["live_requests"] == 2  # noqa: E731
                await asyncio.to_thread(wait_for, come, SOON_S, "the better request does not arrive")
                assert not worse.done(), "it ended too soon to be preempted"
                with cluster.slow_steps(STEP_S):
                    await better
            return alone, await worse, await better

    alone, worse, better = asyncio.run(both())
    assert [outcome.fault for outcome in (alone, worse, better)] == [""] * 3
    assert better.ended < worse.last, "it waited until the victim had ended"
    assert texts_of(worse) == texts_of(alone)


def texts_of(outcome: Outcome) -> list[str]:
    """What each sequence said."""
    return ["".join(one["text"] for one in outcome.choices if one["index"] == index) for index in range(4)]
