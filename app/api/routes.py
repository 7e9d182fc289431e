"""The HTTP application: the routes, and what each asks of the service.

Serve itself answers with the caller's ``x-request-id``, or a new one; see ``app/api/request_id.py``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from app.api.api_server import ApiServer
from app.api.authentication import Authentication
from app.api.caller import Caller
from app.api.cors import CrossOrigin
from app.api.dashboard import DASHBOARD_ROUTES
from app.api.errors import CHOSEN, ERROR_HANDLERS, ApiError
from app.api.home import docs_page, home_page
from app.api.instance_header import InstanceHeader
from app.api.key_limits import KeyLimits
from app.api.messages.request import parse_count_tokens, parse_messages_request
from app.api.openai_service import OpenAIService
from app.api.openai_types import GenerationOptions, parse_chat, parse_completion
from app.api.openapi import openapi
from app.api.request_id import request_id_of
from app.api.responses.request import parse_responses
from app.api.tenant import address_of, client_of, sender_of, tenant_of
from app.api.tokenization import parse_detokenize, parse_tokenize


async def health(request: Request) -> Response:
    server = _server(request)
    key: KeyLimits | None = request.state.key_limits
    return server.health(server.gate.keys.required and key is None, key)


async def list_models(request: Request) -> Response:
    return _server(request).models(request.state.key_limits)


async def get_model(request: Request) -> Response:
    return JSONResponse(_chosen(request, request.path_params["name"]).state.entry())


class _Asked(Protocol):
    """What every generating route's parser makes of a body."""

    @property
    def options(self) -> GenerationOptions: ...


A = TypeVar("A", bound=_Asked)


def _generating(
    parse: Callable[[dict[str, Any]], A], answer: Callable[[OpenAIService, A, Caller], Awaitable[ASGIApp]]
) -> Callable[[Request], Awaitable[ASGIApp]]:
    """A route that reads its body with ``parse`` and has the service of its model ``answer``."""

    async def route(request: Request) -> ASGIApp:
        asked = await _server(request).bodies.read(request, parse)
        service = _chosen(request, asked.options.model)
        return await answer(service, asked, _caller(request, asked.options.user))

    return route


GENERATING = {
    "/v1/completions": _generating(parse_completion, OpenAIService.completions),
    "/v1/chat/completions": _generating(parse_chat, OpenAIService.chat),
    "/v1/responses": _generating(parse_responses, OpenAIService.responses),
    "/v1/messages": _generating(parse_messages_request, OpenAIService.messages),
    "/v1/messages/count_tokens": _generating(parse_count_tokens, OpenAIService.count_tokens),
}


async def no_embeddings(request: Request) -> Response:
    raise ApiError(
        404,
        f"{request.url.path} is not supported: this server's models generate text; they are not trained for "
        "embeddings or relevance scores",
        code="not_supported_by_model",
    )


async def reset_prefix_cache(request: Request) -> Response:
    if not _server(request).options.admin_routes:
        raise HTTPException(404)  # for any method: the route does not exist
    if request.method != "POST":
        raise HTTPException(405)
    return await _server(request).reset_prefix_cache(request.query_params.get("model"), _caller(request))


async def tokenize(request: Request) -> Response:
    asked = await _server(request).bodies.read(request, parse_tokenize)
    return await _chosen(request, asked.model).tokenize(asked, _caller(request))


async def detokenize(request: Request) -> Response:
    asked = await _server(request).bodies.read(request, parse_detokenize)
    return await _chosen(request, asked.model).detokenize(asked, _caller(request))


async def ping(request: Request) -> Response:
    """What SageMaker and some load balancers ask."""
    return _server(request).ping()


async def version(request: Request) -> Response:
    return JSONResponse({"version": metadata.version("quire")})


async def metrics(request: Request) -> Response:
    return await _server(request).metrics(request.state.key_limits)


async def home(request: Request) -> Response:
    return home_page()


async def docs(request: Request) -> Response:
    return docs_page()


async def openapi_document(request: Request) -> Response:
    return openapi()


ROUTES = [
    Route("/", home),
    Route("/docs", docs),
    Route("/openapi.json", openapi_document),
    Route("/health", health),
    Route("/ping", ping, methods=["GET", "POST"]),
    Route("/version", version),
    Route("/metrics", metrics),
    *DASHBOARD_ROUTES,
    Route("/v1/models", list_models),
    Route("/v1/models/{name:path}", get_model),
    *(Route(path, route, methods=["POST"]) for path, route in GENERATING.items()),
    Route("/v1/embeddings", no_embeddings, methods=["POST"]),
    Route("/v1/score", no_embeddings, methods=["POST"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/admin/reset_prefix_cache", reset_prefix_cache, methods=["POST", "GET", "PUT", "DELETE"]),
]


def make_api(get_server: Callable[[], ApiServer]) -> ASGIApp:
    """The HTTP application; each request calls ``get_server``."""
    api = Starlette(
        routes=ROUTES,
        exception_handlers=ERROR_HANDLERS,
        middleware=[
            # A preflight request carries no key.
            Middleware(CrossOrigin, origins=lambda: get_server().options.cors_origins),
            Middleware(Authentication, gate=lambda: get_server().gate),
        ],
    )
    api.state.get_server = get_server
    return InstanceHeader(api, lambda: get_server().instance)


def _server(request: Request) -> ApiServer:
    server: ApiServer = request.app.state.get_server()
    return server


def _chosen(request: Request, model: str | None) -> OpenAIService:
    """What serves the model of a request; see ``ApiServer.choose``."""
    service = _server(request).choose(model, request.state.key_limits)
    setattr(request.state, CHOSEN, service.model)
    return service


def _caller(request: Request, user: str = "") -> Caller:
    limits: KeyLimits | None = request.state.key_limits
    header = _server(request).options.tenant_header
    tenant = tenant_of(request.headers, header, "" if limits is None else limits.key.id)
    named = header is not None or limits is not None
    client = tenant if named else client_of(request.headers, user)
    return Caller(
        tenant,
        request_id_of(request.headers),
        limits,
        client,
        sender=sender_of(request, header),
        address=address_of(request),
        trace=(request.headers.get("traceparent", ""), request.headers.get("tracestate", "")),
    )
