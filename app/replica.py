"""The engine deployment: one engine per replica, with its channels and requests."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import ray

from app import config, garbage, logs
from app.background import Background
from app.channel import wire
from app.channel.channel_hub import ChannelHub
from app.channel.channel_server import ChannelServer
from app.channel.engine_attempt import request_of, run_attempt
from app.channel.engine_calls import EngineCalls
from app.channel.wire_sections import Figures
from app.config import ServedModel
from app.deployment_version import version_of
from app.disk_room import NodeRoom, session_folder
from app.launch import placement
from app.launch.model_store import resolve
from app.launch.serving import full_shm_warning
from app.metrics.engine_figures import engine_samples
from app.metrics.ray_export import EVERY_S, RayExport
from app.metrics.samples import Samples, pack
from app.metrics.table import Source
from app.replica_stats import StatsReporter
from app.routing.requirement import Build
from app.watchdog import Watchdog
from engine.engine_thread import EngineThread, StepOutputs
from engine.errors import EngineDeadError
from engine.kv.block_groups import GroupBy
from engine.kv.block_map import BlockMap
from engine.kv.kv_events import KvSnapshot

SWITCH_INTERVAL_S = 0.0005
"""How long the engine's thread may hold the interpreter lock; with Python's default of 5 ms, frames wait."""

LAST_FRAMES_S = 0.05
"""In which channels send what they still have before their replica stops."""

logger = logging.getLogger(__name__)


class EngineReplica(EngineCalls):
    """Owns the engine thread; everything else runs on this replica's event loop.

    The calls of an ingress: ``channel`` (one for each ingress process, for as long as it lives),
    ``beat``, ``reset_prefix_cache`` and ``block_map``; and ``generate``, one for each attempt, open until it
    ends, where attempts do not take the channel's connection. ``target`` and ``meta`` are read by the router,
    which leaves ``{"epoch": epoch}`` of ``meta``.
    """

    async def __init__(self, model: ServedModel) -> None:  # type: ignore[misc]  # Serve awaits it
        """Returns once the engine has loaded, in a thread: for large models that takes minutes.

        Raises:
            ConfigError: the model cannot be served with these options.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        options = model.options
        self._model = model
        self._live = config.LiveOptions(options, "engine")
        logs.configure(*options.service.logging, logs.replica_name(model.deployment))
        self._loop = asyncio.get_running_loop()
        self._death: BaseException | None = None
        self._engine = engine = await asyncio.to_thread(self._start_engine)
        build = Build(version_of(options, "engine", type(self)), time.time())
        self._server = ChannelServer(
            lambda cid, epoch, payload: self.generate(cid, payload, meta={"epoch": epoch})
        )
        await self._listen()
        hello = wire.Hello.of(engine.limits, engine.key_scheme, engine.window, engine.identity, build)
        self._hub = ChannelHub(
            hello,
            self._engine.abort,
            snapshot=self._snapshot,
            load=self._engine.load(),
            figures=self._figures,
            end_sequence=self._engine.end_sequence,
            server=self._server,
        )
        self._metrics = RayExport(Source.ENGINE)
        node = ray.get_runtime_context().get_node_id()
        self._scaling = StatsReporter(node, placement.on_head(node))
        self._background = Background()
        self._room = NodeRoom(session_folder(), logger.warning)
        if warning := full_shm_warning():  # only here is known what Serve's controller was started with
            logger.warning("%s", warning)
        self._looking = self._background.start("disk room", self._room.run())
        self._reporter = self._background.start("metrics", self._report())
        self._watchdog = Watchdog(self._engine, self._hub, options.service.stuck_after_s)
        self._watching = self._background.start("watchdog", self._watchdog.run())
        garbage.keep_all()  # torch is large: to look at all of it again would stop every stream for 0.14 s
        self._frozen_objects = gc.get_freeze_count()  # to count them takes 25 ms

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve at startup and whenever ``user_config`` changes."""
        service = self._live.update(user_config).service
        logs.configure(*service.logging, logs.replica_name(self._model.deployment))
        self._watchdog.stuck_after_s = service.stuck_after_s

    async def channel(
        self, cid: str, epoch: int, resumption: bytes, connects: bool, *, target: str
    ) -> AsyncIterator[bytes]:
        """Tokens of all requests of one ingress process; see ``ChannelHub.stream``."""
        stream = self._hub.stream(cid, epoch, resumption, connects)
        try:
            async for frame in stream:
                yield frame
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def generate(self, cid: str, payload: bytes, *, meta: dict[str, int]) -> dict[str, Any]:
        """Run one attempt; see ``run_attempt``."""
        return await run_attempt(self._hub, self._engine, cid, meta["epoch"], payload)

    async def beat(
        self,
        cid: str,
        epoch: int,
        acknowledged: int,
        stale: list[int],
        unwanted: list[tuple[int, int]],
        resync: bool,
        last: bool,
        *,
        target: str,
    ) -> bool:
        """Lease and acknowledgement; see ``ChannelHub.beat``."""
        return self._hub.beat(cid, epoch, acknowledged, stale, unwanted, resync, last)

    async def reset_prefix_cache(self, *, target: str) -> int:
        """Empty the prefix cache; running requests keep their blocks. Returns how many blocks became free.

        Raises:
            EngineDeadError: the engine's thread has ended.
        """
        return await asyncio.wrap_future(self._engine.reset_prefix_cache())

    async def block_map(self, by: str, keys: list[int], *, target: str) -> BlockMap:
        """What each KV block holds, for the live page; see ``EngineThread.block_map``.

        Raises:
            EngineDeadError: the engine's thread has ended.
        """
        # Not on this loop: of a large pool by prefix it takes 20 ms, in which no frame would leave.
        return await asyncio.to_thread(self._engine.block_map, GroupBy(by), keys, request_of)

    async def check_health(self) -> None:
        """Called by Serve's controller, which replaces this replica after three failures.

        Raises:
            EngineDeadError: the engine's thread has ended or is stuck.
            BackgroundError: a background task has failed.
        """
        if self._death is not None or not self._engine.is_alive():
            raise EngineDeadError(f"the engine's thread has ended: {self._death}")
        if self._watchdog.stuck:
            raise EngineDeadError(self._watchdog.stuck)
        self._background.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve for the scaling policy, four times per report that it sends; see ``ReplicaStats``.

        Raises:
            EngineDeadError: the engine's thread has ended; the policy then misses this report.
        """
        return self._scaling.read(self._engine.stats(), self._engine.load())._asdict()

    async def wake(self, *, wait: bool) -> bool:
        """Does nothing; the call is answered once there is a replica. See ``app.fleet.scale_from_zero``."""
        return wait

    async def inspect(self, *, target: str | None = None) -> dict[str, Any]:
        """State for tests and debugging, by Serve handle only."""
        stats = self._engine.stats()
        return {
            "replica": ray.serve.get_replica_context().replica_id.unique_id,
            "pid": os.getpid(),
            "frozen_objects": self._frozen_objects,
            "live_requests": self._engine.num_live,
            "referenced_blocks": stats.scheduler.referenced_blocks,
            "cached_blocks": stats.scheduler.cached_blocks,
            "free_blocks": stats.scheduler.free_blocks,
            "running": stats.scheduler.running,
            "waiting": stats.scheduler.waiting,
            "swapped": stats.scheduler.swapped,
            "steps": stats.steps,
            "turned_at": self._engine.turned_at,
            "generated_tokens": stats.scheduler.generated_tokens,
            "preemptions": stats.scheduler.preemptions,
            "recoveries": {kind.value: count for kind, count in stats.scheduler.recovery.finished.items()},
            "host_blocks_used": stats.scheduler.host_blocks_used,
            "channels": self._hub.inspect(),
            "kept_attempts": self._hub.num_kept,
        }

    async def __del__(self) -> None:
        """Serve calls this after the drain."""
        for task in ("_looking", "_reporter", "_watching"):
            if hasattr(self, task):
                getattr(self, task).cancel()
        if hasattr(self, "_hub"):
            self._hub.close_all("the replica is stopping")
            await asyncio.sleep(LAST_FRAMES_S)
        if hasattr(self, "_server"):
            self._server.stop()
        if hasattr(self, "_engine"):
            await asyncio.to_thread(self._engine.stop, timeout=5.0)

    async def _listen(self) -> None:
        """Accept the channels' connections, which are not encrypted: not where Ray encrypts its own."""
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):  # as Ray reads it
            logger.info("channels keep to Ray Serve's connections, which RAY_USE_TLS encrypts")
            return
        host = ray.util.get_node_ip_address()
        try:
            await self._server.start(host)
        except OSError as error:
            logger.warning("channels keep to Ray Serve's connections, which cost more CPU time: %s", error)

    def _start_engine(self) -> EngineThread:
        options = self._model.options
        nodes = placement.cluster_nodes()
        engine = EngineThread(
            options.engine_config(
                str(resolve(options.service.model)),
                placement.threads_of_an_engine(self._model, nodes),
                placement.engines_on_a_node(self._model, nodes),
            ),
            self._on_outputs,
            self._on_death,
        )
        engine.start()
        return engine

    async def _snapshot(self) -> KvSnapshot | None:
        return await asyncio.wrap_future(self._engine.kv_snapshot())

    def _on_outputs(self, outputs: StepOutputs) -> None:
        """On the engine's thread, once a step."""
        self._loop.call_soon_threadsafe(self._hub.on_step, outputs)

    def _on_death(self, error: BaseException) -> None:
        """On the engine's thread, at its end."""
        self._death = error
        self._loop.call_soon_threadsafe(self._hub.close_all, f"the engine died: {error}")

    def _samples(self) -> Samples:
        stats = self._engine.stats()
        scaling = self._scaling.read(stats, self._engine.load())
        return engine_samples(stats, scaling, self._hub.lost_leases, self._room.free)

    def _figures(self) -> Figures | None:
        """What the channels send to the ingresses; they are about to end if the engine has died."""
        try:
            return Figures(tuple(pack(self._samples())))
        except EngineDeadError:
            return None

    async def _report(self) -> None:
        while self._engine.is_alive():
            self._metrics.update(self._model.name, self._samples())
            await asyncio.sleep(EVERY_S)
