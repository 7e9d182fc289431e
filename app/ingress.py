"""The ingress deployment: the HTTP API, its engine client, and overload control."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import sys
from collections.abc import Callable
from typing import Any

import ray
from ray import serve

from app import config, logs
from app.api.audit_log import audit_to
from app.api.authentication import Gate
from app.api.keys import KeyFile
from app.api.openai_service import OpenAIService
from app.api.prompt_tokenizer import PromptTokenizer
from app.api.request_trace import RequestTracer
from app.api.routes import make_api
from app.api.tokenizer_parts import TokenizerParts
from app.background import Background
from app.config import AppConfig
from app.fleet.drain import DRAIN_AFTER_S
from app.fleet.engine_client import EngineClient
from app.fleet.overload import OverloadControl
from app.fleet.victim_feed import VictimFeed
from app.launch.model_store import resolve
from app.metrics.fleet_figures import FleetFigures
from app.metrics.ingress_figures import ingress_samples
from app.metrics.ray_export import EVERY_S, RayExport
from app.metrics.samples import Process, Samples
from app.metrics.scaling_figures import DecisionReader, scaling_samples
from app.metrics.siblings import Siblings
from app.metrics.table import Source
from app.routing import fleet
from app.routing.policies import Policy
from app.routing.waiting import ExpectedWait
from engine.models.identity import tokenizer_digest

SWITCH_INTERVAL_S = 0.0005
"""How long a thread that parses or tokenizes may hold the interpreter lock; Python's default is 5 ms."""


def routing_policy(routing: config.Routing) -> Policy:
    """How the ledger chooses; with Serve's own routers it gets one candidate."""
    return Policy(routing) if routing in list(Policy) else Policy.LEAST_TOKENS


def cluster_instance() -> str:
    """The name of this server where none was given: the same in every ingress process of a Ray cluster."""
    session = ray.get_runtime_context().get_session_name()
    return hashlib.blake2b(session.encode(), digest_size=4).hexdigest()


def expected_wait(engine: Any) -> Callable[[], ExpectedWait | None]:
    """The expected wait on the engine deployment with the Serve handle ``engine``, as this process knows it."""
    engines = fleet.get_fleet(engine.deployment_id.app_name, engine.deployment_id.name)
    return lambda: engines.ledger.expected_wait(engines.eligible(engines.members))


class IngressReplica:
    """The deployment's body: owns the channels to the engines and the service that the routes call."""

    def __init__(self, options: AppConfig, engine: Any) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._live = config.LiveOptions(options, "ingress")
        folder = resolve(options.service.model)
        self._background = Background()
        self._client = EngineClient(
            engine,
            options.replica_wait_s,
            routing_policy(options.ingress.routing),
            options.scaling.to_zero,
            tokenizer_digest(folder),
            own_thread=True,
            drain_timeout_s=options.service.drain_timeout_s,
            background=self._background,
        )
        self._victims: VictimFeed | None = None
        if options.scaling.scales:
            of = engine.deployment_id
            self._victims = VictimFeed(
                of.app_name, of.name, fleet.get_fleet(of.app_name, of.name).likely_victims
            )
        self._overload = OverloadControl(
            expected_wait(engine),
            max_wait_s=options.max_wait_s,
            max_replicas=options.scaling.reachable_replicas,
            startup_s=options.scaling.startup_grace_s,
            backlog_s=self._client.lag_s,
        )
        self._keys = KeyFile(options.ingress.api_keys_file)
        audit_to(options.ingress.audit_log, logs.replica_name("ingress"))
        self._tracer = RequestTracer.configured(options.ingress, logs.replica_name("ingress"))
        self.service = OpenAIService(
            self._client,
            PromptTokenizer(TokenizerParts.read(folder)),
            options.service.model_name,
            options.ingress,
            engine_wait_s=options.replica_wait_s,
            overload=self._overload,
            instance=options.ingress.instance or cluster_instance(),
            gate=Gate(self._keys, options.ingress.ingress_replicas),
            tracer=self._tracer,
        )
        self._name = logs.replica_name("ingress").partition(":")[2]
        self._decision = DecisionReader(engine.deployment_id.app_name, engine.deployment_id.name)
        self.service.fleet_figures = FleetFigures(
            options.service.model_name,
            self._process,
            lambda: self._client.engine_figures,
            Siblings(engine.deployment_id.app_name).processes,
            self._scaling_samples,
        )
        self._export = RayExport(options.service.model_name, Source.INGRESS)
        self._watching: asyncio.Task[None] | None = None
        self._exporting: asyncio.Task[None] | None = None
        # What is here now stays: otherwise a large body in pieces makes the garbage collector look at all of it
        # again and again, for hundreds of milliseconds.
        gc.collect()
        gc.freeze()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve at startup, on the event loop, and whenever ``user_config`` changes.

        At startup it returns once an engine is routable: Serve then sends requests here, and during a deploy
        it stops an ingress of the version before.
        """
        first = self._live.current is None
        options = self._live.update(user_config)
        logs.configure(*options.service.logging, logs.replica_name("ingress"))
        self.service.options = options.ingress
        self.service.engine_wait_s = options.replica_wait_s
        self._client.configure(options.replica_wait_s)
        self._overload.configure(options.max_wait_s)
        self._overload.start(self._background)
        if first:
            self._watching = self._background.start("API keys", self._keys.watch())
            self._exporting = self._background.start("metrics", self._export_often())
        if self._victims is not None:
            self._victims.start(self._background)
        await self._client.start()
        if first and not options.scaling.to_zero:
            await self._client.first_route()

    async def cordon(self, replicas: list[str], lasts_s: float, after_s: float = DRAIN_AFTER_S) -> None:
        """By Serve handle only, broadcast to all ingress replicas; see ``EngineClient.cordon``."""
        await self._client.cordon(replicas, lasts_s, after_s)

    async def check_health(self) -> None:
        """Called by Serve's controller, which replaces this replica after three failures.

        Raises:
            BackgroundError: a background task or thread has failed.
        """
        self._background.check()

    async def figures(self) -> Process:
        """What this ingress has counted, for the others; by Serve handle only."""
        return self._process()

    def _process(self) -> Process:
        samples = ingress_samples(self.service.figures, self._client.inspect(), self._overload.inspect())
        return Process(self._name, samples)

    async def _scaling_samples(self) -> Samples:
        decision = await self._decision.latest()
        return {} if decision is None else scaling_samples(decision)

    async def _export_often(self) -> None:
        while True:
            self._export.update(self._process().samples)
            await asyncio.sleep(EVERY_S)

    async def inspect(self) -> dict[str, Any]:
        """State for tests and debugging, by Serve handle only."""
        victims = {} if self._victims is None else self._victims.state()
        own = {"pid": os.getpid(), "victims": victims, "overload": self._overload.inspect()}
        return {**own, **self._client.inspect()}

    async def __del__(self) -> None:
        """Serve calls this after the drain, also if ``__init__`` failed."""
        if hasattr(self, "_victims") and self._victims is not None:
            self._victims.stop()
        if hasattr(self, "_overload"):
            self._overload.stop()
        for task in (self._watching, self._exporting) if hasattr(self, "_exporting") else ():
            if task is not None:
                task.cancel()
        if hasattr(self, "_client"):
            await self._client.stop()
        if hasattr(self, "_tracer") and self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


def _service_here() -> OpenAIService:
    """The service of this process's Serve replica."""
    service: OpenAIService = serve.get_replica_context().servable_object.service
    return service


Ingress = serve.deployment(serve.ingress(make_api(_service_here))(IngressReplica))
