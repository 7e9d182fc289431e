"""Which models of a starting server answer, which cannot start, and when those are tried again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app.config import ServedModel
from app.launch.terminal import Say
from app.serve_status import cannot_start, cause, has_died
from engine.errors import ConfigError

LATER_S = 5.0
"""How long the announcement waits for further models and engine replicas once one answers."""

RETRY_S, MAX_RETRY_S = 60.0, 960.0
"""First and longest pause before a model that cannot start is tried again; it doubles with each try."""

SETTLE_S = 5.0
"""How long after a new try Serve's status may still be that of the one before."""


@dataclass(slots=True)
class _Retry:
    """When a failed model is ``due`` for its next try, and the pause before the one after.

    Before ``current_from`` Serve's status may still be that of the try before.
    """

    pause_s: float = RETRY_S
    current_from: float = 0.0
    due: float = float("inf")


class ModelStarts:
    """One for each start of a server; call ``look`` repeatedly with what Serve and ``/health`` report.

    Each of ``models`` is in one of ``serving``, ``waiting`` and ``failed``. Times are of any clock, in seconds.
    """

    def __init__(self, models: Sequence[ServedModel], ingress: str, say: Say) -> None:
        """``ingress`` is the name of the ingress deployment."""
        self.waiting = list(models)
        self.serving: list[ServedModel] = []
        self.ready: dict[str, int] = {}  # engine replicas that accept requests, of the models in ``serving``
        self.failed: list[ServedModel] = []
        self._all = list(models)
        self._ingress = ingress
        self._say = say
        self._retries = {model.name: _Retry() for model in models}
        self._died: set[str] = set()
        self._first = 0.0  # when a model was first seen to answer
        self._announced = False

    def look(self, application: Any, ready: Callable[[ServedModel], int], now: float) -> None:
        """Take in the ``application``'s status in Serve, and how many engine replicas of a model are ready.

        Raises:
            ConfigError: none answers, and the ingress, or every model, cannot start; the message says why.
        """
        deployments = application.deployments if application is not None else {}
        failed = {name for name, deployment in deployments.items() if cannot_start(deployment)}
        dead = {name for name, deployment in deployments.items() if has_died(deployment)}
        failing = [
            model
            for model in self.waiting
            if model.deployment in failed and now >= self._retries[model.name].current_from
        ]
        waiting = [model for model in self.waiting if model not in failing]
        ended = str(application.status).endswith(("DEPLOY_FAILED", "UNHEALTHY")) if application else False
        hopeless = self._ingress in failed or not (waiting and (failed or dead))
        if ended and hopeless and not self.serving:
            raise ConfigError(f"the application cannot start: {_why(application, self._all)}")
        for model in failing:
            self._fail(model, cause([deployments[model.deployment].message]), now)
        for model in waiting:
            if model.deployment in dead - self._died:
                self._say(f"warning: an engine replica of {model.name} has died; Serve starts another")
            if ready(model):
                self._begin(model, now)
        self.ready = {model.name: ready(model) for model in self.serving}
        self._died |= dead

    def complete(self, now: float) -> bool:
        """Whether to announce those that serve: once all do that can, or ``LATER_S`` after the first.

        A model does once all engine replicas that it starts with accept requests. Once this is true, each model
        that serves later is announced by itself.
        """
        later = self.waiting or any(
            self.ready[model.name] < model.options.scaling.initial_replicas for model in self.serving
        )
        if not self.serving or (later and now - self._first < LATER_S):
            return False
        self._announced = True
        return True

    def due(self, now: float) -> list[ServedModel]:
        """The models that are to be tried again now; they wait from now on."""
        due = [model for model in self.failed if now >= self._retries[model.name].due]
        for model in due:
            self._retries[model.name].current_from = now + SETTLE_S
            self.failed.remove(model)
            self.waiting.append(model)
        return due

    def _begin(self, model: ServedModel, now: float) -> None:
        if not self.serving:
            self._first = now
        self.waiting.remove(model)
        self.serving.append(model)
        self._retries[model.name] = _Retry()
        if self._announced:
            self._say(f"{model.name} is now served, too")

    def _fail(self, model: ServedModel, reason: str, now: float) -> None:
        one = self._retries[model.name]
        self._say(
            f"warning: {model.name} cannot start, but the others can: {reason}; "
            f"the next try is in {one.pause_s:g} s"
        )
        one.due = now + one.pause_s
        one.pause_s = min(2 * one.pause_s, MAX_RETRY_S)
        self.waiting.remove(model)
        self.failed.append(model)


def _why(application: Any, models: Sequence[ServedModel]) -> str:
    """Why an application cannot start: the cause of each deployment that cannot, or else its own."""
    names = {model.deployment: f"{model.name}: " for model in models if model.one_of_several}
    failed = {
        name: deployment for name, deployment in application.deployments.items() if cannot_start(deployment)
    }
    own = {name: deployment for name, deployment in failed.items() if name not in names} or failed
    reasons = [f"{names.get(name, '')}{cause([deployment.message])}" for name, deployment in own.items()]
    return "; ".join(reasons) or cause([application.message])
