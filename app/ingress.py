"""The ingress deployment: the HTTP API, and for each model a client of its engines, and overload control."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray import serve

from app import config, garbage, logs
from app.api.api_server import ApiServer, KnownLife
from app.api.audit_log import audit_to
from app.api.authentication import Gate
from app.api.keys import KeyFile
from app.api.request_trace import RequestTracer
from app.api.routes import make_api
from app.background import Background
from app.config import AppConfig, ServedModel
from app.disk_room import NodeRoom, session_folder
from app.fleet.drain import DRAIN_AFTER_S
from app.ingress_model import IngressModel, ModelFolder
from app.launch.serving import full_shm_warning
from app.metrics.ray_export import EVERY_S, RayExport
from app.metrics.samples import Process
from app.metrics.siblings import Siblings
from app.metrics.table import Source
from app.routing.prefix_flow import PrefixGroup
from engine.errors import ConfigError

SWITCH_INTERVAL_S = 0.0005
"""How long a thread that parses or tokenizes may hold the interpreter lock; Python's default is 5 ms."""

LATER_S = 5.0
"""How long the start of an ingress waits for further models once one can answer."""

RETRY_S = 30.0
"""Pause before one of several models that could not be loaded is tried again."""

ENDED_WITHIN_S = 1.0
"""How long a server that is about to be killed waits for clients to read that it is."""

logger = logging.getLogger(__name__)


def cluster_instance() -> str:
    """The name of this server where none was given: the same in every ingress process of a Ray cluster."""
    session = ray.get_runtime_context().get_session_name()
    return hashlib.blake2b(session.encode(), digest_size=4).hexdigest()


