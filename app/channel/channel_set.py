"""The channels of one ingress process, one to each engine replica."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import secrets
from collections.abc import Callable, Collection
from typing import Any, Protocol

from app.channel.ingress_channel import ChannelEvents, IngressChannel
from app.routing import fleet


class ChannelOwner(ChannelEvents, Protocol):
    """What a set of channels reports to its owner."""

    def on_members(self) -> None:
        """Replicas have joined or begun to leave; call :meth:`ChannelSet.settle`."""


class ChannelSet:
    """Runs on the ingress's event loop.

    A replica that has left the members keeps its channel until none of its requests run: they move as soon as
    another replica is routable. Then the ingress closes the channel. If it did not, Serve would wait for the
    open call until the replica's drain timeout.
    """

    def __init__(self, handle: Any, owner: ChannelOwner) -> None:
        self.cid = secrets.token_hex(8)
        self.fleet = fleet.get_fleet(handle.deployment_id.app_name, handle.deployment_id.name)
        self._handle = handle
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._epochs = itertools.count(1)
        self._channels: dict[str, IngressChannel] = {}
        self._leaving: set[str] = set()
        self.fleet.listen(self._members_from_router)

    def known(self, replica: str) -> bool:
        """Whether the replica is a member, and not leaving."""
        return replica in self._channels and replica not in self._leaving

    def routable(self) -> bool:
        """Whether any replica can take a request now."""
        return bool(self.fleet.ledger.routable(self.fleet.members))

    def states(self) -> dict[str, str]:
        """The state of each channel, by replica."""
        return {replica: channel.state.value for replica, channel in self._channels.items()}

    @property
    def num_members(self) -> int:
        """Replicas that are not leaving."""
        return len(self._channels) - len(self._leaving)

    def settle(self, replicas_in_use: Callable[[], Collection[str]]) -> Collection[str]:
        """Close channels of leaving replicas if possible; call after a route or an attempt has changed.

        ``replicas_in_use`` returns the replicas with a live attempt; it is called only if that matters. The
        caller must move the requests of the returned replicas, whose channels are closing, to others.
        """
        if not self._leaving:
            return ()
        done = set(self._leaving)
        if not self.routable():
            done -= set(replicas_in_use())
        self._leaving -= done
        for replica in done:
            self._channels.pop(replica).stop()
            self.fleet.pin(replica, False)
        return done

    async def stop(self) -> None:
        """Close every channel."""
        self.fleet.unlisten(self._members_from_router)
        channels = list(self._channels.values())
        self._channels.clear()
        self._leaving.clear()
        for channel in channels:
            channel.stop()
        for channel in channels:
            await channel.stopped()
            self.fleet.pin(channel.replica, False)

    def _members_from_router(self, members: frozenset[str]) -> None:
        """Called on the router's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process is ending
            self._loop.call_soon_threadsafe(self._update, members, context=contextvars.Context())

    def _update(self, members: frozenset[str]) -> None:
        for replica in members - self._channels.keys():
            self.fleet.pin(replica, True)
            self._channels[replica] = IngressChannel(
                self._handle, self.cid, replica, lambda: next(self._epochs), self._owner
            )
        self._leaving = set(self._channels) - members
        self._owner.on_members()
