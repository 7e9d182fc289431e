"""What channels to many idle replicas cost one process: ``python -m tests.replicas_carried [NUMBER ...]``.

Real Ray Serve and the real channels. As a machine has room for few engines, many channels go to each of two.
Each has a client id of its own, so it gets a frame and sends a beat a second, like one to a replica of its own.
The process that opens them stands for an ingress.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
from ray import serve
from tqdm import tqdm

from app.channel import wire
from app.channel.channel_thread import ChannelThread, routers_loop
from app.channel.ingress_channel import ChannelState, IngressChannel
from app.channel.wire_resume import AttemptClaim
from app.channel.wire_sections import Figures, KvSection
from app.launch import serving
from app.routing.fleet import get_fleet
from app.routing.load import LoadReport
from app.routing.replica_state import Route
from loadtests.cluster import LocalCluster, wait_for
from loadtests.experiments.fleet import OPTIONS, START_LIMIT_S, started

NUMBERS = (100, 200, 500, 1000)
SETTLE_S, MEASURED_S = 5.0, 15.0
EVERY_S = 0.01
"""Between the openings of two channels."""


class Listener:
    """Hears of everything that comes and does nothing with it."""

    frames = 0

    def on_open(self, route: Route, hello: wire.Hello, ended: Route | None) -> None: ...

    def on_broken(self, route: Route) -> list[AttemptClaim]:
        return []

    def on_answer(self, route: Route, attempt: int, outcome: dict[str, Any]) -> None: ...

    def on_records(self, route: Route, records: list[wire.Record]) -> list[int]:
        return []

    def on_kv(self, route: Route, section: KvSection) -> bool:
        return True

    def on_load(self, route: Route, load: LoadReport) -> None: ...

    def on_figures(self, route: Route, figures: Figures) -> None: ...

    def on_suspect(self, route: Route, suspected: bool) -> None: ...

    def on_closed(self, route: Route, reason: str, fault: bool) -> None: ...

    def on_frame_end(self, done: Callable[[], None]) -> None:
        self.frames += 1
        done()


class Channels:
    """So many channels to the replicas of ``cluster``."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._handle = serve.get_deployment_handle("engine", serving.APP_NAME)
        self._replicas = [state["replica"] for state in cluster.inspect()]
        for replica in self._replicas:
            get_fleet(serving.APP_NAME).pin(replica, True)
        self._thread = ChannelThread(routers_loop())
        self._epochs = itertools.count(1)
        self._channels: list[IngressChannel] = []
        self.listener = Listener()

    def open(self, number: int) -> None:
        """Open more, until there are ``number`` in all."""
        for place in range(len(self._channels), number):
            replica = self._replicas[place % len(self._replicas)]
            channel = IngressChannel(
                self._handle,
                f"carried-{place}",
                replica,
                lambda: next(self._epochs),
                self.listener,
                clock=time.monotonic,
                loop=self._thread.loop,
            )
            self._channels.append(channel)
            time.sleep(EVERY_S)
        wait_for(lambda: self.count(ChannelState.OPEN) == number, START_LIMIT_S, "not all channels open")

    def count(self, state: ChannelState) -> int:
        return sum(channel.state is state for channel in self._channels)

    def stop(self) -> None:
        for channel in self._channels:
            channel.stop()
        time.sleep(1.0)  # their last beats leave
        self._thread.stop()


def measure(channels: Channels, number: int, engines: list[psutil.Process]) -> str:
    """A row of the table, once ``number`` channels are open."""

    def used() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in (psutil.Process(), *engines)]

    channels.open(number)
    time.sleep(SETTLE_S)
    frames, before, began = channels.listener.frames, used(), time.monotonic()
    time.sleep(MEASURED_S)
    seconds = time.monotonic() - began
    own, *theirs = ((after - b) / seconds for after, b in zip(used(), before, strict=True))
    came = (channels.listener.frames - frames) / seconds
    silent = number - channels.count(ChannelState.OPEN)
    each = [
        f"{1e3 * own / number:.2f}",
        f"{came / number:.2f}",
        str(silent),
        f"{1e3 * sum(theirs) / number:.2f}",
    ]
    return f"| {number:,} | {own:.2f} | {' | '.join(each)} |\n"


def main() -> None:
    numbers = [int(word) for word in sys.argv[1:]] or list(NUMBERS)
    with started("loadtests.experiments.timed_application:build") as cluster:
        cluster.deploy(**OPTIONS)
        channels = Channels(cluster)
        engines = [psutil.Process(pid) for pid in cluster.engine_pids()]
        rows = [measure(channels, number, engines) for number in tqdm(sorted(numbers), unit="number")]
        channels.stop()
    sys.stdout.write("| replicas | of a core | ms/s each | frames/s each | silent | engine, ms/s each |\n")
    sys.stdout.write("".join(["|---|---|---|---|---|---|\n", *rows]))


if __name__ == "__main__":
    main()
