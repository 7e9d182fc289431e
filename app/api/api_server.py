"""What one ingress replica serves: its models, and what is common to them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.audit_log import audited
from app.api.authentication import Gate
from app.api.caller import Caller
from app.api.errors import (
    CHOSEN,
    ApiError,
    ApiFault,
    admin_only,
    model_not_allowed,
    model_not_found,
    overloaded,
)
from app.api.key_limits import KeyLimits
from app.api.keys import KeyFile
from app.api.live_requests import LiveRequests
from app.api.openai_service import OpenAIService
from app.api.request_body import BodyReader
from app.api.request_life import life_of
from app.api.request_record import RequestRecord
from app.api.request_trace import RequestTracer
from app.api.server_state import health_response
from app.api.tenant import sender_of
from app.dashboard.block_maps import BlockMaps
from app.dashboard.live_feed import LiveFeed
from app.dashboard.prefix_flows import PrefixFlows
from app.dashboard.recent_requests import RecentRequests
from app.fleet.cache_reset import CacheReset
from app.fleet.generation import UnavailableError
from app.fleet.ingress_lag import IngressLag
from app.metrics.exposition import CONTENT_TYPE
from app.metrics.fleet_figures import FleetFigures, ModelFigures, nobody
from app.metrics.samples import Process
from app.option_groups import IngressOptions
from app.routing.prefix_flow import PrefixGroup
from engine.kv.block_groups import GroupBy
from engine.kv.block_map import BlockMap

MAX_ASKING = 4
"""Most questions about requests that wait for the other ingresses at a time; further ones queue."""

_IN_ANSWERS = re.compile(r"^(?:chatcmpl-|cmpl-|resp_|msg_)")
"""The prefixes that make a request's ID the ID of an answer."""


class KnownLife(NamedTuple):
    """What an ingress knows of one request, and whose it is."""

    tenant: str
    life: dict[str, Any]


class AskOthers(Protocol):
    """Calls a method of each ingress, this one included; returns the answers that come."""

    def __call__(self, method: str, *arguments: object) -> Awaitable[list[Any]]: ...


async def _nobody(method: str, *arguments: object) -> list[Any]:
    return []


