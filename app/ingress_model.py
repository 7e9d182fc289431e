"""What an ingress has for one model: channels to its engines, overload control, tokenizer, and service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray import serve

from app import option_groups, serve_status
from app.api.api_server import ApiServer
from app.api.openai_service import OpenAIService
from app.api.prompt_tokenizer import PromptTokenizer
from app.api.tokenizer_parts import TokenizerParts
from app.background import Background
from app.config import ServedModel
from app.fleet.engine_client import EngineClient
from app.fleet.overload import OverloadControl
from app.fleet.victim_feed import VictimFeed
from app.launch.model_store import resolve
from app.metrics.fleet_figures import ModelFigures, unpacked
from app.metrics.ingress_figures import ingress_samples
from app.metrics.samples import Process
from app.metrics.scaling_figures import DecisionReader
from app.routing import fleet
from app.routing.policies import Policy
from app.routing.subset import Subset
from app.routing.waiting import ExpectedWait
from engine.models.identity import tokenizer_digest


def routing_policy(routing: option_groups.Routing) -> Policy:
    """How the ledger chooses; with Serve's own routers it gets one candidate."""
    return Policy(routing) if routing in list(Policy) else Policy.LEAST_TOKENS


def wait_estimator(engine: Any) -> Callable[[], ExpectedWait | None]:
    """The expected wait on the engine deployment with the Serve handle ``engine``, as this process knows it.

    Where it knows only some replicas, it takes the others to be like them.
    """
    engines = fleet.get_fleet(engine.deployment_id.app_name, engine.deployment_id.name)

    def expected() -> ExpectedWait | None:
        members = engines.members
        wait = engines.ledger.expected_wait(engines.eligible(members))
        others = len(engines.known) - len(members)
        return wait if wait is None or not others else wait._replace(replicas=wait.replicas + others)

    return expected


def subset_of(options: option_groups.IngressOptions) -> Subset | None:
    """The part of the fleet that this Serve replica, an ingress, routes to; ``None``: all of it."""
    size, ingresses = options.replicas_per_ingress, options.ingress_replicas
    if size is None or ingresses == 1:
        return None
    return Subset(size, serve.get_replica_context().rank.rank, ingresses)


@dataclass(frozen=True)
class ModelFolder:
    """What an ingress reads of a model's folder."""

    tokenizer: PromptTokenizer
    digest: str

    @classmethod
    def read(cls, model: str) -> ModelFolder:
        """Read and warm up the tokenizer: seconds of work, so not on the event loop of an ingress that serves.

        Raises:
            ConfigError: the folder is not there, or is not a model's.
            OSError: it cannot be read.
        """
        folder = resolve(model)
        tokenizer = PromptTokenizer(TokenizerParts.read(folder))
        tokenizer.warm_up()
        return cls(tokenizer, tokenizer_digest(folder))


class IngressModel:
    """Belongs to one ingress replica; everything runs on its event loop.

    ``engine`` is the Serve handle of the model's engine deployment, ``ingress`` the name of the replica.
    """

    def __init__(
        self,
        model: ServedModel,
        folder: ModelFolder,
        engine: Any,
        server: ApiServer,
        background: Background,
        ingress: str,
    ) -> None:
        options, of = model.options, engine.deployment_id
        self.model = model
        self._background = background
        self._ingress = ingress
        self.client = EngineClient(
            engine,
            options.replica_wait_s,
            routing_policy(options.ingress.routing),
            options.scaling.to_zero,
            folder.digest,
            channel_thread=True,
            drain_timeout_s=options.service.drain_timeout_s,
            background=background,
            start_failure=partial(asyncio.to_thread, serve_status.start_failure, of.app_name, of.name),
            serve_chooses=options.ingress.routing not in list(Policy),
        )
        self._victims: VictimFeed | None = None
        if options.scaling.scales:
            likely = fleet.get_fleet(of.app_name, of.name).likely_victims
            self._victims = VictimFeed(of.app_name, of.name, likely)
        server.lag.watch_frames(self.client.lag_s)
        self.overload = OverloadControl(
            wait_estimator(engine),
            max_wait_s=options.max_wait_s,
            max_replicas=options.scaling.reachable_replicas,
            startup_s=options.scaling.startup_grace_s,
            lag=server.lag,
        )
        self.service = OpenAIService(
            self.client,
            folder.tokenizer,
            model.name,
            options.ingress,
            server.live,
            server.bodies.threads.run,
            engine_wait_s=options.replica_wait_s,
            overload=self.overload,
            tracer=server.tracer,
            recent=server.recent,
        )
        self._engines = fleet.get_fleet(of.app_name, of.name)
        self._decision = DecisionReader(of.app_name, of.name)
        self.figures = ModelFigures(
            model.name, self.process, lambda: self.client.engine_figures, self._decision.latest
        )

    async def apply(self, model: ServedModel) -> None:
        """Take over the live options of ``model``; the first time, connect to the engines."""
        options = model.options
        self._engines.set_subset(subset_of(options.ingress))
        self.service.options = options.ingress
        self.service.engine_wait_s = options.replica_wait_s
        self.client.configure(options.replica_wait_s)
        self.overload.configure(options.max_wait_s)
        self.overload.start(self._background)
        if self._victims is not None:
            self._victims.start(self._background)
        await self.client.start()

    async def answers(self) -> None:
        """Wait, without a limit, until an engine is routable, unless none needs to run."""
        if not self.model.options.scaling.to_zero:
            await self.client.first_route()

    def process(self) -> Process:
        """What this ingress has counted of the model."""
        victims = 0 if self._victims is None else self._victims.faults.count
        failed = {"victims": victims, "decision": self._decision.faults.count}
        samples = ingress_samples(self.service.figures, self.client.inspect(), self.overload.inspect(), failed)
        return Process(self._ingress, samples, self.model.name)

    def engine_processes(self) -> list[Process]:
        """The figures of engines that this ingress tells others of, as not every ingress hears of each."""
        figures, first = self.client.engine_figures, self._engines.is_first
        return unpacked({self.model.name: {name: figures[name] for name in figures if first(name)}})

    def inspect(self) -> dict[str, Any]:
        """State for tests and debugging."""
        victims = {} if self._victims is None else self._victims.state()
        return {"victims": victims, "overload": self.overload.inspect(), **self.client.inspect()}

    async def stop(self) -> None:
        """Let go of the engines."""
        if self._victims is not None:
            self._victims.stop()
        self.overload.stop()
        await self.client.stop()
