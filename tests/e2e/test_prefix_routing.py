"""Requests that share a prompt go where its blocks are, over real Ray Serve."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from local_cluster import BreakableCluster
from paced_model import HELD_S

from loadtests.client import MODEL, Client, Outcome

CLIENTS, ASKED = 4, 16
SHOPS = ("shoes", "lamps", "books", "tea")


def ask(http: httpx.Client, shop: str, question: str) -> dict[str, Any]:
    system = f"You answer customers of a shop that sells {shop}. " + f"Be kind and brief about {shop}. " * 30
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 4}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def predictions(http: httpx.Client) -> dict[str, int]:
    counters: dict[str, int] = http.get("/health").json()["cached_tokens"]
    return counters


def test_followers_find_the_shared_prompt(cluster: BreakableCluster) -> None:
    """With two replicas and no regard to prefixes, about half of the second requests would miss."""
    with cluster.http() as http:
        before = predictions(http)
        for shop in SHOPS:
            ask(http, shop, "Are you open?")
        followers = [ask(http, shop, f"Do you have {n}?") for n in range(3) for shop in SHOPS]
        shared = 16 * 8  # blocks of the shortest system prompt, at least
        assert all(usage["prompt_tokens_details"]["cached_tokens"] >= shared for usage in followers)
        after = predictions(http)
        assert after["requests"] - before["requests"] == len(SHOPS) * 4
        assert after["predicted"] - before["predicted"] >= shared * len(followers)


def test_a_burst_of_one_prompt_computes_it_few_times(cluster: BreakableCluster) -> None:
    with cluster.http() as http:
        with ThreadPoolExecutor(8) as clients:
            usages = list(clients.map(lambda n: ask(http, "sails", f"Question {n}?"), range(8)))
        cold = [usage for usage in usages if usage["prompt_tokens_details"]["cached_tokens"] < 16 * 8]
        assert len(cold) <= 2  # once on each replica at most


def test_a_tenant_does_not_find_anothers_prompt(cluster: BreakableCluster) -> None:
    with cluster.http(headers={"x-tenant": "one"}) as one:
        ask(one, "maps", "Hello?")
        again = ask(one, "maps", "Again?")
        assert again["prompt_tokens_details"]["cached_tokens"] >= 128
    with cluster.http(headers={"x-tenant": "two"}) as two:
        assert ask(two, "maps", "Hello?")["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_replica_that_is_slow_gets_less(cluster: BreakableCluster) -> None:
    """Each client asks again once it has its answer; the slow replica gives none until the other gave most."""
    slow, fast = (state["replica"] for state in cluster.inspect())
    answered: list[Outcome] = []

    def routed() -> Counter[str]:
        (ingress,) = cluster.ingresses()
        return Counter(ingress["routed"])

    async def keep_asking(client: Client, number: int) -> None:
        while len(answered) < ASKED:
            answered.append(await client.complete([number, len(answered), 20, 30], 6))
        await asyncio.to_thread(cluster.tell, slow, "slow_down", 0.0)

    async def ask() -> None:
        async with Client(cluster.url, cluster.instance) as client:
            await asyncio.gather(*(keep_asking(client, 1000 + number) for number in range(CLIENTS)))

    before = routed()
    cluster.tell(slow, "slow_down", HELD_S)
    asyncio.run(ask())
    assert [outcome.fault for outcome in answered if outcome.fault] == []
    got = routed() - before
    assert got[slow] <= CLIENTS < got[fast]
