"""Replicas that die of a request, of other weights, pools, and models, under real Ray Serve."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import ray
from breakable_application import POISON, POOLS, give_pools_back
from local_cluster import EVENLY, OPTIONS, SOON_S, BreakableCluster, paced_options
from paced_model import CONTEXT, save_paced, slow_steps
from ray.util import placement_group, remove_placement_group
from side_by_side import SEVERAL, texts_of_several

from engine.models.identity import ModelIdentity, model_revision, tokenizer_digest
from loadtests.client import Client, Outcome
from loadtests.cluster import gone, wait_for

FLEET, NEIGHBORS = 3, 16
STREAMS = 5
SHORT, SOME, LONG = 6, 100, 400  # tokens; at slow steps a long stream outlasts the slowest start of a replica


@pytest.fixture(scope="module")
def new_model(tmp_path_factory: pytest.TempPathFactory, bundled_model: Path) -> Path:
    """Its replicas have unlike pools, the first two ever started."""
    model = save_paced(tmp_path_factory.mktemp("new"), bundled_model, 2)
    (model / POOLS).write_text(json.dumps([64, 200]))
    return model


def fingerprints(outcome: Outcome) -> set[str]:
    return {event["system_fingerprint"] for event in outcome.events if "system_fingerprint" in event}


def fingerprint(model: Path, dtype: str = "torch.float32") -> str:
    return ModelIdentity(model_revision(model), dtype, tokenizer_digest(model)).fingerprint


@pytest.fixture
def larger(bare_cluster: BreakableCluster, paced_model: Path) -> BreakableCluster:
    """A replica for each engine that the poison kills, and one that stays."""
    bare_cluster.ensure(**paced_options(paced_model), **EVENLY)
    bare_cluster.settle(FLEET)
    return bare_cluster


async def streams(cluster: BreakableCluster, count: int, tokens: int) -> list[Outcome]:
    async with Client(cluster.url, cluster.instance) as client:
        return await asyncio.gather(*(client.complete([1000 + i, 20, 30], tokens) for i in range(count)))


def test_a_poisonous_request_kills_two_engines_and_no_neighbor(
    larger: BreakableCluster,
) -> None:
    """Nor of the neighbors' several sequences. All that is left of the fleet is idle in the end."""
    cluster = larger

    async def neighbors() -> tuple[list[Outcome], list[str]]:
        return await asyncio.gather(streams(cluster, NEIGHBORS, SOME), texts_of_several(cluster, SOME))

    undisturbed, texts = asyncio.run(neighbors())
    before = cluster.engine_pids()
    count = NEIGHBORS + SEVERAL

    async def poisoned() -> tuple[list[Outcome], list[str], Outcome]:
        with cluster.slow_steps() as go_on:
            beside = asyncio.ensure_future(neighbors())
            busy = lambda: sum(state["running"] for state in cluster.inspect()) == count  # noqa: E731
            await asyncio.to_thread(wait_for, busy, SOON_S, "not all neighbors run")
            async with Client(cluster.url, cluster.instance) as client:
                poison = await client.complete([POISON, 20, 30], SOME)
            assert not beside.done(), "they ended too soon to be disturbed"
            go_on()
            return *await beside, poison

    outcomes, together, poison = asyncio.run(poisoned())
    assert [error["code"] for error in poison.errors] == ["engine_died"]
    assert [(one.fault, one.text) for one in outcomes] == [("", one.text) for one in undisturbed]
    assert together == texts
    wait_for(lambda: sum(map(gone, before)) == 2, SOON_S, "Serve keeps replicas without an engine")
    cluster.wait_routable(FLEET)
    wait_for(cluster.idle, SOON_S, "requests or blocks are left")
    assert sum(map(gone, before)) == 2
    an_idle_replica_stops_at_once(cluster)


def an_idle_replica_stops_at_once(cluster: BreakableCluster) -> None:
    before = cluster.engine_pids()
    cluster.scale(FLEET - 1)
    wait_for(lambda: len(cluster.inspect()) == FLEET - 1, SOON_S, "no replica was told to stop")
    left = {state["pid"] for state in cluster.inspect()}
    (stopped,) = (pid for pid in before if pid not in left)
    wait_for(lambda: gone(stopped), SOON_S, "the idle replica is still there")
    (outcome,) = asyncio.run(streams(cluster, 1, 4))
    assert outcome.complete


@pytest.fixture
def old_weights(bare_cluster: BreakableCluster, paced_model: Path) -> BreakableCluster:
    """``paced_model`` on two replicas, with whatever other options."""
    if bare_cluster.options.get("model") != str(paced_model):
        bare_cluster.deploy(**paced_options(paced_model))
    bare_cluster.settle(2)
    return bare_cluster


