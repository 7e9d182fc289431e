"""``GET /dashboard``, the live page, and ``GET /dashboard/events``, what it shows."""

from __future__ import annotations

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
    feed: LiveFeed = request.app.state.get_service().live_feed
    if feed.viewers >= MOST_VIEWERS:
        raise ApiError(
            503,
            f"{MOST_VIEWERS} pages are open at this ingress, which is all that it serves; close one",
            code="unavailable",
            kind="service_unavailable_error",
        )
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(feed.events(), headers=headers, media_type="text/event-stream")


DASHBOARD_ROUTES = (Route("/dashboard", dashboard), Route("/dashboard/events", events))
