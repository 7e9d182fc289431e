"""What the channels of an ingress report, and to whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from app.channel import wire
from app.channel.wire_resume import AttemptClaim
from app.channel.wire_sections import Figures, KvSection
from app.routing.ledger import Route
from app.routing.load import LoadReport


class OwnerEvents(Protocol):
    """What channels report to their owner, through ``app/channel/relay.py``."""

    def on_open(self, route: Route, hello: wire.Hello, ended: Route | None) -> None:
        """The first frame has arrived; the replica is routable.

        ``ended`` is the channel that broke before, if any: those of its attempts that ``hello.resumed`` names
        continue here; the others are lost.
        """

    def on_broken(self, route: Route) -> list[AttemptClaim]:
        """The channel has ended; returns the attempts that are to continue, if the replica can be reached.

        ``on_open`` or ``on_closed`` follows.
        """

    def on_records(self, route: Route, records: list[wire.Record]) -> list[int]:
        """New tokens; returns the attempts in ``records`` that the owner does not know."""

    def on_answer(self, route: Route, attempt: int, outcome: dict[str, Any]) -> None:
        """An attempt that was submitted here has ended without a final record; see ``run_attempt``."""

    def on_kv(self, route: Route, section: KvSection) -> bool:
        """A part of a snapshot of the prefix cache, or a change; false if a new snapshot is needed."""

    def on_load(self, route: Route, load: LoadReport) -> None:
        """The replica's load."""

    def on_figures(self, route: Route, figures: Figures) -> None:
        """What the replica has counted, about once a second."""

    def on_suspect(self, route: Route, suspected: bool) -> None:
        """The replica has become silent, or its frames arrive again."""

    def on_closed(self, route: Route, reason: str, fault: bool) -> None:
        """The channel has ended, and its attempts are lost; ``fault`` unless this process is to blame."""


class ChannelEvents(OwnerEvents, Protocol):
    """What a channel reports, on its own loop. The answer to ``on_broken`` comes with ``resume``."""

    def on_frame_end(self, done: Callable[[], None]) -> None:
        """Call ``done`` once all that was reported before has been handled; then the frame is acknowledged."""
