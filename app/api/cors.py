"""Cross-origin requests, for web pages of other sites that the operator allows."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.errors import ApiFault
from app.api.instance_header import HEADER

EXPOSED = [
    "x-request-id",
    HEADER,
    "retry-after",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
]
"""Response headers that a page's script may read."""


class CrossOrigin:
    """Answers preflight requests and adds headers for the origins that ``origins`` returns.

    Browsers send some requests of other pages without a preflight, and only hide the response from them. Those
    that could cost something get a 403.

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
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        app = self._current()
        headers = Headers(scope=scope)
        if scope["method"] == "POST" and _unasked(headers) and not self._allows(headers.get("origin", "")):
            app = ApiFault(
                403,
                "a page of another origin sent this without asking; its origin must be among cors_origins",
                "permission_error",
                code="origin_not_allowed",
            ).to_response(scope["path"])
        await app(scope, receive, send)

    def _allows(self, origin: str) -> bool:
        return isinstance(self._middleware, CORSMiddleware) and self._middleware.is_allowed_origin(origin)

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


def _unasked(headers: Headers) -> bool:
    """Whether a browser sent a request of another origin that needs no preflight."""
    if headers.get("sec-fetch-site") not in ("cross-site", "same-site"):
        return False
    asked = headers.get("content-type", "").startswith("application/json")
    return not asked and "authorization" not in headers and "x-api-key" not in headers
