"""Whether the files of a server have room on a node: looked at every few seconds, and said once a minute."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.sizes import format_bytes

# Not TMPDIR: sockets are here. Their paths may have at most 97 characters, of which Serve adds 80.
PLACE = Path("/tmp")
"""Where Serve and HAProxy keep their files, and Ray unless told otherwise."""

ROOM = 8 * 2**20
"""Bytes that must be free in ``PLACE``. Ray starts with 0.3 MiB there, or 1.9 MiB with its dashboard; its logs
grow by a line for each request. Without room, Ray and Serve print pages of errors and start nothing."""

WATCHED = "QUIRE_ROOM_WATCHED"
"""Variable that is "1" where the launcher watches: its terminal takes lines for which logs have no room."""

LOOK_EVERY_S = 10.0
SAID_EVERY_S = 60.0


def least_free(folders: Iterable[Path]) -> tuple[int, Path] | None:
    """The fewest free bytes in a folder, and in which; ``None`` if no folder can be looked at."""
    found = []
    for folder in folders:
        try:
            found.append((shutil.disk_usage(folder).free, folder))
        except OSError:
            continue
    return min(found, default=None)


def lack_of_room(free: int, folder: Path) -> str | None:
    """What ``folder`` lacks, if it has less than ``ROOM``."""
    if free >= ROOM:
        return None
    return f"{folder} has {format_bytes(free)} free, but Ray's sockets and logs need {format_bytes(ROOM)} there"


class RoomWatch:
    """Says it while files have no room; while that lasts, once every ``SAID_EVERY_S``."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said_at: float | None = None

    def update(self, lack: str | None, now: float) -> None:
        """``lack`` says what is too little; ``now`` is in seconds on any clock."""
        if lack is None:
            if self._said_at is not None:
                self._say("there is room for Ray's logs again")
            self._said_at = None
        elif self._said_at is None or now - self._said_at >= SAID_EVERY_S:
            self._said_at = now
            self._say(f"{lack}; delete files: lines of logs are lost, and replicas do not start")


class NodeRoom:
    """The room on the node of one replica, which ``say`` gets told unless a launcher tells it."""

    def __init__(self, session: Path | None, say: Callable[[str], None]) -> None:
        """``session`` is the folder of Ray's session."""
        self.lack: str | None = None
        self._folders = [PLACE] if session is None else [session, PLACE]
        self._watch = RoomWatch(say) if os.environ.get(WATCHED) != "1" else None
        self.free = math.inf
        """Bytes; infinite if unknown."""
        self.look()

    def look(self) -> None:
        """Takes some microseconds, unless a folder is on a network."""
        least = least_free(self._folders)
        self.free, self.lack = (math.inf, None) if least is None else (least[0], lack_of_room(*least))
        if self._watch is not None:
            self._watch.update(self.lack, time.monotonic())

    async def run(self) -> None:
        """Look until canceled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(self.look)


def session_folder() -> Path | None:
    """The folder of Ray's session on this node, with its logs; ``None`` outside Ray."""
    from ray._private import worker  # here, so that the launcher refuses a wrong option before Ray is loaded

    node = getattr(worker, "_global_node", None)
    return None if node is None else Path(node.get_session_dir_path())
