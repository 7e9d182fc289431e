"""The channels of one ingress process, one to each engine replica."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from app.background import Background
from app.channel import relay
from app.channel.channel_events import OwnerEvents
from app.channel.ingress_channel import DEAD_S, IngressChannel
from app.channel.wire_resume import AttemptClaim
from app.routing import fleet
from app.routing.replica_state import Route
from app.routing.requirement import Requirement

WIDE_S = 60.0
"""How long a subset of replicas stays wider after the last request that needed it."""


class ChannelOwner(OwnerEvents, Protocol):
    """What a set of channels reports to its owner."""

    def on_members(self) -> None:
        """Replicas have joined or begun to leave; call :meth:`ChannelSet.settle`."""


class ChannelSet:
    """Runs on the ingress's event loop; the channels themselves on ``loop``, by default the same.

    A replica that has left the members keeps its channel until no request runs there. Then the ingress closes
    the channel; otherwise Serve would wait for the open call until the replica's drain timeout. A replica that
    has only left the ingress's subset also keeps its channel, and its requests need not move.
    """

    def __init__(
        self,
        handle: Any,
        owner: ChannelOwner,
        loop: asyncio.AbstractEventLoop | None = None,
        background: Background | None = None,
    ) -> None:
        self.cid = secrets.token_hex(8)
        self.fleet = fleet.get_fleet(handle.deployment_id.app_name, handle.deployment_id.name)
        self._handle = handle
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._channel_loop = loop or self._loop
        self._background = background
        self.relay = relay.Relay(owner, self)
        self._epochs = itertools.count(1)
        self._channels: dict[str, IngressChannel] = {}
        self._past_defects = 0  # of channels that no longer exist
        self._leaving: dict[str, float] = {}  # since when
        self._surplus: set[str] = set()  # no longer in the subset
        self._narrowing: asyncio.TimerHandle | None = None
        self._opening_since = -math.inf  # while requests wait
        self._stopped = False
        self.fleet.listen(self._members_from_router)

    def present(self) -> Collection[str]:
        """Replicas with a channel: the members, and those that are leaving."""
        return self._channels.keys()

    def was_lost(self, replica: str, drain_timeout_s: float) -> bool:
        """Whether a replica whose channel has ended died, whatever the controller reports at that time.

        If it did not, the channel was closed here, or the replica was told to stop and its time is over.
        """
        if replica not in self._channels:
            return False
        since = self._leaving.get(replica)
        return since is None or self._loop.time() - since < drain_timeout_s

    def opening(self) -> bool:
        """Whether a member has neither answered nor failed yet."""
        return any(
            not channel.answered for replica, channel in self._channels.items() if replica not in self._leaving
        )

    def widen(self, waited_s: float) -> None:
        """Double the subset, of which no replica can run a waiting request; it narrows after ``WIDE_S``.

        Requests have waited for ``waited_s``. Nothing happens while some replicas have not answered yet,
        because they may be able to. Requests wait for them for ``DEAD_S`` at most, even if hanging replicas are
        replaced.
        """
        now = self._loop.time()
        if self.opening():
            if self._opening_since < now - waited_s:  # earlier requests waited then
                self._opening_since = now
            if now - self._opening_since < DEAD_S:
                return
        self._opening_since = -math.inf
        if not self.fleet.widen_subset():
            return
        if self._narrowing is not None:
            self._narrowing.cancel()
        self._narrowing = self._loop.call_later(WIDE_S, self.fleet.narrow_subset)

    def routable(self, requirement: Requirement | None = None) -> bool:
        """Whether any replica can take a request, or one with this requirement, now."""
        return bool(self.fleet.ledger.routable(self.fleet.members, requirement))

    def lacks_connection(self, replica: str) -> bool:
        """Whether a replica's open channel has no connection of its own, so nothing can be submitted there."""
        channel = self._channels.get(replica)
        return channel is not None and channel.is_open and not channel.connected

    def unconnected(self) -> list[str]:
        """Replicas that can be called only through Serve."""
        return list(filter(self.lacks_connection, self._channels))

    def submit(self, route: Route, attempt: int, submission: bytes) -> None:
        """Submit an attempt; if it ends without a final record, the owner's ``on_answer`` is called."""
        if (channel := self._channels.get(route.replica)) is not None:
            channel.submit(route.epoch, attempt, submission)
        else:
            self._owner.on_answer(route, attempt, {"refused": "its channel has ended"})

    def states(self) -> dict[str, str]:
        """The state of each channel, by replica."""
        return {replica: channel.state.value for replica, channel in self._channels.items()}

    @property
    def defects(self) -> int:
        """Errors in all channels, past and present, for reasons other than the connection."""
        return self._past_defects + sum(channel.defects for channel in self._channels.values())

    @property
    def num_members(self) -> int:
        """Replicas with a channel that are not leaving."""
        return len(self._channels) - len(self._leaving)

    def leaving(self) -> Mapping[str, float]:
        """Replicas that have left the members and still have a channel, and since when on the loop's clock."""
        return self._leaving

    def settle(self) -> None:
        """Close channels of leaving replicas on which no attempt is booked; call after one has ended."""
        closing = self._leaving.keys() | self._surplus
        if not closing:
            return
        for replica in closing - self.fleet.ledger.booked(closing):
            self._leaving.pop(replica, None)
            self._surplus.discard(replica)
            channel = self._channels.pop(replica)
            self._past_defects += channel.defects
            channel.stop()
            self.fleet.pin(replica, False)

    async def stop(self) -> None:
        """Close every channel."""
        self.fleet.unlisten(self._members_from_router)
        self._stopped = True
        channels = list(self._channels.values())
        self._channels.clear()
        self._leaving.clear()
        self._surplus.clear()
        if self._narrowing is not None:
            self._narrowing.cancel()
        for channel in channels:
            channel.stop()
        for channel in channels:
            await channel.stopped()
            self.fleet.pin(channel.replica, False)

    # ---- what the relay says of a channel that may have ended

    def forget(self, route: Route, attempts: list[int]) -> None:
        """See ``relay.Channels``."""
        if (channel := self._channels.get(route.replica)) is not None:
            channel.forget(route.epoch, attempts)

    def end_sequence(self, route: Route, attempt: int, sequence: int) -> None:
        """Tell the engine to end one sequence of an attempt."""
        if (channel := self._channels.get(route.replica)) is not None:
            channel.end_sequence(route.epoch, attempt, sequence)

    def resync(self, route: Route) -> None:
        """See ``relay.Channels``."""
        if (channel := self._channels.get(route.replica)) is not None:
            channel.resync(route.epoch)

    def fail(self, route: Route, reason: str) -> None:
        """See ``relay.Channels``."""
        if (channel := self._channels.get(route.replica)) is not None:
            channel.fail(route.epoch, reason)

    def resume(self, route: Route, claims: Sequence[AttemptClaim]) -> None:
        """See ``relay.Channels``."""
        if (channel := self._channels.get(route.replica)) is not None:
            channel.resume(route.epoch, claims)

    def _members_from_router(self, members: frozenset[str]) -> None:
        """Called on the router's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process is ending
            self._loop.call_soon_threadsafe(self._update, members, context=contextvars.Context())

    def _update(self, members: frozenset[str]) -> None:
        if self._stopped:  # the router's last call was on its way
            return
        for replica in members - self._channels.keys():
            self.fleet.pin(replica, True)
            self._channels[replica] = IngressChannel(
                self._handle,
                self.cid,
                replica,
                lambda: next(self._epochs),
                self.relay,
                loop=self._channel_loop,
                background=self._background,
            )
        now = self._loop.time()
        known = members | self.fleet.known
        self._leaving = {replica: self._leaving.get(replica, now) for replica in self._channels.keys() - known}
        self._surplus = set(self._channels.keys() - members - self._leaving.keys())
        self._owner.on_members()
