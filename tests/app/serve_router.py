"""Serve's own router of one deployment handle over replicas that are no actors; needs no cluster."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    ReplicaQueueLengthInfo,
    RequestMetadata,
)
from ray.serve._private.router import AsyncioRouter
from ray.serve.request_router import PendingRequest, RequestRouter

from app.routing import fleet
from app.routing.ledger import Route
from app.routing.router import EngineRouter
from app.routing.routing_meta import RoutingMeta

_apps = itertools.count()


class FakeReplica:
    """What Serve's router knows of a replica; ``accepts`` is its answer, or an error that sending meets."""

    def __init__(self, name: str, deployment: DeploymentID) -> None:
        self.replica_id = ReplicaID(name, deployment)
        self.accepts: bool | Exception = True
        self.calls: list[dict[str, Any]] = []
        self.queue = 0
        self.node_id = "node"
        self.availability_zone = None
        self.multiplexed_model_ids: set[str] = set()
        self.max_ongoing_requests = 1000
        self.actor_id = None
        self.is_cross_language = False

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue

    def try_send_request(self, pending: PendingRequest, with_rejection: bool) -> FakeResult:
        if isinstance(self.accepts, Exception):
            raise self.accepts
        self.calls.append(dict(pending.kwargs))
        return FakeResult(self.accepts, len(self.calls))


class FakeResult:
    """A call under way."""

    def __init__(self, accepted: bool, ongoing: int) -> None:
        self._info = ReplicaQueueLengthInfo(accepted, ongoing)

    async def get_rejection_response(self) -> ReplicaQueueLengthInfo:
        return self._info

    def add_done_callback(self, _: Any) -> None:
        """It never ends."""

    def cancel(self) -> None:
        """Nobody is told."""


class ServeRouter:
    """A router class as Serve makes and calls it, with a fleet of its own; lives on the running loop."""

    def __init__(self, router_class: type[RequestRouter], *names: str) -> None:
        self.deployment = DeploymentID("engine", f"fake-{next(_apps)}")
        self.fleet = fleet.get_fleet(self.deployment.app_name)
        self.router = router_class(
            deployment_id=self.deployment,
            handle_source=DeploymentHandleSource.REPLICA,
            self_node_id="node",
            self_actor_id="actor",
            self_actor_handle=None,
            use_replica_queue_len_cache=True,
            create_replica_wrapper_func=lambda info: info,
            prefer_local_node_routing=False,
            prefer_local_az_routing=False,
            self_availability_zone=None,
        )
        self.router.initialize_state()
        self.replicas = {name: FakeReplica(name, self.deployment) for name in names}
        self._serve: Any = object.__new__(AsyncioRouter)
        self._serve.__dict__.update(
            deployment_id=self.deployment,
            _event_loop=asyncio.get_running_loop(),
            _request_router=self.router,
            _request_router_class=None,
            _request_router_initialized=asyncio.Event(),
            _enable_strict_max_ongoing_requests=True,
            _metrics_manager=SimpleNamespace(
                wrap_queued_request=lambda *_: contextlib.nullcontext(),
                inc_num_running_requests_for_replica=lambda _: None,
            ),
        )
        self._serve._request_router_initialized.set()
        self.announce(*names)
        for name in names:
            self.fleet.ledger.open(Route(name, 1))
            self.fleet.pin(name, True)
        self._attempts = itertools.count(1)

    def announce(self, *names: str) -> None:
        """The controller's word."""
        self.router.update_replicas([self.replicas[name] for name in names])

    def meta(self, **changes: Any) -> RoutingMeta:
        """Of a new attempt, which is expected."""
        attempt = next(self._attempts)
        self.fleet.ledger.expect(attempt)
        return replace(RoutingMeta(f"r{attempt}", attempt, prefill=100, decode=10), **changes)

    async def send(self, internal_id: str = "one", **kwargs: Any) -> None:
        """A call through Serve, until a replica has taken it. For ``EngineRouter``, attempts are booked."""
        meta = kwargs.get("meta")
        if isinstance(meta, RoutingMeta) and isinstance(self.router, EngineRouter):
            kwargs["meta"] = self.fleet.book(meta).route
        metadata = RequestMetadata(request_id="r", internal_request_id=internal_id)
        pending = PendingRequest(args=[], kwargs=kwargs, metadata=metadata, resolved=True)
        await self._serve.route_and_send_request(pending, "response")

    def sent(self) -> dict[str, int]:
        """Calls that each replica has got."""
        return {name: len(replica.calls) for name, replica in self.replicas.items()}
