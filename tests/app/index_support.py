"""Indexes that hold given blocks, and the keys of prompts."""

from __future__ import annotations

from app.routing.kv_index import KvIndex
from engine.kv.block_keys import block_keys, root_key
from engine.request import CacheNamespace

ROOT = root_key("model", "float32", 16, CacheNamespace())


def prompt(*numbers: int, blocks: int = 1) -> list[int]:
    """Keys of a prompt of ``blocks`` blocks of each number."""
    return block_keys(ROOT, [number for number in numbers for _ in range(16 * blocks)], 16)


def claimed(index: KvIndex) -> int:
    """Blocks claimed, plus one for each claim: what ``max_claimed`` bounds."""
    index._claim()
    return len(index._claims)


def index_of(**held: list[int]) -> KvIndex:
    index = KvIndex()
    for name, keys in held.items():
        index.add(name)
        assert index.snapshot(name, 0, 0, keys)
    return index
