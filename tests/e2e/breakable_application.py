"""The application with one more method on its engine replicas: a way to break them from inside."""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from app import application, config
from app.replica import EngineReplica


class BreakableReplica(EngineReplica):
    """Dies on request."""

    async def break_engine(self, *, target: str) -> None:
        """Make the engine's loop raise, as a bug in it would."""
        self._engine._inbox.put(object())  # type: ignore[arg-type]


def build(args: dict[str, Any]) -> Application:
    """See ``app.application.build``."""
    return application.assemble(config.load(args), BreakableReplica)
