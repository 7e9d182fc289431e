"""The HTTP entry: the routes, and the deployment that Serve runs them in.

Serve itself answers with the caller's ``x-request-id``, or a new one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import serve
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from app import config
from app.api.chat import PromptTokenizer
from app.api.errors import ERROR_HANDLERS
from app.api.openai_service import OpenAIService
from app.api.request_body import read_json_object
from app.api.tenant import tenant_of
from app.config import AppConfig
from app.fleet.admission import Admission
from app.fleet.engine_client import EngineClient
from app.fleet.hand_over import AFTER_S
from app.fleet.victim_feed import VictimFeed
from app.launch.model_store import resolve
from app.metrics import AdmissionMetrics
from app.routing import fleet
from app.routing.waiting import ExpectedWait


async def health(request: Request) -> Response:
    return _service(request).health()


async def list_models(request: Request) -> Response:
    return _service(request).models()


async def get_model(request: Request) -> Response:
    return _service(request).model(request.path_params["name"])


async def completions(request: Request) -> ASGIApp:
    return await _service(request).completions(await read_json_object(request), _tenant(request))


async def chat_completions(request: Request) -> ASGIApp:
    return await _service(request).chat(await read_json_object(request), _tenant(request))


async def reset_prefix_cache(request: Request) -> Response:
    if not _service(request).admin_routes:
        raise HTTPException(404)  # to any method: the route is not there
    if request.method != "POST":
        raise HTTPException(405)
    return await _service(request).reset_prefix_cache()


def _service(request: Request) -> OpenAIService:
    service: OpenAIService = request.app.state.service_of()
    return service


def _tenant(request: Request) -> str:
    return tenant_of(request.headers, _service(request).tenant_header)


def make_api(service_of: Callable[[], OpenAIService]) -> Starlette:
    """The HTTP application; ``service_of`` is asked at each request."""
    api = Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", get_model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/admin/reset_prefix_cache", reset_prefix_cache, methods=["POST", "GET", "PUT", "DELETE"]),
        ],
        exception_handlers=ERROR_HANDLERS,
    )
    api.state.service_of = service_of
    return api


def _service_of_replica() -> OpenAIService:
    service: OpenAIService = serve.get_replica_context().servable_object.service
    return service


def fingerprint(folder: Path) -> str:
    """Changes with the model's configuration or tokenizer."""
    digest = hashlib.blake2b(digest_size=6)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        digest.update(f"{name}\0".encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return f"fp_{digest.hexdigest()}"


def expected_wait(engine: Any) -> Callable[[], ExpectedWait | None]:
    """Asks this process's fleet of the deployment that the Serve handle ``engine`` is of."""
    engines = fleet.of(engine.deployment_id.app_name, engine.deployment_id.name)
    return lambda: engines.ledger.expected_wait(engines.eligible(engines.members))


class IngressReplica:
    """The deployment's body: owns the channels to the engines and the service that the routes call."""

    def __init__(self, options: AppConfig, engine: Any) -> None:
        folder = resolve(options.model)
        self._client = EngineClient(engine, options.replica_wait_s, options.policy, options.sleeps)
        self._victims: VictimFeed | None = None
        if options.scales:
            of = engine.deployment_id
            self._victims = VictimFeed(of.app_name, of.name, fleet.of(of.app_name, of.name).likely_victims)
        self._admission = Admission(
            expected_wait(engine),
            longest_wait_s=options.longest_wait_s,
            most_replicas=options.reachable_replicas,
            startup_s=options.startup_grace_s,
            metrics=AdmissionMetrics(options.model_name),
        )
        self.service = OpenAIService(
            self._client,
            PromptTokenizer(folder),
            options.model_name,
            fingerprint(folder),
            max_live_requests=options.max_live_requests,
            unavailable_after_s=options.replica_wait_s,
            tenant_header=options.tenant_header,
            admin_routes=options.admin_routes,
            admission=self._admission,
        )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve at the start, on the event loop, and whenever the live options change."""
        live = config.load_live(user_config)
        config.set_log_level(live.log_level)
        self.service.max_live_requests = live.max_live_requests
        await self._client.start()
        self._admission.start()
        if self._victims is not None:
            self._victims.start()

    async def cordon(self, replicas: list[str], lasts_s: float, after_s: float = AFTER_S) -> None:
        """By Serve handle only, broadcast to all ingress replicas; see ``EngineClient.cordon``."""
        await self._client.cordon(replicas, lasts_s, after_s)

    async def inspect(self) -> dict[str, Any]:
        """State for tests and debugging, by Serve handle only."""
        victims = {} if self._victims is None else self._victims.state()
        own = {"pid": os.getpid(), "victims": victims, "admission": self._admission.inspect()}
        return {**own, **self._client.inspect()}

    async def __del__(self) -> None:
        """Serve calls this after the drain, also if ``__init__`` failed."""
        if hasattr(self, "_victims") and self._victims is not None:
            self._victims.stop()
        if hasattr(self, "_admission"):
            self._admission.stop()
        if hasattr(self, "_client"):
            await self._client.stop()


Ingress = serve.deployment(serve.ingress(make_api(_service_of_replica))(IngressReplica))
