"""Whether a request is admitted, by its priority and by what is already in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.key_limits import KeyLimits
from app.api.live_requests import LiveRequests, Permit
from app.api.request_record import RequestRecord
from app.dashboard.recent_requests import RecentRequests
from app.fleet.overload import OverloadControl
from app.option_groups import IngressOptions
from engine.errors import InvalidRequestError


class AdmissionControl:
    """Admits requests for one model at one ingress replica, on its loop; each reads the current options."""

    def __init__(
        self,
        model: str,
        live: LiveRequests,
        options: Callable[[], IngressOptions],
        overload: Callable[[], OverloadControl],
        recent: RecentRequests[RequestRecord],
    ) -> None:
        self._model = model
        self._options = options
        self._overload = overload
        self.live = live
        self._recent = recent

    def check_priority(self, priority: int, key: KeyLimits | None) -> None:
        """Refuse a priority that ``key``, or any client, may not use.

        Raises:
            InvalidRequestError: the request may not run so early.
        """
        best = self._options().min_priority
        if key is not None and key.key.min_priority is not None:
            best = key.key.min_priority
        if priority < best:
            raise InvalidRequestError(
                f"priority is {priority} but must be at least {best}, which runs first here (min_priority)",
                "priority",
            )

    @contextmanager
    def admit(self, record: RequestRecord, choices: int) -> Iterator[tuple[Permit, ExitStack]]:
        """Take permits before the request waits for anything; they are released unless the stack is emptied."""
        caller = record.caller
        permit = self.live.admit(caller.client, choices, self._options(), self._overload(), self._model)
        with ExitStack() as held:
            held.callback(permit.release)
            if caller.limits is not None:
                caller.limits.admit(record.stream)
            self._recent.begin(record)
            held.callback(self._recent.end, record)
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