def test_a_redeploy_with_other_weights_mixes_no_answer(
    old_weights: BreakableCluster, paced_model: Path, new_model: Path
) -> None:
    cluster = old_weights
    undisturbed = asyncio.run(streams(cluster, STREAMS, LONG))
    short: list[Outcome] = []
    beside: set[str] = set()  # the weights of the short answers that came while the long streams ran

    async def redeploy() -> list[Outcome]:
        with slow_steps(paced_model) as go_on:
            long = asyncio.ensure_future(streams(cluster, STREAMS, LONG))
            busy = lambda: sum(state["running"] for state in cluster.inspect()) == STREAMS  # noqa: E731
            await asyncio.to_thread(wait_for, busy, SOON_S, "not all streams run")
            options = paced_options(new_model)
            deployed = asyncio.ensure_future(asyncio.to_thread(lambda: cluster.deploy(**options)))
            while not (deployed.done() and long.done()):
                short.extend(await streams(cluster, 1, SHORT))
                if not long.done():
                    beside.update(fingerprints(short[-1]))
                if after in beside:
                    go_on()
                await asyncio.sleep(0.2)
            await deployed
            return await long

    before, after = fingerprint(paced_model), fingerprint(new_model)
    assert before != after
    long = asyncio.run(redeploy())
    assert after in beside, "the streams ended before the new weights answered"
    assert [(one.fault, one.text) for one in long] == [("", one.text) for one in undisturbed]
    assert [fingerprints(one) for one in [*undisturbed, *long]] == [{before}] * (2 * STREAMS)
    (wanted,) = asyncio.run(streams(cluster, 1, SHORT))
    assert (wanted.fault, fingerprints(wanted)) == ("", {after})
    answers = {before: undisturbed[0].text, after: wanted.text}
    assert not undisturbed[0].text.startswith(wanted.text)
    assert [one.fault for one in short if one.fault] == [], "some ingress answers all the time"
    for one in short:
        (which,) = fingerprints(one)
        assert answers[which].startswith(one.text)


@pytest.fixture
def new_weights(bare_cluster: BreakableCluster, new_model: Path) -> BreakableCluster:
    """``new_model`` on two replicas; usually those of the redeploy."""
    if bare_cluster.options != paced_options(new_model):
        give_pools_back(new_model)
        bare_cluster.deploy(**paced_options(new_model))
    return bare_cluster


def test_a_prompt_goes_to_the_replica_whose_pool_holds_it(new_weights: BreakableCluster) -> None:
    cluster = new_weights

    async def ask(prompt: int, count: int) -> list[Outcome]:
        async with Client(cluster.url, cluster.instance) as client:
            return await asyncio.gather(*(client.complete([5] * prompt, 4) for _ in range(count)))

    outcomes = asyncio.run(ask(94 * 16 - 10, 6))
    assert [one.fault for one in outcomes] == [""] * 6
    (refused,) = asyncio.run(ask(201 * 16, 1))
    assert (refused.status, [error["code"] for error in refused.errors]) == (400, ["kv_pool_exceeded"])
    cluster.wait_routable(2)


@pytest.fixture
def several(bare_cluster: BreakableCluster) -> BreakableCluster:
    """For a test that deploys several models."""
    return bare_cluster


def test_a_model_comes_and_sleeps_beside_one_that_goes_on(
    several: BreakableCluster, paced_model: Path, new_model: Path
) -> None:
    cluster = several
    shared = {**OPTIONS, "max_model_len": CONTEXT, "kv_memory": "64MiB", "engine_replicas": 1}
    del shared["engine_cpus"]
    stays = {"name": "stays", "model": str(paced_model)}
    sleeps = {"name": "sleeps", "model": str(new_model), "dtype": "bfloat16", "max_replicas": 1}
    cluster.ensure(**shared, models=[stays])
    before = cluster.engine_pids()

    def woken() -> dict[str, str]:
        """Of each model what generates its answers."""
        with cluster.http() as http:
            found = {}
            for model in ("sleeps", "stays"):
                body = {"model": model, "prompt": [1, 2, 3], "max_tokens": 1}
                answer = http.post("/v1/completions", json=body).json()
                found[answer["model"]] = answer["system_fingerprint"]
            refused = http.post("/v1/completions", json={**body, "model": "goes"})
        assert refused.status_code == 404
        assert "this server has 'stays', 'sleeps'" in refused.json()["error"]["message"]
        return found

    sleeps |= {"min_replicas": 0, "scale_down_after_s": 0.1}
    cluster.deploy(**shared, models=[stays, sleeps])

    def states() -> dict[str, str]:
        return {name: model["status"] for name, model in cluster.health().get("models", {}).items()}

    asleep = {"stays": "ok", "sleeps": "asleep"}
    wait_for(
        lambda: states() == asleep and cluster.engine_pids() == before, SOON_S, "the second does not sleep"
    )
    assert woken() == {"stays": fingerprint(paced_model), "sleeps": fingerprint(new_model, "torch.bfloat16")}
    assert set(before) <= set(cluster.engine_pids())


def test_on_two_nodes_more_engines_find_room_beside_those_that_hold_it(
    several: BreakableCluster, paced_model: Path
) -> None:
    """Ray has CPUs for the first two only, and each node gets its part of the engines."""
    cluster = several
    options = paced_options(paced_model)
    del options["engine_cpus"]
    with cluster.second_node() as node:

        def engines() -> list[int]:
            """How many each node has."""
            pids = {state["pid"] for state in cluster.inspect()}
            second = pids & {child.pid for child in node.children(recursive=True)}
            return sorted([len(second), len(pids - second)])

        cluster.deploy(**{**options, "engine_replicas": 2})
        wait_for(lambda: engines() == [1, 1], SOON_S, "two engines are not spread")
        taken = placement_group([{"CPU": 7}])
        try:
            ray.get(taken.ready(), timeout=SOON_S)
            cluster.deploy(**{**options, "engine_replicas": 3})
            wait_for(lambda: engines() == [1, 2], SOON_S, "three engines are not spread")
        finally:
            remove_placement_group(taken)
