"""``GET /dashboard``, the live page; ``/dashboard/events`` and ``/dashboard/blocks``, what it shows."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.api.api_server import ApiServer
from app.api.errors import ApiError, admin_only
from app.api.home import page_response
from app.api.key_limits import KeyLimits
from app.dashboard.block_maps import digits
from app.dashboard.live_feed import MOST_VIEWERS, STREAM_S, LiveFeed
from engine.errors import shown

_PAGE = Path(__file__).with_name("dashboard.html").read_text(encoding="utf-8")


async def dashboard(request: Request) -> Response:
    return page_response(_PAGE)


async def events(request: Request) -> Response:
    feed: LiveFeed = request.app.state.get_server().live_feed
    limits: KeyLimits | None = request.state.key_limits
    key = "" if limits is None else limits.key.id
    if feed.viewers >= MOST_VIEWERS:
        raise ApiError(
            503,
            f"{MOST_VIEWERS} pages are open at this ingress, which is all that it serves; close one",
            code="unavailable",
            kind="service_unavailable_error",
        )
    if not feed.has_place(key):
        raise ApiError(
            429,
            f"{feed.of_keys[key]} pages of the key {key!r} are open at this ingress, and {feed.viewers} of "
            f"{MOST_VIEWERS} in all; a key may have as many as it leaves free; close one",
            code="client_limit_exceeded",
            kind="rate_limit_error",
            retry_after_s=math.ceil(STREAM_S),
        )
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    if request.method == "HEAD":
        return Response(headers=headers, media_type="text/event-stream")
    stream = feed.events(key) if limits is None else feed.events(key, limits.may_see)
    first = await anext(stream)  # from here on this viewer counts
    return StreamingResponse(_joined(first, stream), headers=headers, media_type="text/event-stream")


async def _joined(first: bytes, stream: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(stream):
        yield first
        async for event in stream:
            yield event


async def blocks(request: Request) -> Response:
    """The block map of one replica; each cell is a digit, the value of its ``BlockState``.

    Whoever follows it learns when others come and go, so with keys it is for administrators.
    """
    server: ApiServer = request.app.state.get_server()
    limits: KeyLimits | None = request.state.key_limits
    if limits is not None and not limits.key.admin:
        raise admin_only(limits.key.id)
    service = server.choose(request.query_params.get("model"), None)
    replica = request.query_params.get("replica", "")
    if replica not in service.channel_states():
        raise ApiError(404, f"the model {service.model!r} has no replica {shown(replica)}", "replica")
    found = await server.block_maps.get(service.model, replica)
    answer = {"each": found.each, "device": digits(found.device), "host": digits(found.host)}
    return JSONResponse(answer, headers={"cache-control": "no-store"})


DASHBOARD_ROUTES = (
    Route("/dashboard", dashboard),
    Route("/dashboard/events", events),
    Route("/dashboard/blocks", blocks),
)
