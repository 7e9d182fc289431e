"""Which prompts that begin alike went where: found by their blocks, each counted once, in bounded memory."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.dashboard.prefix_flows import MAX_SHOWN_REPLICAS, PrefixFlows, visible_rows
from app.routing.prefix_flow import MAX_PLACEMENTS, MAX_PREFIXES, WINDOW_S, PrefixFlow, PrefixGroup, merged
from engine.kv.block_keys import KeyScheme
from engine.request import CacheNamespace

BLOCK = 4
KEYS = KeyScheme("model", "float32", BLOCK)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def text(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def add(
    flow: PrefixFlow,
    prompt: list[int],
    replica: str = "a",
    reason: str = "prefix",
    cached: int = 0,
    tenant: str = "",
    salt: str = "",
) -> None:
    keys = KEYS.keys(prompt, CacheNamespace("", tenant, salt))
    flow.add(keys, replica, reason, prompt, cached, tenant, salt)


def system(number: int, blocks: int = 3) -> list[int]:
    return [7] * BLOCK + [100 + number] * BLOCK * (blocks - 1)


def test_system_prompts_are_told_apart_where_they_begin_alike() -> None:
    flow = PrefixFlow(Clock())
    for user in range(8):
        add(flow, [*system(1), *[500 + user] * 8], "a", "prefix", 12)
        if user < 4:
            add(flow, [*system(2), *[500 + user] * 8], "b" if user else "a", "prefix" if user else "balance")
    add(flow, [*system(3), 1, 2, 3, 4])
    add(flow, [900 + BLOCK] * 9)
    add(flow, [1])
    first, second, alone, rest = flow.groups(text)
    assert (first.blocks, first.requests, first.to) == (3, 8, {("a", "prefix"): 8})
    assert (first.tokens, first.cached) == (8 * 20, 8 * 12)
    assert first.per_s == 8 / WINDOW_S
    assert first.words.startswith("7 7 7 7 101 101")
    assert (second.blocks, second.requests) == (3, 4)
    assert second.to == {("a", "balance"): 1, ("b", "prefix"): 3}
    assert (alone.blocks, alone.requests) == (1, 1)  # shares the first block with both
    assert (rest.blocks, rest.requests) == (0, 2)
    assert first.key == KEYS.keys(system(1), CacheNamespace())[2]


def test_tenants_have_prefixes_of_their_own_and_a_salt_hides_the_words() -> None:
    flow = PrefixFlow(Clock())
    for tenant, salt in (("t", ""), ("t", "s"), ("u", "")):
        for _ in range(3):
            add(flow, [*system(1), 5], tenant=tenant, salt=salt)
    groups = flow.groups(text)
    assert [(group.tenant, group.requests, bool(group.words)) for group in groups] == [
        ("t", 3, True),
        ("t", 3, False),
        ("u", 3, True),
        ("", 0, False),
    ]
    rows = visible_rows(groups, "u", everyones=True, words=True)
    assert [row["words"] is not None for row in rows] == [False, False, True, False]
    rows = visible_rows(groups, "u", everyones=False, words=True)
    assert [(row["requests"], row["words"] is not None) for row in rows] == [(3, True), (6, False)]
    rows = visible_rows(groups, "u", everyones=True, words=False)
    assert all(row["words"] is None for row in rows)


def test_only_the_last_minute_counts_and_of_many_requests_the_last_ones() -> None:
    clock = Clock()
    flow = PrefixFlow(clock)
    for _ in range(5):
        add(flow, system(1))
    clock.now += WINDOW_S
    assert [group.requests for group in flow.groups(text)] == [0]
    for number in range(MAX_PLACEMENTS + 100):
        clock.now += 0.001
        add(flow, system(number % 2))
    groups = flow.groups(text)
    assert sum(group.requests for group in groups) == MAX_PLACEMENTS
    assert sum(group.per_s for group in groups) > 990


def test_a_hundred_replicas_and_many_prefixes_stay_small() -> None:
    flow = PrefixFlow(Clock())
    for number in range(MAX_PLACEMENTS):
        add(flow, [*system(number % 40, 80), number], f"r{number % 97}")
    groups = flow.groups(text)
    assert len(groups) == MAX_PREFIXES + 1
    rows = visible_rows(groups, "", everyones=True, words=True)
    assert sum(row["requests"] for row in rows) == MAX_PLACEMENTS
    assert {len(row["to"]) for row in rows} == {MAX_SHOWN_REPLICAS}
    assert rows[-1]["more"] == 97 - MAX_SHOWN_REPLICAS
    assert groups[0].blocks == 64  # no more are compared


@given(st.lists(st.lists(st.integers(0, 2), max_size=6 * BLOCK), max_size=60))
def test_each_request_is_in_one_group_whose_prefix_it_has(prompts: list[list[int]]) -> None:
    flow = PrefixFlow(Clock())
    for prompt in prompts:
        add(flow, prompt)
    groups = flow.groups(text)
    assert sum(group.requests for group in groups) == len(prompts)
    assert groups[-1].blocks == 0
    holders = Counter(
        (place, key) for prompt in prompts for place, key in enumerate(KEYS.keys(prompt, CacheNamespace()), 1)
    )
    for group in groups[:-1]:
        assert 0 < group.requests <= holders[group.blocks, group.key]
        assert holders[group.blocks, group.key] >= 3


def test_ingresses_are_added_up_and_asked_once_for_all_viewers() -> None:
    flows = [PrefixFlow(Clock()) for _ in range(2)]
    for at, flow in enumerate(flows):
        for _ in range(3 + at):
            add(flow, system(1), f"r{at}", cached=at)
    clock = Clock()
    asks: list[str] = []

    async def ask(model: str) -> list[list[PrefixGroup]]:
        asks.append(model)
        return [flow.groups(text) for flow in flows]

    async def test() -> list[Any]:
        both = PrefixFlows(ask, clock)
        found = await asyncio.gather(*(both.get("m") for _ in range(5)))
        clock.now += 1.0
        await both.get("m")
        return found

    (group, rest), *others = asyncio.run(test())
    assert asks == ["m", "m"]
    assert all(other == [group, rest] for other in others)
    assert (group.requests, group.cached, rest.requests) == (7, 4, 0)
    assert group.to == {("r0", "prefix"): 3, ("r1", "prefix"): 4}
    assert [one.requests for one in merged([])] == [0]