class ApiServer:
    """One per ingress replica; runs on its event loop.

    ``names`` are the models; the first serves requests that name none. :meth:`add` adds a model's service. A
    model that cannot be served here, or not yet, is in ``broken``. ``options`` may be replaced at any time;
    each request reads the current ones. ``instance`` names the server. ``gate`` knows the API keys; by default
    there are none. ``others`` asks the other ingresses for their figures, and ``ask_others`` for anything else.
    ``tracer`` exports traces; by default there are none. ``name`` is this ingress's. ``lack`` says
    what its node lacks.
    """

    def __init__(
        self,
        names: Sequence[str],
        options: IngressOptions,
        *,
        several: bool = False,
        instance: str = "",
        gate: Gate | None = None,
        tracer: RequestTracer | None = None,
        others: Callable[[], Awaitable[list[Process]]] = nobody,
        ask_others: AskOthers = _nobody,
        name: str = "",
        lack: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.options = options
        self.instance = instance
        self.gate = gate or Gate(KeyFile(None, {}))
        self.bodies = BodyReader(
            lambda request: sender_of(request, self.options.tenant_header),
            self._check_wait,
            check=self._check_key,
        )
        self.lag = IngressLag(options.max_lag_s, lambda: self.bodies.wait_s)
        self.live = LiveRequests()
        self.tracer = tracer
        self.recent: RecentRequests[RequestRecord] = RecentRequests()
        self._ask_others = ask_others
        self._asking = asyncio.Semaphore(MAX_ASKING)
        self._name = name
        self._lack = lack
        self.broken = set(names)
        self._names = tuple(names)
        self._several = several
        self._services: dict[str, OpenAIService] = {}
        self._figures: list[ModelFigures] = []
        self.fleet_figures = FleetFigures(self._figures, others)
        self.block_maps = BlockMaps(self._block_map)
        self.prefix_flows = PrefixFlows(self._ask_prefix_flow)
        self.live_feed = LiveFeed(
            lambda: self.fleet_figures.processes(),
            lambda: {service.model: service.channel_states() for service in self.services},
        )

    def add(self, service: OpenAIService, figures: ModelFigures | None = None) -> None:
        """Serve a model from now on; by default its figures are those of its requests."""
        self._services[service.model] = service
        self.broken.discard(service.model)
        own = ModelFigures(service.model, lambda: Process("", service.figures.samples(), service.model))
        self._figures.append(figures or own)

    @property
    def services(self) -> list[OpenAIService]:
        """The services of the models that can be served, in the order of the options."""
        return [self._services[name] for name in self._names if name in self._services]

    def choose(self, name: str | None, key: KeyLimits | None) -> OpenAIService:
        """What serves the model ``name``; without a name, the first model that ``key`` may use.

        Raises:
            ApiError: 404, there is no such model; 403, it is not for ``key``.
            UnavailableError: it cannot be served here.
        """
        usable = self._usable(key)
        wanted = next(iter(usable), self._names[0]) if name is None else name
        if wanted not in usable:
            if key is not None and (wanted in self._names or not usable):
                raise model_not_allowed(wanted, key.key.id)
            raise model_not_found(wanted, usable)
        if wanted not in self._services:
            raise UnavailableError(f"the model {wanted!r} cannot be served now; the server's log says why")
        return self._services[wanted]

    def models(self, key: KeyLimits | None = None) -> Response:
        """Answer ``GET /v1/models``: those that ``key`` may use."""
        listed = [service.state.entry() for service in self._services_for(key)]
        return JSONResponse({"object": "list", "data": listed})

    def health(self, brief: bool = False, key: KeyLimits | None = None) -> Response:
        """Answer ``GET /health`` for the models that ``key`` may see.

        ``brief`` is for clients without a key, or with a key that may see none of the models.
        """
        seen = self.visible(key)
        brief = brief or not seen
        found: dict[str, dict[str, Any]] = {name: {"status": "unavailable"} for name in (seen or self._names)}
        found |= {service.model: service.state.health() for service in self.services if service.model in found}
        return health_response(self.instance, found, self._several, brief, self._lack())

    def visible(self, key: KeyLimits | None) -> list[str]:
        """The models that ``key`` may know of."""
        return [name for name in self._names if key is None or key.may_see(name)]

    def ping(self) -> Response:
        """The status of :meth:`health` without its body."""
        return Response(status_code=self.health(brief=True).status_code)

    async def reset_prefix_cache(self, name: str | None, caller: Caller) -> Response:
        """Answer ``POST /admin/reset_prefix_cache``, for all models if no ``name`` is given.

        An error names each replica that failed.

        Raises:
            ApiError: 403 without an administrator's key; and as :meth:`choose`.
            UnavailableError: no engine replica is routable.
        """
        with audited(caller, "reset_prefix_cache") as said:
            if caller.limits is not None and not caller.limits.key.admin:
                raise admin_only(caller.limits.key.id)
            reset = await self._reset(name, caller.limits)
            replicas, freed = len(reset.freed_blocks), sum(reset.freed_blocks.values())
            said |= {"replicas": replicas, "freed_blocks": freed}
            if reset.failures:
                said["outcome"] = "reset_failed"
        if reset.failures:
            causes = "; ".join(f"{replica}: {why}" for replica, why in reset.failures.items())
            message = f"{replicas} replicas freed {freed} blocks, {len(reset.failures)} failed: {causes}"
            return ApiFault(500, message, "server_error", code="reset_failed").to_response()
        return JSONResponse({"replicas": replicas, "freed_blocks": freed})

    async def _reset(self, name: str | None, key: KeyLimits | None) -> CacheReset:
        """Of one model or all; engines of some may be asleep, and have nothing to forget."""
        chosen = [self.choose(name, key)] if name is not None else self._services_for(key)
        resets = await asyncio.gather(
            *(service.reset_prefix_cache() for service in chosen), return_exceptions=True
        )
        for reset in resets:
            if isinstance(reset, BaseException) and not isinstance(reset, UnavailableError):
                raise reset
        done = [reset for reset in resets if isinstance(reset, CacheReset)]
        if not done:
            raise UnavailableError("no engine replica has an open channel; try again later")
        return CacheReset(
            {replica: blocks for reset in done for replica, blocks in reset.freed_blocks.items()},
            {replica: why for reset in done for replica, why in reset.failures.items()},
        )

    def prefix_flow(self, model: str) -> list[PrefixGroup]:
        """Shared prefixes of a model: where this ingress sent their prompts; empty if it does not serve it."""
        return self._services[model].prefix_flow() if model in self._services else []

    async def _block_map(self, model: str, replica: str, by: GroupBy) -> BlockMap:
        """Its prefixes are named as in the flow of the router."""
        groups = await self.prefix_flows.get(model) if by is GroupBy.PREFIX else ()
        keys = [group.key for group in groups if group.blocks]
        return await self._services[model].block_map(replica, by, keys)

    async def _ask_prefix_flow(self, model: str) -> list[list[PrefixGroup]]:
        return await self._ask_others("prefix_flow", model) or [self.prefix_flow(model)]

    def lives(self, request_id: str) -> list[KnownLife]:
        """What this ingress knows of the requests with an id, the last one first."""
        return [
            KnownLife(record.caller.tenant, life_of(record, self._name))
            for record in self.recent.find(request_id)
        ]

    async def lives_anywhere(self, request_id: str, may_see: Callable[[KnownLife], bool]) -> list[KnownLife]:
        """What the ingress that has it knows of a request, as its header, or its answer, names it.

        Clients name their requests: one that the asker may not see hides none that it may.
        """
        plain = _IN_ANSWERS.sub("", request_id)
        names = list(dict.fromkeys((request_id, plain)))
        for name in names:
            if found := list(filter(may_see, self.lives(name))):
                return found
        async with self._asking:
            for name in names:
                answers = await self._ask_others("lives", name)
                if found := [known for answer in answers for known in answer if may_see(known)]:
                    return found
        return []

    async def metrics(self, key: KeyLimits | None) -> Response:
        """Answer ``GET /metrics``: the whole fleet's figures, in Prometheus's format.

        A key sees its models and what it has used itself; only an administrator's key sees everything.
        """
        if key is None or key.key.admin:
            text = await self.fleet_figures.text()
        else:
            models = None if key.key.models is None else frozenset(self.visible(key))
            text = await self.fleet_figures.text(key.key.id, models)
        return Response(text, media_type=CONTENT_TYPE)

    def count_refusal(self, model: str | None, code: str) -> None:
        """A request was answered with a 429 or 503; for the first model, if it ended before it had one."""
        first = self._services.get(self._names[0]) or next(iter(self._services.values()), None)
        service = first if model is None else self._services.get(model)
        if service is not None:
            service.figures.refused[code] += 1

    def _check_key(self, request: Request) -> None:
        """Refuse a request beyond the limits of its key.

        Raises:
            ApiError: 429.
        """
        limits: KeyLimits | None = request.state.key_limits
        if limits is None:
            return
        try:
            limits.check()
        except ApiError:  # the model that it names is not known yet; the key may not see others than its own
            setattr(request.state, CHOSEN, next((each.model for each in self._services_for(limits)), None))
            raise

    def _check_wait(self, waited_s: float) -> None:
        """Refuse a request of a client whose requests have waited too long to start.

        Raises:
            ApiError: 429.
        """
        refusal = self.lag.begin_refusal(waited_s)
        if refusal is not None:
            raise overloaded(refusal)

    def _services_for(self, key: KeyLimits | None) -> list[OpenAIService]:
        usable = self._usable(key)
        return [service for service in self.services if service.model in usable]

    def _usable(self, key: KeyLimits | None) -> list[str]:
        return [name for name in self._names if key is None or key.may_use(name)]
