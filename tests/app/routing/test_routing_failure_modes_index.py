"""Knowledge: each way in which other routers are known to be wrong about what is cached where.

The table in docs/routing.md says which failure each test stands for, and where it was seen.
"""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
from index_support import claimed
from routing_support import BLOCK, IDLE, Fleet, prefix, prompt

from app.api.chat_messages import ChatMessage
from app.api.prompt_tokenizer import PromptTokenizer
from app.api.tokenizer_parts import TokenizerParts
from engine.kv.block_keys import KeyScheme
from engine.request import CacheNamespace

SCHEME = KeyScheme("revision", "float32", BLOCK)


@pytest.mark.parametrize("ingresses", [1, 8])
def test_follow_ups_find_their_session_through_whichever_ingress_they_come(ingresses: int) -> None:
    entries = [Fleet(4) for _ in range(ingresses)]
    draw, sequences, homes = random.Random(5), Counter[str](), dict[int, str]()
    for turn in range(1, 7):
        for session in range(1, 41):
            keys = prefix(session, 20 * turn)
            entry = draw.choice(entries)
            replica = entry.send(len(keys) * BLOCK + 7, keys)
            assert homes.setdefault(session, replica) == replica
            assert entry.cached == 20 * (turn - 1) * BLOCK
            entry.finish()
            sequences[replica] += 1
            for other in entries:
                other.store(int(replica[1:]), keys[-20:], sequences[replica])
    assert min(Counter(homes.values()).values()) >= 4


def test_an_ingress_that_starts_amid_traffic_credits_nothing_before_its_snapshots() -> None:
    warm, late, other = Fleet(4), Fleet(4, synced=False), Fleet(4, synced=False)
    groups = [prefix(name, 40) for name in range(1, 33)]
    for number, group in enumerate(groups):
        warm.store(number % 4, group, number // 4 + 1)

    def homes(fleet: Fleet) -> list[str]:
        chosen = []
        for group in groups:
            chosen.append(fleet.send(*prompt(group, 1, 900)))
            fleet.finish()
        return chosen

    # It hears of one whole prefix on each replica, and of the end of another: what went before is not known.
    for place, route in enumerate(late.routes):
        heard = [*groups[place], *groups[place + 4][20:]]
        assert not late.index.apply(route.replica, route.epoch, 9, heard)
    for group in groups:
        assert set(dict(late.index.longest(group)).values()) == {0}
    # Ingresses in that state agree all the same, so that they do not scatter what the fleet holds.
    assert homes(late) == homes(other)
    late.now += 20.0  # nothing of it is expected to come any more
    for place, route in enumerate(late.routes):
        held = [key for group in groups[place::4] for key in group]
        assert late.index.snapshot(route.replica, route.epoch, 9, held)
    assert homes(late) == homes(warm) == [f"r{number % 4}" for number in range(32)]


def test_a_sibling_joins_the_first_one_however_long_that_has_to_wait() -> None:
    fleet = Fleet(4)
    for place, route in enumerate(fleet.routes):
        fleet.report(route, replace(IDLE, waiting_tokens=30_000 + place))
    cold = prefix(1, 100)
    first = fleet.send(*prompt(cold, 1, 900))
    assert fleet.cached == 0
    # Three seconds of prompts are before it: no event can have come yet.
    fleet.now += 4.0
    assert fleet.send(*prompt(cold, 1, 901)) == first
    assert fleet.cached == 100 * BLOCK


def test_blocks_that_never_come_stop_to_count() -> None:
    fleet = Fleet(4)
    cold = prefix(1, 100)
    fleet.send(*prompt(cold, 1, 900))
    fleet.now += 10.1
    fleet.send(*prompt(cold, 1, 901))
    assert fleet.cached == 0


def test_the_same_words_in_another_role_are_another_prefix(bundled_model: Path) -> None:
    tokenizer = PromptTokenizer(TokenizerParts.read(bundled_model))
    rules = "You answer in one short sentence, you never guess, and you name what you rely on. " * 4

    def keys(*messages: tuple[str, str]) -> list[int]:
        turns = [ChatMessage(role, content) for role, content in messages]
        return SCHEME.keys(asyncio.run(tokenizer.encode_chat(turns, 8192)), CacheNamespace())

    raw = asyncio.run(tokenizer.encode_texts([rules], 8192))[0]
    system = keys(("system", rules), ("user", "What is a prefix?"))
    assert len(system) >= 4
    assert system[:4] == keys(("system", rules), ("user", "And what is a suffix?"))[:4]
    assert not set(system) & set(keys(("user", rules)))
    assert not set(system) & set(SCHEME.keys(raw, CacheNamespace()))


def test_distinct_prompts_leave_nothing_behind() -> None:
    """Engines hold 2,000 blocks each; 40 new ones come with each request."""
    fleet = Fleet(2)
    caches = {route.replica: OrderedDict[int, None]() for route in fleet.routes}
    sequences: Counter[str] = Counter()
    names = iter(range(1, 1 << 20))

    def serve(count: int) -> None:
        for _ in range(count):
            fleet.now += 0.05
            keys = prefix(next(names), 40)
            replica = fleet.send(40 * BLOCK + 7, keys)
            route = fleet.routes[int(replica[1:])]
            cache = caches[replica]
            cache.update(dict.fromkeys(keys))
            gone = [cache.popitem(last=False)[0] for _ in range(len(cache) - 2_000)]
            sequences[replica] += 1
            assert fleet.index.apply(replica, route.epoch, sequences[replica], keys, gone)
            fleet.finish()

    ours = [tracemalloc.Filter(True, "*/app/routing/*")]

    def held() -> int:
        """Bytes that routing has."""
        statistics = tracemalloc.take_snapshot().filter_traces(ours).statistics("filename")
        return sum(one.size for one in statistics)

    tracemalloc.start()
    try:
        serve(150)
        before = held()
        serve(300)
        assert held() < before + 200_000  # the keys of 300 prompts take five times as much
    finally:
        tracemalloc.stop()
    assert len(fleet.index) == sum(map(len, caches.values())) == 4_000
    fleet.now += 20
    fleet.index.expire(fleet.now)
    assert claimed(fleet.index) == 0
    assert set(fleet.ledger.load().values()) == {0}


def test_each_tenant_is_led_to_its_own_copy_and_to_nobody_elses() -> None:
    fleet = Fleet(3)
    tokens = list(range(1000))
    spaces = CacheNamespace(tenant="a"), CacheNamespace(tenant="b"), CacheNamespace(tenant="a", salt="s")
    one, two, salted = (SCHEME.keys(tokens, space) for space in spaces)
    fleet.store(0, one)
    fleet.store(1, two)
    for keys, where in ((one, {"r0"}), (two, {"r1"}), (salted, {"r0", "r1", "r2"})):
        assert fleet.send(len(tokens), keys) in where
        assert fleet.cached == (len(tokens) // BLOCK * BLOCK if len(where) == 1 else 0)
        fleet.finish()