class IngressReplica:
    """The deployment's body: owns the channels to the engines and the service that the routes call.

    ``engines`` has the Serve handle of each model's engine deployment.
    """

    def __init__(self, options: AppConfig, engines: Mapping[str, Any]) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._live = config.LiveOptions(options, "ingress")
        self._engines = engines
        self._background = Background()
        self._keys = KeyFile(options.ingress.api_keys_file)
        self._name = logs.replica_name("ingress").partition(":")[2]
        audit_to(options.ingress.audit_log, logs.replica_name("ingress"))
        self._tracer = RequestTracer.configured(options.ingress, logs.replica_name("ingress"))
        self._room = NodeRoom(session_folder(), logger.warning)
        if warning := full_shm_warning():  # only here is known what Serve's controller was started with
            logger.warning("%s", warning)
        models = config.served_models(options)
        siblings = Siblings(next(iter(engines.values())).deployment_id.app_name)
        self.server = ApiServer(
            [model.name for model in models],
            options.ingress,
            several=models[0].one_of_several,
            instance=options.ingress.instance or cluster_instance(),
            gate=Gate(self._keys, options.ingress.ingress_replicas),
            tracer=self._tracer,
            others=siblings.processes,
            ask_others=siblings.ask,
            name=self._name,
            lack=lambda: self._room.lack,
        )
        self._models: dict[str, IngressModel] = {}
        for model in models:  # on the event loop, but nothing is served yet
            with self._may_fail(model):
                self._add(model, ModelFolder.read(model.options.service.model))
        self._export = RayExport(Source.INGRESS)
        self._tasks: list[asyncio.Task[None]] = []
        # Otherwise a large body in pieces makes the garbage collector look at all that is here again and again,
        # for hundreds of milliseconds.
        garbage.keep_all()

    @contextlib.contextmanager
    def _may_fail(self, model: ServedModel) -> Iterator[None]:
        """One of several models that cannot be loaded must not take the others down.

        Raises:
            ConfigError: the only model cannot be loaded, so that the deployment fails and says why.
        """
        try:
            yield
        except (ConfigError, OSError) as error:
            if not model.one_of_several:
                raise
            logger.error("the model %s cannot be served: %s", model.name, error)

    def _add(self, model: ServedModel, folder: ModelFolder) -> None:
        engine = self._engines[model.name]
        made = IngressModel(model, folder, engine, self.server, self._background, self._name)
        self._models[model.name] = made
        self.server.add(made.service, made.figures)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve at startup, on the event loop, and whenever ``user_config`` changes.

        At startup it returns once an engine is routable: Serve then sends requests here, and during a deploy
        it stops an ingress of the version before.
        """
        first = self._live.current is None
        options = self._live.update(user_config)
        logs.configure(*options.service.logging, logs.replica_name("ingress"))
        self.server.options = options.ingress
        self.server.lag.limit_s = options.ingress.max_lag_s
        self.server.lag.start(self._background)
        await self._apply(options)
        if first:
            self._tasks.append(self._background.start("API keys", self._keys.watch()))
            self._tasks.append(self._background.start("metrics", self._export_often()))
            self._tasks.append(self._background.start("disk room", self._room.run()))
            if self.server.broken:
                self._tasks.append(self._background.start("models", self._load_later()))
            await self._first_answers()

    async def _apply(self, options: AppConfig) -> None:
        for model in config.served_models(options):
            if model.name in self._models:
                await self._models[model.name].apply(model)

    async def _first_answers(self) -> None:
        """Wait until some model can answer, and a little for the others: their engines may never start."""
        waits = [asyncio.create_task(model.answers()) for model in self._models.values()]
        try:
            done, late = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED) if waits else ((), ())
            if late:
                await asyncio.wait(late, timeout=LATER_S)
            for wait in done:
                wait.result()
        finally:
            for wait in waits:
                wait.cancel()

    async def _load_later(self) -> None:
        while self.server.broken:
            await asyncio.sleep(RETRY_S)
            options = self._live.current
            assert options is not None, "it has been configured"
            for model in config.served_models(options):
                if model.name in self.server.broken:
                    with self._may_fail(model):
                        self._add(model, await asyncio.to_thread(ModelFolder.read, model.options.service.model))
            await self._apply(self._live.current or options)  # they may have changed meanwhile

    async def cordon(self, replicas: list[str], lasts_s: float, after_s: float = DRAIN_AFTER_S) -> None:
        """By Serve handle only, broadcast to all ingress replicas; see ``EngineClient.cordon``."""
        for model in self._models.values():
            await model.client.cordon(replicas, lasts_s, after_s)

    async def end_requests(self) -> None:
        """This process is about to be killed: end all requests with an error, and wait a little for them.

        By Serve handle only. Later requests end so, too. A stream that is merely cut looks complete to some
        clients.
        """
        for model in self._models.values():
            model.client.end_requests()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDED_WITHIN_S):
                while self.server.live.count:  # noqa: ASYNC110  (they end on their own)
                    await asyncio.sleep(0.01)

    async def check_health(self) -> None:
        """Called by Serve's controller, which replaces this replica after three failures.

        Raises:
            BackgroundError: a background task or thread has failed.
        """
        self._background.check()

    async def figures(self) -> list[Process]:
        """What this ingress has counted of each model, for the others; by Serve handle only.

        With ``replicas_per_ingress`` also what engines have counted of which no other ingress tells.
        """
        engines = [process for model in self._models.values() for process in model.engine_processes()]
        return [*(model.process() for model in self._models.values()), *engines]

    async def prefix_flow(self, model: str) -> list[PrefixGroup]:
        """Where this ingress sent prompts that begin alike, for the others; by Serve handle only."""
        return self.server.prefix_flow(model)

    async def lives(self, request_id: str) -> list[KnownLife]:
        """What this ingress knows of a request, for the others; by Serve handle only."""
        return self.server.lives(request_id)

    async def _export_often(self) -> None:
        while True:
            for name, model in self._models.items():
                self._export.update(name, model.process().samples)
            await asyncio.sleep(EVERY_S)

    async def inspect(self) -> dict[str, Any]:
        """State for tests and debugging, by Serve handle only; of several models, of each by its name."""
        own = {"pid": os.getpid(), "lag": self.server.lag.inspect()}
        states = {name: model.inspect() for name, model in self._models.items()}
        several = self.server.broken or len(states) > 1
        return {**own, "models": states} if several else {**own, **next(iter(states.values()))}

    async def __del__(self) -> None:
        """Serve calls this after the drain, also if ``__init__`` failed."""
        if hasattr(self, "server"):
            self.server.lag.stop()
        if hasattr(self, "_tasks"):
            for task in self._tasks:
                task.cancel()
        if hasattr(self, "_models"):
            for model in self._models.values():
                await model.stop()
        if hasattr(self, "_tracer") and self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


def _server_here() -> ApiServer:
    """What this process's Serve replica serves."""
    server: ApiServer = serve.get_replica_context().servable_object.server
    return server


Ingress = serve.deployment(serve.ingress(make_api(_server_here))(IngressReplica))
