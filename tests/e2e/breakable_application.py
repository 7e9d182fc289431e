"""The application with engine replicas that can be broken from inside, or be unlike each other."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import threading
from pathlib import Path
from typing import Any

from paced_model import PACE, keep_pace
from ray.serve import Application

from app import application
from app.channel import wire
from app.config import ServedModel
from app.replica import EngineReplica

POISON = 4711
"""An engine dies of a prompt that begins with this token."""

DIES_AFTER_S = 0.2
NOTICED_S = 3.0
"""``stuck_after_s`` of a replica whose engine a test has stuck."""

POOLS = "pools.json"
"""In the model's folder: the blocks of each replica, in the order in which they start."""


class BreakableReplica(EngineReplica):
    """Dies or gets stuck on request."""

    async def __init__(self, model: ServedModel) -> None:  # type: ignore[misc]
        folder = Path(model.options.service.model)
        if (folder / PACE).exists():
            keep_pace(folder)
        pools = folder / POOLS
        if pools.is_file():
            engine = dataclasses.replace(model.options.engine, num_blocks=_take(pools))
            model = dataclasses.replace(model, options=model.options.model_copy(update={"engine": engine}))
        await super().__init__(model)

    async def generate(self, cid: str, payload: bytes, *, meta: dict[str, int]) -> dict[str, Any]:
        """Run one attempt, and die if it is of a poisonous request."""
        if wire.unpack_submission(payload).token_ids[0] == POISON:
            self._loop.call_later(DIES_AFTER_S, self._break)
        return await super().generate(cid, payload, meta=meta)

    async def break_engine(self, *, target: str) -> None:
        """Make the engine's loop raise, as a bug in it would."""
        self._break()

    async def stick_engine(self, *, target: str) -> None:
        """Make the engine's next step never end."""
        engine = self._engine._engine
        assert engine is not None
        engine.step = threading.Event().wait  # type: ignore[assignment]
        self._watchdog.stuck_after_s = NOTICED_S

    async def cut_channels(self, *, target: str) -> None:
        """End every channel, as a connection that breaks would."""
        for channel in list(self._hub._channels.values()):
            self._hub.close(channel, "a test cut it")

    def _break(self) -> None:
        self._engine._inbox.put(object())  # type: ignore[arg-type]


def _take(pools: Path) -> int:
    """The first size that no other replica has taken; the last one for all beyond."""
    sizes: list[int] = json.loads(pools.read_text())
    for place in itertools.count():
        with contextlib.suppress(FileExistsError):
            pools.with_suffix(f".{place}").touch(exist_ok=False)
            return sizes[min(place, len(sizes) - 1)]
    raise AssertionError


def give_pools_back(model: Path) -> None:
    """The next replicas of ``model`` take its first sizes again."""
    for taken in model.glob(f"{Path(POOLS).stem}.[0-9]*"):
        taken.unlink()


def build(args: dict[str, Any]) -> Application:
    """See ``app.application.build``."""
    return application.build_with(args, BreakableReplica)
