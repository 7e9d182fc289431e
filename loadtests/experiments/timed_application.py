"""The application with engines that compute nothing: each stream gets a token whenever the clock says so."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.serve import Application

from app import application, config
from app.replica import EngineReplica
from engine.engine_thread import EngineThread, StepOutputs
from engine.request import FinishReason, Request, TokenDelta, validate

TOKEN_EVERY_S = 0.2
TOKEN, WORD = 260, b" the"  # of the bundled model


def gate(instance: str) -> Path:
    """While this file is there, the streams of that server get one token each."""
    return Path(tempfile.gettempdir()) / f"quire-gate-{instance}"


class TimedEngine:
    """A loaded engine that is never asked to compute; its limits and figures are the real ones."""

    def __init__(self, engine: EngineThread, on_outputs: Callable[[StepOutputs], None], closed: Path) -> None:
        self._engine = engine
        self._closed = closed
        self._on_outputs = on_outputs
        self._lock = threading.Lock()
        self._live: dict[str, tuple[int, int]] = {}  # tokens so far and wanted
        self._added: list[str] = []
        threading.Thread(target=self._run, name="timed-engine", daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def num_live(self) -> int:
        """Requests submitted and not finished."""
        return len(self._live)

    def progress(self) -> None:
        """Never stuck."""

    def submit(self, request: Request) -> None:
        validate(request.token_ids, request.params, self._engine.limits, request.generated_before)
        with self._lock:
            self._live[request.request_id] = request.generated_before, request.params.max_tokens or 1
            self._added.append(request.request_id)

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._live.pop(request_id, None)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            due += TOKEN_EVERY_S
            time.sleep(max(due - time.monotonic(), 0.0))
            self._on_outputs(self._step())

    def _step(self) -> StepOutputs:
        deltas = []
        closed = self._closed.exists()
        with self._lock:
            added, self._added = self._added, []
            for name, (index, wanted) in list(self._live.items()):
                if closed and index:
                    continue
                last = index + 1 >= wanted
                deltas.append(
                    TokenDelta(name, index, (TOKEN,), FinishReason.LENGTH if last else None, final=last)
                )
                if last:
                    del self._live[name]
                else:
                    self._live[name] = index + 1, wanted
        return StepOutputs(deltas, added, None, self._engine.load())


class TimedReplica(EngineReplica):
    """An engine replica around a :class:`TimedEngine`."""

    def _start_engine(self) -> EngineThread:
        closed = gate(self._model.options.ingress.instance or "")
        return TimedEngine(super()._start_engine(), self._on_outputs, closed)  # type: ignore[return-value]


def build(args: dict[str, Any]) -> Application:
    """See ``app.application.build``."""
    return application.assemble(config.load(args), TimedReplica)
