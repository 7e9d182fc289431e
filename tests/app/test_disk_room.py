"""What a replica, or the launcher, says while the file systems of Ray's files are full."""

from __future__ import annotations

import asyncio
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from app import disk_room
from app.disk_room import ROOM, SAID_EVERY_S, WATCHED, NodeRoom, RoomWatch

AGAIN = "there is room for Ray's logs again"


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Free bytes of each folder; of another, nothing is known."""
    found: dict[str, int] = {}

    def disk_usage(folder: Path) -> SimpleNamespace:
        if str(folder) not in found:
            raise FileNotFoundError(folder)
        return SimpleNamespace(free=found[str(folder)])

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    monkeypatch.delenv(WATCHED, raising=False)
    return found


def test_files_without_room_are_told_once_a_minute() -> None:
    said: list[str] = []
    watch = RoomWatch(said.append)
    for now, lack in (
        (0, None),
        (10, "A"),
        (20, "B"),
        (69, "C"),
        (70, "D"),
        (80, None),
        (90, None),
        (100, "E"),
    ):
        watch.update(lack, float(now))
    assert [line.split(";")[0] for line in said] == ["A", "D", AGAIN, "E"]


def test_a_node_lacks_room_where_either_folder_does(free: dict[str, int]) -> None:
    """Ray's may be elsewhere than that of Serve and HAProxy."""
    said: list[str] = []
    free |= {"/tmp": ROOM, "/logs": ROOM + 1}
    room = NodeRoom(Path("/logs"), said.append)
    assert (room.free, room.lack, said) == (ROOM, None, [])
    free["/logs"] = 0
    room.look()
    assert room.free == 0
    assert room.lack == "/logs has 0 B free, but Ray's sockets and logs need 8 MiB there"
    assert said == [f"{room.lack}; delete files: lines of logs are lost, and replicas do not start"]
    free |= {"/tmp": 5, "/logs": 7 * ROOM}
    room.look()
    assert (room.free, room.lack) == (5, "/tmp has 5 B free, but Ray's sockets and logs need 8 MiB there")
    assert len(said) == 1, f"within {SAID_EVERY_S:g} s"
    free["/tmp"] = 8 * ROOM
    room.look()
    assert (room.free, room.lack, said[1:]) == (7 * ROOM, None, [AGAIN])


def test_what_cannot_be_looked_at_lacks_nothing(free: dict[str, int]) -> None:
    room = NodeRoom(None, pytest.fail)
    assert (room.free, room.lack) == (math.inf, None)


def test_a_replica_is_silent_where_the_launcher_watches(
    free: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WATCHED, "1")
    free["/tmp"] = 0
    room = NodeRoom(None, pytest.fail)
    assert (room.free, room.lack is None) == (0, False), "its figures tell all the same"


def test_it_looks_again_and_again(free: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_room, "LOOK_EVERY_S", 0.0)
    free["/tmp"] = ROOM

    async def test() -> None:
        loop, told = asyncio.get_running_loop(), asyncio.Event()

        def tell(line: str) -> None:
            loop.call_soon_threadsafe(told.set)

        room = NodeRoom(None, tell)
        looking = asyncio.create_task(room.run())
        await asyncio.sleep(0)
        free["/tmp"] = 1
        await asyncio.wait_for(told.wait(), 30)
        looking.cancel()
        assert room.free == 1

    asyncio.run(test())
