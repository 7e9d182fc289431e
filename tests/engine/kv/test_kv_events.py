"""KV events: whoever follows them knows exactly what can be found."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import reduce
from operator import xor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_follower import Follower

from engine.config import EngineConfig
from engine.engine import Engine
from engine.kv.block_keys import KeyScheme, block_keys, root_key
from engine.kv.block_pool import BlockPool, InvariantError
from engine.kv.kv_events import KvBatch, KvEvents, KvSnapshot, root_key_of
from engine.kv.prefix_index import PrefixIndex
from engine.kv.prefix_node import PrefixNode, RootNode
from engine.request import CacheNamespace, Request
from engine.sampling_params import SamplingParams

SIZE = 2
ROOTS = {name: root_key("revision", "float32", SIZE, CacheNamespace(tenant=name)) for name in ("a", "b")}


def named(root: Hashable) -> int:
    return ROOTS[str(root)]


class Setting:
    """A pool of a few blocks of two tokens, its index, and the events."""

    def __init__(self, blocks: int = 4, window: int | None = None) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.events = KvEvents(SIZE, named)
        self.index = PrefixIndex(self.pool, window=window, observer=self.events)

    def hold(self, tokens: list[int], root: str = "a") -> list[int]:
        """Compute the whole blocks of ``tokens`` and make them findable."""
        table = self.pool.allocate(len(tokens) // SIZE)
        assert table is not None
        self.index.extend(root, None, tokens, table, len(table))
        return table

    def batch(self) -> KvBatch:
        batch = self.events.drain()
        assert batch is not None
        return batch


def test_keys_are_those_that_an_ingress_makes() -> None:
    setting = Setting()
    setting.hold([1, 2, 3, 4])
    setting.hold([1, 2], "b")
    wanted = block_keys(ROOTS["a"], [1, 2, 3, 4], SIZE) + block_keys(ROOTS["b"], [1, 2], SIZE)
    batch = setting.batch()
    assert batch == KvBatch(1, wanted, [], False, reduce(xor, wanted), 3)
    assert setting.events.snapshot() == KvSnapshot(1, wanted, reduce(xor, wanted), 3)
    assert setting.events.drain() is None


def test_eviction_removes_the_block_and_what_is_below_it() -> None:
    setting = Setting(3)
    table = setting.hold([1, 2, 3, 4, 5, 6])
    keys = setting.batch().stored
    setting.pool.release(table[2:])
    setting.pool.release(table[:2])  # now the last one is the oldest
    setting.pool.allocate(1)
    assert setting.batch().removed == keys[2:]
    setting.pool.allocate(2)
    batch = setting.batch()
    assert (set(batch.removed), batch.count, batch.xor) == (set(keys[:2]), 0, 0)


def test_what_comes_and_goes_between_two_batches_is_not_told() -> None:
    setting = Setting(1)
    table = setting.hold([1, 2])
    setting.pool.release(table)
    setting.pool.allocate(1)
    assert setting.events.drain() is None
    assert setting.events.snapshot().sequence == 0


def test_what_goes_and_comes_back_between_two_batches_is_not_told() -> None:
    setting = Setting(1)
    setting.pool.release(setting.hold([1, 2]))
    setting.batch()
    setting.hold([1, 2])
    assert setting.events.drain() is None
    assert setting.events.snapshot().count == 1


def test_reset_is_told_once_and_what_follows_it_counts() -> None:
    setting = Setting()
    setting.hold([1, 2, 3, 4])
    setting.index.reset()
    (key,) = block_keys(ROOTS["a"], [5, 6], SIZE)
    setting.hold([5, 6])
    assert setting.batch() == KvBatch(1, [key], [], True, key, 1)
    setting.index.reset()
    assert setting.batch() == KvBatch(2, [], [], True, 0, 0)


def test_a_second_copy_of_a_block_changes_nothing() -> None:
    setting = Setting()
    first = setting.hold([1, 2])
    setting.batch()
    setting.pool.release(first)
    setting.hold([1, 2])  # another block; the node moves to it
    assert setting.events.drain() is None
    setting.pool.allocate(3)
    assert setting.events.drain() is None
    assert setting.events.snapshot().count == 1


def test_hollow_nodes_are_not_resident_until_computed_again() -> None:
    setting = Setting(4, window=3)
    tokens = [1, 2, 3, 4, 5, 6]
    table = setting.hold(tokens)
    keys = setting.batch().stored
    setting.pool.release(table[:1])
    other = setting.pool.allocate(2)  # the first block of the text is the only one that can be evicted
    assert other is not None
    assert setting.batch().removed == keys[:1]
    setting.pool.release(other)
    again = setting.pool.allocate(1)
    assert again is not None
    setting.index.extend("a", None, tokens, again, 1)
    assert setting.batch().stored == keys[:1]


def test_nodes_below_ones_that_never_had_a_block_have_the_right_keys() -> None:
    setting = Setting(2, window=3)
    tokens = list(range(10))
    table = setting.pool.allocate(2)
    assert table is not None
    setting.index.extend("a", None, tokens, [-1, -1, -1, *table], 5)
    assert setting.batch().stored == block_keys(ROOTS["a"], tokens, SIZE)[3:]


def test_two_nodes_of_one_key_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.kv.kv_events.BlockHash", lambda _: lambda key, tokens: 77)
    setting = Setting()
    first = setting.hold([1, 2])
    second = setting.hold([3, 4])
    assert setting.batch() == KvBatch(1, [77], [], False, 77, 1)
    setting.pool.release(first)
    setting.pool.allocate(3)
    assert setting.events.drain() is None
    setting.pool.release(second)
    setting.pool.allocate(1)
    assert setting.batch() == KvBatch(2, [], [77], False, 0, 0)


def test_a_snapshot_between_batches_is_refused() -> None:
    setting = Setting()
    setting.hold([1, 2])
    with pytest.raises(InvariantError, match="between two batches"):
        setting.events.snapshot()


def test_an_unreported_block_cannot_be_lost() -> None:
    events = KvEvents(SIZE, named)
    node = PrefixNode(RootNode("a"), 0, (1, 2), 0)
    with pytest.raises(InvariantError, match="never reported"):
        events.removed(node)


def test_root_keys_are_those_of_the_scheduler_roots() -> None:
    root = (("revision", "torch.float32", 16), 16, "adapter", "tenant", "salt")
    assert root_key_of(root) == root_key(
        "revision", "torch.float32", 16, CacheNamespace("adapter", "tenant", "salt")
    )
    with pytest.raises(InvariantError, match="blocks of 16 tokens, the root 8"):
        root_key_of((("revision", "torch.float32", 16), 8, "", "", ""))


def follow(windowed: bool, constant: bool) -> Callable[[st.DataObject], None]:
    """A test of random operations by hand: hypothesis draws what happens next."""

    def run(data: st.DataObject) -> None:
        blocks = data.draw(st.integers(1, 8), "blocks")
        window = data.draw(st.integers(1, 7), "window") if windowed else None
        pool = BlockPool(blocks, SIZE)
        events = KvEvents(SIZE, named)
        hash_tokens: Callable[[tuple[int, ...]], int] = (lambda _: 1) if constant else hash
        index = PrefixIndex(pool, hash_tokens, window, events)
        follower = Follower(events.snapshot())
        live: list[list[int]] = []
        text = st.lists(st.integers(0, 1), min_size=SIZE, max_size=12)
        for _ in range(data.draw(st.integers(1, 30), "operations")):
            what = data.draw(st.sampled_from(["begin", "begin", "end", "drain", "reset", "slide", "snapshot"]))
            if what == "begin":
                root, tokens = data.draw(st.sampled_from("ab")), data.draw(text)
                node = index.match(root, tokens, len(tokens))
                table = index.blocks(node)
                pool.share(table)
                more = pool.allocate(len(tokens) // SIZE - len(table))
                if more is None:
                    pool.release(table)
                else:
                    live.append(table + more)
                    index.extend(root, node, tokens, live[-1], len(live[-1]))
            elif what == "end" and live:
                pool.release(live.pop(data.draw(st.integers(0, len(live) - 1))))
            elif what == "slide" and window is not None and live:
                table = data.draw(st.sampled_from(live))
                pool.release(table[:1])
                table[:1] = [-1] * len(table[:1])
            elif what == "reset":
                index.reset()
            elif what == "drain":
                follower.follow(events.drain())
            elif what == "snapshot":
                follower.follow(events.drain())
                assert Follower(events.snapshot()).keys == follower.keys
            index.check()
        follower.follow(events.drain())
        assert follower.keys == resident(index)

    return run


def resident(index: PrefixIndex) -> set[int]:
    """Keys of all nodes that have a block, from the trees alone."""
    keys = set()
    for name, root in index._roots.items():
        pending = [(node, named(name)) for node in root.all_children()]
        while pending:
            node, above = pending.pop()
            (key,) = block_keys(above, node.tokens, SIZE)
            if node.block >= 0:
                keys.add(key)
            pending += [(child, key) for child in node.all_children()]
    assert len(keys) == len(index)
    return keys


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
def test_whoever_follows_the_batches_knows_what_is_there(windowed: bool, constant: bool) -> None:
    run = follow(windowed, constant)
    settings(derandomize=True, database=None, deadline=None, max_examples=150)(given(st.data())(run))()


def test_the_engine_stores_the_keys_that_an_ingress_makes_for_a_request(tiny_models: dict[str, Path]) -> None:
    engine = Engine(
        EngineConfig(
            model=str(tiny_models["Llama"]), dtype="float32", num_blocks=32, token_budget=32, num_threads=1
        )
    )
    assert engine.kv_events is not None
    scheme: KeyScheme = engine.key_scheme
    space = CacheNamespace(adapter="", tenant="t", salt="s")
    prompt = [(5 * place) % 90 for place in range(3 * scheme.block_size + 1)]
    engine.add(Request("r", prompt, SamplingParams(max_tokens=1), namespace=space))
    follower = Follower(engine.kv_events.snapshot())
    while engine.has_work():
        engine.step()
        follower.follow(engine.kv_events.drain())
    assert follower.keys == set(scheme.keys(prompt, space))
    assert len(follower.keys) == 3
    load = engine.load.read()
    assert (load.evictable, load.referenced, load.running, load.waiting_tokens) == (3, 0, 0, 0)
