"""Whether a request may be worked on: its model, its priority, and what is live beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors import model_not_allowed, model_not_found
from app.api.key_limits import KeyLimits
from app.api.live_requests import LiveRequests, Permit
from app.api.openai_types import GenerationOptions
from app.api.request_record import RequestRecord
from app.config import IngressOptions
from app.fleet.overload import OverloadControl
from engine.errors import InvalidRequestError


class Admission:
    """Of one ingress replica that serves ``model``; used on its event loop. Each request reads the options."""

    def __init__(
        self, model: str, options: Callable[[], IngressOptions], overload: Callable[[], OverloadControl]
    ) -> None:
        self._model = model
        self._options = options
        self._overload = overload
        self.live = LiveRequests()

    def check_model(self, name: str | None, key: KeyLimits | None) -> None:
        """Refuse a model that is not here, or not for ``key``; no name is that of the served model.

        Raises:
            ApiError: 403 or 404.
        """
        if key is not None and not key.may_use(self._model):
            # One model is served: the key can use nothing here.
            raise model_not_allowed(self._model if name is None else name, key.key.id)
        if name is not None and name != self._model:
            raise model_not_found(name, self._model)

    def check_options(self, options: GenerationOptions, key: KeyLimits | None) -> None:
        """:meth:`check_model`, and the priority.

        Raises:
            ApiError: as :meth:`check_model`.
            InvalidRequestError: the request may not run so early.
        """
        self.check_model(options.model, key)
        best = self._options().min_priority
        if key is not None and key.key.min_priority is not None:
            best = key.key.min_priority
        if options.priority < best:
            raise InvalidRequestError(
                f"priority is {options.priority} but must be at least {best}, which runs first here "
                "(min_priority)",
                "priority",
            )

    @contextmanager
    def admit(self, record: RequestRecord, choices: int) -> Iterator[tuple[Permit, ExitStack]]:
        """Take permits before the request waits for anything; they are released unless the stack is emptied."""
        caller = record.caller
        permit = self.live.admit(caller.client, choices, self._options(), self._overload())
        with ExitStack() as held:
            held.callback(permit.release)
            if caller.limits is not None:
                caller.limits.admit(record.stream)
            held.callback(record.end)
            with record.failing():
                yield permit, held


class Admitted:
    """A response that releases its permits when it ends, however it ends."""

    def __init__(self, response: ASGIApp, permits: ExitStack) -> None:
        self._response = response
        self._permits = permits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._permits:
            await self._response(scope, receive, send)
