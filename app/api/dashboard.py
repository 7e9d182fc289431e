"""``GET /dashboard``, the live page; ``/dashboard/events`` and ``/dashboard/blocks``, what it shows."""

from __future__ import annotations

import base64
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.api.api_server import ApiServer
from app.api.errors import ApiError, admin_only
from app.api.home import page_response
from app.api.key_limits import KeyLimits
from app.api.tenant import tenant_of
from app.dashboard.block_maps import digits, shown_names
from app.dashboard.live_feed import MAX_VIEWERS, STREAM_S, LiveFeed
from app.dashboard.prefix_flows import visible_rows
from app.dashboard.recent_requests import MAX_ENDED
from engine.errors import shown
from engine.kv.block_groups import GroupBy

MAX_LIVES = 8
"""Requests with one ID that an answer has at most, the last ones first."""

_PAGE = Path(__file__).with_name("dashboard.html").read_text(encoding="utf-8")


async def dashboard(request: Request) -> Response:
    return page_response(_PAGE)


async def events(request: Request) -> Response:
    feed: LiveFeed = request.app.state.get_server().live_feed
    limits: KeyLimits | None = request.state.key_limits
    key = "" if limits is None else limits.key.id
    if feed.viewers >= MAX_VIEWERS:
        raise ApiError(
            503,
            f"{MAX_VIEWERS} pages are open at this ingress, and it serves no more; close one",
            code="unavailable",
            kind="service_unavailable_error",
        )
    if not feed.has_place(key):
        raise ApiError(
            429,
            f"the key {key!r} has {feed.of_keys[key]} of {MAX_VIEWERS} pages open at this ingress, where "
            f"{feed.viewers} are open in all; a key may have only as many as it leaves free; close one",
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

    ``by`` asks for its groups, too, in base64. Whoever follows a map learns when others come and go, so with
    keys it is for administrators.
    """
    server: ApiServer = request.app.state.get_server()
    limits: KeyLimits | None = request.state.key_limits
    if limits is not None and not limits.key.admin:
        raise admin_only(limits.key.id)
    service = server.choose(request.query_params.get("model"), None)
    replica = request.query_params.get("replica", "")
    if not service.has_replica(replica):
        raise ApiError(404, f"the model {service.model!r} has no replica {shown(replica)}", "replica")
    asked = request.query_params.get("by", GroupBy.STATE.value)
    if asked not in list(GroupBy):
        raise ApiError(400, f"by is {shown(asked)} but must be one of {', '.join(GroupBy)}", "by")
    found = await server.block_maps.get(service.model, replica, by := GroupBy(asked))
    answer: dict[str, Any] = {"each": found.each, "device": digits(found.device), "host": digits(found.host)}
    if by is not GroupBy.STATE:
        answer["groups"] = base64.b64encode(found.groups).decode()
        answer["names"] = shown_names(found, _tenant(request, server) if limits is None else None)
    return JSONResponse(answer, headers={"cache-control": "no-store"})


async def prefixes(request: Request) -> Response:
    """Which prompts that begin alike went where, and why.

    With keys, only administrators see other tenants' prefixes, by their hash; nobody sees their words.
    """
    server: ApiServer = request.app.state.get_server()
    limits: KeyLimits | None = request.state.key_limits
    everyones = limits is None or limits.key.admin
    service = server.choose(request.query_params.get("model"), None if everyones else limits)
    tenant = _tenant(request, server)
    groups = await server.prefix_flows.get(service.model)
    listed = visible_rows(groups, tenant, everyones, tenant != "" or server.options.prefix_words)
    return JSONResponse({"prefixes": listed}, headers={"cache-control": "no-store"})


async def one_request(request: Request) -> Response:
    """The life of a request, for its tenant and for administrators; others learn not even that there is one."""
    server: ApiServer = request.app.state.get_server()
    limits: KeyLimits | None = request.state.key_limits
    asked = request.path_params["request_id"]
    admin = limits is not None and limits.key.admin
    tenant = _tenant(request, server)
    found = await server.lives_anywhere(asked, lambda known: admin or known.tenant == tenant)
    if not found:
        raise ApiError(
            404,
            f"no request {shown(asked)} is known here: it belongs to another key or server, or is too old; "
            f"an ingress remembers the last {MAX_ENDED:,} that have ended",
            "request_id",
        )
    lives = [known.life for known in found[:MAX_LIVES]]
    return JSONResponse({"requests": lives}, headers={"cache-control": "no-store"})


def _tenant(request: Request, server: ApiServer) -> str:
    limits: KeyLimits | None = request.state.key_limits
    return tenant_of(request.headers, server.options.tenant_header, "" if limits is None else limits.key.id)


DASHBOARD_ROUTES = (
    Route("/dashboard", dashboard),
    Route("/dashboard/events", events),
    Route("/dashboard/blocks", blocks),
    Route("/dashboard/prefixes", prefixes),
    Route("/dashboard/requests/{request_id:path}", one_request),
)
