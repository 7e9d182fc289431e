"""What an engine replica does on its event loop, and what beside it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from app.channel.channel_server import ChannelServer
from app.replica import EngineReplica
from engine.kv.block_groups import GroupBy

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .*__del__.* was never awaited")


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


@pytest.mark.parametrize(
    ("value", "listens"), [("", True), ("0", True), ("false", True), ("1", False), ("True", False)]
)
def test_channels_get_connections_unless_ray_encrypts_its_own(
    monkeypatch: pytest.MonkeyPatch, value: str, listens: bool
) -> None:
    monkeypatch.setenv("RAY_USE_TLS", value)
    assert listening(host="127.0.0.1") == listens


def test_without_its_address_a_replica_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    assert not listening(host="192.0.2.77")  # kept for documentation: no machine has it
    assert "keep to Ray Serve's connections" in caplog.text


def listening(host: str) -> bool:
    """Whether a replica on a node of this address accepts connections."""

    async def test() -> bool:
        replica = object.__new__(EngineReplica)
        replica._server = ChannelServer(lambda cid, epoch, payload: asyncio.sleep(0, {}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ray.util.get_node_ip_address", lambda: host)
            await replica._listen()
        try:
            return replica._server._server is not None
        finally:
            replica._server.stop()

    return asyncio.run(test())
