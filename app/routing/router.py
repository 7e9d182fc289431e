"""Serve's request routers for the engine deployment: calls whose replica is known, and Serve's own choice.

Serve pickles this module by value (see ``fleet``). Overriding ``_choose_replica_for_request`` replaces Serve's
queue, which matches requests by an internal id that concurrent calls of one HTTP request share.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

import app.routing.fleet as fleet
from app.routing.replica_state import Route
from app.routing.routing_meta import RoutingMeta


class _PinnedCalls(RequestRouter):  # type: ignore[misc]
    """A call with ``target=`` goes to that replica or fails; one with ``meta=`` is an attempt.

    One with ``wait=`` stays in Serve's queue while there is no replica, so that Serve sees it and starts one.
    """

    def initialize_state(self, **_: Any) -> None:
        """Called once by Serve on the router's loop."""
        self._fleet = fleet.get_fleet(self._deployment_id.app_name, self._deployment_id.name)
        self._draining: dict[str, RunningReplica] = {}
        self._arrival = asyncio.Event()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """A new membership; replicas that left stay reachable for pinned calls while their channel is open."""
        before = dict(self._replicas)
        super().update_replicas(replicas)
        names = frozenset(replica.replica_id.unique_id for replica in replicas)
        for replica in before.values():
            self._draining.setdefault(replica.replica_id.unique_id, replica)
        self._draining = {
            name: replica
            for name, replica in self._draining.items()
            if name not in names and self._fleet.is_pinned(name)
        }
        self._fleet.set_members(names)
        if names:
            self._arrival.set()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """The replica is dead for certain."""
        super().on_replica_actor_died(replica_id)
        self._draining.pop(replica_id.unique_id, None)
        self._fleet.set_members(frozenset(known.unique_id for known in self._replicas))

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        kwargs = pending_request.kwargs
        target, meta = kwargs.get("target"), kwargs.get("meta")
        if is_retry:
            # Overriding this method also skips Serve's backoff between tries.
            await self._backoff(0)
            if target is not None or meta is not None:
                # Their sender knows what to do instead, and counts its tries.
                raise fleet.NotAcceptedError("the engine replica did not accept the call")
        if target is not None:
            return self._pinned(target)
        if meta is not None:
            route = await self._route(pending_request, meta)
            # All that the engine needs: it refuses an epoch that it does not have.
            pending_request.kwargs["meta"] = {"epoch": route.epoch}
            replica = self._member(route.replica)
            if replica is None:  # one that drains gets no attempts
                raise fleet.NotAcceptedError(f"engine replica {route.replica} has left")
            return replica
        while kwargs.get("wait") and not self._replicas:
            self._arrival.clear()
            await self._arrival.wait()
        for replica in self._replicas.values():
            return replica
        raise fleet.ReplicaGoneError("there is no engine replica")

    async def _route(self, pending_request: PendingRequest, meta: Any) -> Route:
        """Where an attempt is booked."""
        raise NotImplementedError

    def _pinned(self, target: str) -> RunningReplica:
        replica = self._member(target) or self._draining.get(target)
        if replica is None:
            raise fleet.ReplicaGoneError(f"engine replica {target} is gone")
        return replica

    def _member(self, name: str) -> RunningReplica | None:
        for replica_id, replica in self._replicas.items():
            if replica_id.unique_id == name:
                return replica
        return None

    def _by_name(self) -> dict[str, RunningReplica]:
        return {replica_id.unique_id: replica for replica_id, replica in self._replicas.items()}


class EngineRouter(_PinnedCalls):
    """The ingress has chosen and booked the replica of each attempt; ``meta`` says where."""

    async def _route(self, pending_request: PendingRequest, meta: Route) -> Route:
        return meta

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Part of Serve's contract; ``_choose_replica_for_request`` does not call it."""
        return [[replica] for replica in candidate_replicas]


class PowerOfTwoRouter(_PinnedCalls, PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Serve's own choice, the shorter of two queues, to be compared with."""

    async def _route(self, pending_request: PendingRequest, meta: RoutingMeta) -> Route:
        replicas = self._by_name()
        able = self._fleet.ledger.routable(replicas.keys(), meta.requirement)
        usable = set(self._fleet.eligible(able, meta.requirement))
        usable = usable - {meta.avoid} or usable
        # Serve's choice knows neither channels nor cordons, nor what has just failed.
        ranks = await self.choose_replicas([replicas[name] for name in usable], pending_request)
        best = [[replica for replica in rank if replica.replica_id.unique_id in usable] for rank in ranks]
        two = [replicas[name] for name in random.sample(sorted(usable), min(2, len(usable)))]
        chosen = min(
            next(filter(None, best), two),
            key=lambda replica: self._replica_queue_len_cache.get(replica.replica_id) or 0,
            default=None,
        )
        candidates = () if chosen is None else (chosen.replica_id.unique_id,)
        return self._fleet.book(meta, candidates).route
