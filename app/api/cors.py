"""Cross-origin requests, for web pages of other sites that the operator allows."""

from __future__ import annotations

from collections.abc import Callable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.instance import HEADER

EXPOSED = [
    "x-request-id",
    HEADER,
    "retry-after",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
]
"""Response headers that a page's script may read."""


class CrossOrigin:
    """Answers preflight requests and adds headers for the origins that ``origins`` returns.

    ``origins`` is read for each request, because the option is live: a comma-separated list, ``*`` for every
    origin, or ``None`` for none.
    """

    def __init__(self, app: ASGIApp, origins: Callable[[], str | None]) -> None:
        self._app = app
        self._origins = origins
        self._of: str | None = None
        self._middleware: ASGIApp = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The server starts before there is a service whose options could be read.
        app = self._current() if scope["type"] == "http" else self._app
        await app(scope, receive, send)

    def _current(self) -> ASGIApp:
        origins = self._origins()
        if origins != self._of:
            self._of = origins
            self._middleware = self._app
            if origins is not None:
                self._middleware = CORSMiddleware(
                    self._app,
                    allow_origins=[origin.strip() for origin in origins.split(",") if origin.strip()],
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                    expose_headers=EXPOSED,
                )
        return self._middleware
