"""What the server reports about itself: whether it can answer, and which models it has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response

from app.fleet.fleet_limits import FleetLimits

BRIEF = ("status", "instance", "routable", "asleep")
"""What clients without a key see: whether the server can answer, but nothing about the fleet or the models."""

WORKING = ("ok", "overloaded", "asleep")


class EngineStatus(Protocol):
    """The part of ``EngineClient`` that this uses."""

    def limits(self) -> FleetLimits | None: ...

    def status(self) -> dict[str, Any]: ...


class ModelState:
    """The state of one model at one ingress replica."""

    def __init__(
        self,
        engines: EngineStatus,
        model: str,
        overloaded: Callable[[], bool],
        takes_system_messages: Callable[[], bool],
    ) -> None:
        self._engines = engines
        self._model = model
        self._overloaded = overloaded
        self._takes_system_messages = takes_system_messages
        self._started = int(time.time())

    def health(self) -> dict[str, Any]:
        """Health of the model. ``status`` is one of ``WORKING`` while an engine can take a request or start.

        Otherwise it is ``unavailable``. The rest comes from the engine client.
        """
        status = self._engines.status()
        ready = self._engines.limits() is not None and bool(status.get("routable"))
        working = "overloaded" if self._overloaded() else "ok"
        word = working if ready else "asleep" if status.get("asleep") else "unavailable"
        return {"status": word, **status}

    def entry(self) -> dict[str, Any]:
        """The entry in ``/v1/models``."""
        limits = self._engines.limits()
        entry: dict[str, Any] = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "quire",
            "takes_system_messages": self._takes_system_messages(),
        }
        return entry if limits is None else {**entry, "max_model_len": limits.max_model_len}


def health_response(
    instance: str,
    models: Mapping[str, dict[str, Any]],
    several: bool,
    brief: bool,
    lack: str | None = None,
) -> Response:
    """200 while a request for some model would find an engine or wake one, even if it is refused for now.

    ``models`` has the health of each. Of several, the server's is ``degraded`` while only some work. To those
    without a key (``brief``) it tells no names. ``lack`` says what this node lacks; it still works.
    """
    words = [health["status"] for health in models.values()]
    works = any(word in WORKING for word in words)
    if several:
        body: dict[str, Any] = {
            "status": _together(words),
            "instance": instance,
            **{name: _total(name, models.values()) for name in ("replicas", "routable", "live_requests")},
            "asleep": all(word == "asleep" for word in words),
            "models": dict(models),
        }
    else:
        (only,) = models.values()
        body = {"status": only["status"], "instance": instance, **only}
    if lack is not None:
        body["lack"] = lack
    if brief:
        body = _brief(body)
        if several:  # in the order of the options
            body["models"] = [_brief(health) for health in models.values()]
    return JSONResponse(body, 200 if works else 503)


def _brief(health: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in health.items() if name in BRIEF}


def _together(words: list[str]) -> str:
    if "unavailable" in words:
        return "degraded" if any(word in WORKING for word in words) else "unavailable"
    return next((word for word in ("overloaded", "ok") if word in words), "asleep")


def _total(name: str, models: Iterable[Mapping[str, Any]]) -> int:
    return sum(model.get(name, 0) for model in models)
