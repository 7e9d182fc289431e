"""What an engine replica does on its event loop, and what beside it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from app.replica import EngineReplica
from engine.kv.block_groups import GroupBy


def test_a_block_map_is_made_beside_the_loop() -> None:
    made: list[tuple[Any, ...]] = []

    def block_map(by: GroupBy, keys: list[int], name_of: Any) -> str:
        made.append((threading.current_thread(), by, keys, name_of("a@0f:7")))
        return "the map"

    replica: Any = SimpleNamespace(_engine=SimpleNamespace(block_map=block_map))
    assert asyncio.run(EngineReplica.block_map(replica, "prefix", [7], target="")) == "the map"
    ((thread, *how),) = made
    assert thread is not threading.current_thread()
    assert how == [GroupBy.PREFIX, [7], "a"]
