"""More requests than one engine can ever take: some are told to come later, all that are taken are answered."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from local_cluster import EVENLY, SHORT_OF_MEMORY, SOON_S, BreakableCluster, paced_options
from prometheus_client.parser import text_string_to_metric_families
from ray.serve.context import _get_global_client

from app.launch import serving
from loadtests.client import MODEL
from loadtests.cluster import wait_for
from loadtests.workloads import prompts

CLIENTS, TOKENS = 40, 32
REFUSED = 12  # are enough
OPTIONS = {**SHORT_OF_MEMORY, "max_wait_s": 1.0}  # room for five requests at once, of which 40 wait for seconds
FIGURES = ("quire_refused_requests_total", "quire_expected_wait_seconds")


class Answer(NamedTuple):
    """One response; ``retry_after`` as the header says it."""

    status: int
    body: dict[str, Any]
    retry_after: str | None


@pytest.fixture(scope="module")
def small(bare_cluster: BreakableCluster, paced_model: Path) -> BreakableCluster:
    """One engine that holds little, that of the memory tests if these came before."""
    bare_cluster.redeploy_one({**paced_options(paced_model), **EVENLY, **OPTIONS})
    wait_for(lambda: len(bare_cluster.ingresses()) == 1, SOON_S, "an ingress that refuses nothing is left")
    return bare_cluster


async def ask(client: httpx.AsyncClient, prompt: str) -> Answer:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    return Answer(response.status_code, response.json(), response.headers.get("retry-after"))


async def flood(url: str) -> list[Answer]:
    """Clients that ask again as soon as they have an answer, until enough have been refused; all answers."""
    answers: list[Answer] = []

    def refused() -> int:
        return sum(answer.status != 200 for answer in answers)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def keep_asking(prompt: str) -> None:
            while refused() < REFUSED:
                answer = await ask(client, prompt)
                answers.append(answer)
                if answer.status != 200:  # sooner than it was told to, but not at once
                    await asyncio.sleep(0.2)

        # Newcomers while the first ones still wait: all at once would be a burst, which is taken.
        async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as group:
            for prompt in prompts(CLIENTS, seed=9):
                group.create_task(keep_asking(prompt))
                await asyncio.sleep(0.1)
    return answers


def ingress_name(cluster: BreakableCluster) -> str:
    """Serve's, of the only ingress replica that answers."""
    (pid,) = (state["pid"] for state in cluster.ingresses())
    deployments = _get_global_client().get_serve_details()["applications"][serving.APP_NAME]["deployments"]
    (name,) = (one["replica_id"] for one in deployments["ingress"]["replicas"] if one["pid"] == pid)
    return str(name)


def figures(address: str, ingress: str) -> dict[str, float]:
    """What a page of metrics says of one ingress: its refusals for overload, and the wait that it expects."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(address, timeout=SOON_S).text):
        for sample in family.samples:
            name, labels = sample.name.removeprefix("ray_"), sample.labels
            if name in FIGURES and labels["replica"].split("#")[-1] == ingress:
                assert labels["model_name"] == MODEL
                if labels.get("reason", "overloaded") == "overloaded":
                    assert name not in found
                    found[name] = sample.value
    return found


def test_a_flood_is_held_off_and_its_end_is_noticed(small: BreakableCluster) -> None:
    with small.slow_steps(0.02):  # so that a batch takes most of a second on a fast machine, too
        answers = asyncio.run(flood(small.url))
    refused = [answer for answer in answers if answer.status != 200]
    assert {answer.status for answer in refused} == {429}
    for answer in refused:
        assert answer.body["error"]["code"] == "overloaded"
        assert answer.retry_after is not None
        assert 1 <= int(answer.retry_after) <= 60
    taken = [answer for answer in answers if answer.status == 200]
    assert len(taken) >= 8
    for answer in taken:
        assert answer.body["usage"]["completion_tokens"] == TOKENS
        assert answer.body["choices"][0]["finish_reason"] == "length"
    (overload,) = [state["overload"] for state in small.ingresses()]
    assert overload["refused"] == len(refused)
    assert overload["faults"] == 0

    wait_for(small.idle, SOON_S, "requests or blocks are left")
    wait_for(lambda: not small.ingresses()[0]["overload"]["refusing"], SOON_S, "the door stays closed")
    again = httpx.post(f"{small.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 2}, timeout=120)
    assert again.status_code == 200

    # Ray still has those of ingresses that have gone, too.
    expected = dict(zip(FIGURES, (len(refused), 0.0), strict=True))
    ingress = ingress_name(small)

    def published(address: str) -> bool:
        return figures(address, ingress) == expected

    for address in (f"{small.url}/metrics", f"http://127.0.0.1:{small.metrics_port}/metrics"):
        wait_for(partial(published, address), SOON_S, f"{address} does not say so", 0.5)
