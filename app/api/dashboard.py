"""``GET /dashboard``, the live page, and ``GET /dashboard/events``, what it shows."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from app.api.errors import ApiError
from app.api.home import page_response
from app.dashboard.live_feed import MOST_VIEWERS, LiveFeed

_PAGE = Path(__file__).with_name("dashboard.html").read_text(encoding="utf-8")


async def dashboard(request: Request) -> Response:
    return page_response(_PAGE)


async def events(request: Request) -> Response:
    feed: LiveFeed = request.app.state.get_server().live_feed
    if feed.viewers >= MOST_VIEWERS:
        raise ApiError(
            503,
            f"{MOST_VIEWERS} pages are open at this ingress, which is all that it serves; close one",
            code="unavailable",
            kind="service_unavailable_error",
        )
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    if request.method == "HEAD":
        return Response(headers=headers, media_type="text/event-stream")
    stream = feed.events()
    first = await anext(stream)  # from here on this viewer counts
    return StreamingResponse(_joined(first, stream), headers=headers, media_type="text/event-stream")


async def _joined(first: bytes, stream: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(stream):
        yield first
        async for event in stream:
            yield event


DASHBOARD_ROUTES = (Route("/dashboard", dashboard), Route("/dashboard/events", events))
