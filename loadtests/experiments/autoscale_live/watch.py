"""Looks at Serve's controller and at the engines, ten times a second, while things happen."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve._private.common import ReplicaState
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from app.launch import serving
from loadtests.cluster import LocalCluster, gone

INTERVAL_S = 0.1
ANSWER_LIMIT_S = 3.0


@dataclass(frozen=True, slots=True)
class ServeLook:
    """What the controller says of the engine deployment, and when (``time.perf_counter``) it had said so."""

    at: float
    target: int
    states: dict[str, str]  # of each replica
    ended: frozenset[str]  # replicas seen in earlier looks whose processes are gone

    @property
    def running(self) -> frozenset[str]:
        """Replicas that take requests."""
        return frozenset(name for name, state in self.states.items() if state == "RUNNING")


@dataclass(frozen=True, slots=True)
class EngineLook:
    """Sums over the engines; ``at`` is when they were asked."""

    at: float
    waiting: int
    preemptions: int


class Watch:
    """Two threads that look, each of which remembers all it saw; ``start`` to ``stop``."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._stopping = threading.Event()
        self._pids: dict[str, int] = {}
        self._threads = [
            threading.Thread(target=self._repeat, args=(look,), name="watch", daemon=True)
            for look in (self._look_at_serve, self._look_at_engines)
        ]
        self.serve: list[ServeLook] = []
        self.engines: list[EngineLook] = []

    def start(self) -> None:
        """Begin to look."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=10.0)

    def _repeat(self, look: Callable[[float], None]) -> None:
        while not self._stopping.is_set():
            began = time.perf_counter()
            # A controller or a replica that does not answer at the moment is asked again.
            with contextlib.suppress(RayError, RayServeException, TimeoutError):
                look(began)
            self._stopping.wait(max(INTERVAL_S - (time.perf_counter() - began), 0.0))

    def _look_at_serve(self, _: float) -> None:
        engine = engine_details()
        if engine is None:
            return
        for replica in engine["replicas"]:
            if replica.get("pid"):
                self._pids[replica["replica_id"]] = replica["pid"]
        ended = frozenset(name for name, pid in self._pids.items() if gone(pid))
        states = {replica["replica_id"]: ReplicaState(replica["state"]).value for replica in engine["replicas"]}
        self.serve.append(ServeLook(time.perf_counter(), engine["target_num_replicas"], states, ended))

    def _look_at_engines(self, at: float) -> None:
        states = self._cluster.inspect()
        waiting, preemptions = (sum(state[key] for state in states) for key in ("waiting", "preemptions"))
        self.engines.append(EngineLook(at, waiting, preemptions))


def engine_details() -> dict[str, Any] | None:
    """What the controller knows of the engine deployment; ``None`` before it knows any.

    Raises:
        RayError: it does not answer.
    """
    asked = _get_global_client()._controller.get_serve_instance_details.remote()
    application = ray.get(asked, timeout=ANSWER_LIMIT_S)["applications"].get(serving.APP_NAME)
    deployments: dict[str, dict[str, Any]] = application["deployments"] if application else {}
    return deployments.get("engine")


def kill_controller() -> None:
    """End the process of Serve's controller; Ray starts another one."""
    ray.kill(_get_global_client()._controller, no_restart=False)
