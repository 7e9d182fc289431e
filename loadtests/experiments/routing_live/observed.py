"""The application with engine replicas that say which requests they began, and how long their steps take."""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from app import application, config
from app.channel import wire
from app.replica import EngineReplica
from app.routing.calibration import StepModel
from engine.engine_thread import StepOutputs

IMPORT_PATH = f"{__name__}:build"


class ObservedReplica(EngineReplica):
    """``inspect`` has three more fields: ``begun``, ``prefill_rate`` and ``step_model``."""

    def __init__(self, options: config.AppConfig) -> None:
        self._begun: list[str] = []
        self._steps = StepModel()
        self._last_step = 0.0
        self._prefill_rate = 0.0
        super().__init__(options)

    async def generate(self, cid: str, payload: bytes, *, meta: dict[str, Any]) -> dict[str, Any]:
        """Note the request, then run it."""
        self._begun.append(wire.unpack_submission(payload).request_id)
        return await super().generate(cid, payload, meta=meta)

    async def inspect(self, *, target: str | None = None) -> dict[str, Any]:
        """Also ids of requests, prompt tokens/s, and seconds of a step, of each row in it, each KV token."""
        steps = self._steps
        return {
            **await super().inspect(target=target),
            "begun": list(self._begun),
            "prefill_rate": self._prefill_rate,
            "step_model": [steps.base, steps.per_row, steps.per_kv_token],
        }

    def _on_outputs(self, outputs: StepOutputs) -> None:
        load = outputs.load
        self._prefill_rate = load.prefill_rate
        if load.step_seconds != self._last_step:  # a step that only decoded has ended
            self._last_step = load.step_seconds
            self._steps.learn(load.running, load.kv_tokens, load.step_seconds)
        super()._on_outputs(outputs)


def build(args: dict[str, Any]) -> Application:
    """See ``app.application.build``."""
    return application.assemble(config.load(args), ObservedReplica)
