"""What the server says of itself: whether it can answer, and which models it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response

from app.api.key_limits import KeyLimits
from app.fleet.fleet_limits import FleetLimits


class EngineStatus(Protocol):
    """The part of ``EngineClient`` that this uses."""

    def limits(self) -> FleetLimits | None: ...

    def status(self) -> dict[str, Any]: ...


class ServerState:
    """Of one ingress replica, whose engines have ``model``; ``instance`` names the server."""

    def __init__(
        self, engines: EngineStatus, model: str, instance: str, overloaded: Callable[[], bool]
    ) -> None:
        self._engines = engines
        self._model = model
        self._instance = instance
        self._overloaded = overloaded
        self._started = int(time.time())

    def health(self) -> Response:
        """200 while a request would find an engine or wake one, even if it is refused for now; else 503."""
        status, body = self._health()
        return JSONResponse(body, status)

    def brief_health(self) -> Response:
        """:meth:`health` for those without a key: nothing of the fleet but whether it can answer."""
        status, body = self._health()
        fields = ("status", "instance", "routable", "asleep")
        return JSONResponse({name: value for name, value in body.items() if name in fields}, status)

    def ping(self) -> Response:
        """The status of :meth:`health` without its body."""
        return Response(status_code=self._health()[0])

    def models(self, key: KeyLimits | None = None) -> Response:
        """The models that ``key`` may use."""
        listed = [self._model_entry()] if key is None or key.may_use(self._model) else []
        return JSONResponse({"object": "list", "data": listed})

    def model(self) -> Response:
        """The entry of the served model."""
        return JSONResponse(self._model_entry())

    def _health(self) -> tuple[int, dict[str, Any]]:
        status = self._engines.status()
        ready = self._engines.limits() is not None and bool(status.get("routable"))
        asleep = bool(status.get("asleep"))
        working = "overloaded" if self._overloaded() else "ok"
        state = working if ready else "asleep" if asleep else "unavailable"
        return 200 if ready or asleep else 503, {"status": state, "instance": self._instance, **status}

    def _model_entry(self) -> dict[str, Any]:
        limits = self._engines.limits()
        entry: dict[str, Any] = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "quire",
        }
        return entry if limits is None else {**entry, "max_model_len": limits.max_model_len}
