"""The application with more methods on its engine replicas: ways to break them from inside."""

from __future__ import annotations

import threading
from typing import Any

from ray.serve import Application

from app import application, config
from app.replica import EngineReplica


class BreakableReplica(EngineReplica):
    """Dies or gets stuck on request."""

    async def break_engine(self, *, target: str) -> None:
        """Make the engine's loop raise, as a bug in it would."""
        self._engine._inbox.put(object())  # type: ignore[arg-type]

    async def stick_engine(self, *, target: str) -> None:
        """Make the engine's next step never end."""
        engine = self._engine._engine
        assert engine is not None
        engine.step = threading.Event().wait  # type: ignore[assignment]


def build(args: dict[str, Any]) -> Application:
    """See ``app.application.build``."""
    return application.assemble(config.load(args), BreakableReplica)
