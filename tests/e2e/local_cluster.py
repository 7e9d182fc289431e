"""The cluster of the end-to-end tests: its engines can be broken from inside, too."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from paced_model import CONTEXT, SLOW_S, slow_steps
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from app.launch import serving
from app.launch.port_block import PortBlock
from loadtests.client import INSTANCE, MODEL
from loadtests.cluster import SLOW_POLL_S, START_TIMEOUT_S, LocalCluster, wait_for

OPTIONS: dict[str, Any] = {
    "dtype": "float32",  # moved requests then give the same text to the letter
    "kv_memory": "256MiB",
    "engine_cpus": 1,
    "threads": 1,
    "speculation": 0,  # a stream that guesses its own repetitions would be over before it is disturbed
    "engine_replicas": 2,
    "check_invariants": True,
    "tenant_header": "x-tenant",
    "admin_routes": True,
    "max_lag_s": 60,  # a busy machine is no overload
    "unavailable_after_s": 600,  # nor does an engine that starts slowly there refuse anything
}
"""Of most tests' application."""


SHORT_OF_MEMORY: dict[str, Any] = {
    "engine_replicas": 1,
    "num_blocks": 16,
    # Room to swap to for a few of the preempted requests only: the others are computed again.
    "recovery": "swap",
    "swap_space": "192KiB",
}
"""Of one engine that holds little, instead of those above."""


BUDGET = 256
"""Tokens of a step: a long prompt takes many of them."""


def paced_options(model: Path) -> dict[str, Any]:
    """The same for the folder ``model``, which holds a paced model, whose KV takes little."""
    own = {"model": str(model), "served_model_name": MODEL, "max_model_len": CONTEXT, "token_budget": BUDGET}
    return {**OPTIONS, "kv_memory": "64MiB", **own}


SOON_S = 300.0
"""Until which something must have come about, however busy the machine is; usually it takes a second."""


NODE_TRIES = 3
"""To start a node: Ray gives up one that takes more than 30 s, and has no option for that."""


class BreakableCluster(LocalCluster):
    """Serves ``breakable_application``."""

    def __init__(self) -> None:
        super().__init__("breakable_application:build", [Path(__file__).parent])
        self._wanted = (0, 0)  # engine and ingress replicas, as Serve was last told

    @classmethod
    def started(cls) -> BreakableCluster:
        """One with Ray and Serve; see ``NODE_TRIES``."""
        for left in reversed(range(NODE_TRIES)):
            cluster = cls()
            try:
                cluster.start()
                break
            except Exception as error:
                cluster.stop()
                if not left or "timed out during startup" not in str(error):
                    raise
        return cluster

    def deploy(self, **options: Any) -> None:
        """See ``LocalCluster.deploy``."""
        self._wanted = (options.get("engine_replicas", 1), 1)
        super().deploy(**options)

    def scale(self, replicas: int | None = None, ingresses: int = 1) -> None:
        """See ``LocalCluster.scale``; by default there stay as many engine replicas."""
        self._wanted = (self._wanted[0] if replicas is None else replicas, ingresses)
        super().scale(*self._wanted)

    def stop(self) -> None:
        """See ``LocalCluster.stop``; no client is left for whom an ingress would answer some seconds more."""
        for pid in self.ingress_pids():
            with contextlib.suppress(ProcessLookupError):
                self.kill(pid)
        super().stop()

    def ensure(self, **options: Any) -> None:
        """Deploy, unless exactly that is deployed already, and wait until what was before is gone."""
        if self.options != options:
            self.deploy(**options)
        wait_for(self.alone, SOON_S, "there are other replicas than those that run", SLOW_POLL_S)

    def settle(self, replicas: int) -> None:
        """Have exactly this many engines and one ingress, all idle, whatever was before, and no others."""
        if self._wanted != (replicas, 1):
            self.scale(replicas)

        def settled() -> bool:
            health = self.health()
            return (
                health.get("routable") == health.get("replicas") == replicas
                and health.get("live_requests") == 0
                and self.alone()
                and len(self.channels()) == len(self.engine_pids()) == replicas
                and len(self.ingress_pids()) == self.proxied() == 1
                and self.idle()
            )

        wait_for(settled, SOON_S, f"there are not {replicas} idle replicas, all routable", 0.2)

    def proxied(self) -> int:
        """To how many ingresses HAProxy sends requests; it hears of a new one from Serve, in its own time."""
        try:
            rows = self.proxy_stats()
        except (OSError, ValueError):  # it has just reloaded
            return 0
        return sum(row["svname"].startswith("SERVE_REPLICA") and row["status"] == "UP" for row in rows)

    def alone(self) -> bool:
        """Whether the replicas that run, by Serve's account, are all whose processes are there.

        Serve may still count one that a test has killed, and then stop a live one in its place. A process may
        still answer although Serve has told it to stop, an ingress for seconds.
        """
        states = self._replica_states()
        pids = {"engine": self.engine_pids(), "ingress": self.ingress_pids()}
        return states == {kind: dict.fromkeys(pids[kind], "RUNNING") for kind in pids}

    def _replica_states(self) -> dict[str, dict[int | None, str]]:
        """The state of each replica that Serve's controller knows, by kind and process.

        Not by its status, which says nothing of those that run after a deploy has failed.
        """
        name = serving.APP_NAME

        def states(controller: Any) -> dict[str, dict[int | None, str]]:
            found: dict[str, dict[int | None, str]] = {"engine": {}, "ingress": {}}
            for deployment, state in controller.deployment_state_manager._deployment_states.items():
                if deployment.app_name == name:
                    of = found[deployment.name.partition("-")[0]]
                    of.update((one.pid, one.state.value) for one in state.list_replica_details())
            return found

        answer = _get_global_client()._controller.__ray_call__.remote(states)
        told: dict[str, dict[int | None, str]] = ray.get(answer, timeout=SOON_S)
        return told

    def redeploy_one(self, options: dict[str, Any]) -> None:
        """Deploy, and wait until nothing but one replica with the pool of ``options`` is left."""
        self.deploy(**options)
        pool = ("referenced_blocks", "cached_blocks", "free_blocks")

        def replaced() -> bool:
            pools = [sum(state[part] for part in pool) for state in self.inspect()]
            return pools == [options["num_blocks"]] and self.alone()

        wait_for(replaced, SOON_S, "the replica with the new pool is not alone")
        self.wait_routable(1)

    def health(self) -> dict[str, Any]:
        """See ``LocalCluster.health``; asked again while nothing answers."""
        return wait_for(super().health, START_TIMEOUT_S, "no ingress answers")  # type: ignore[no-any-return]

    def ingresses(self) -> list[dict[str, Any]]:
        """See ``LocalCluster.ingresses``; asked again while one of them does not answer."""
        return wait_for(super().ingresses, SOON_S, "an ingress does not answer")  # type: ignore[no-any-return]

    def inspect(self) -> list[dict[str, Any]]:
        """See ``LocalCluster.inspect``; asked again while this process has not heard that a replica is gone."""

        def states() -> tuple[list[dict[str, Any]]] | None:
            try:
                return (super(BreakableCluster, self).inspect(),)
            except (RayActorError, RayServeException, TimeoutError):
                return None

        (found,) = wait_for(states, SOON_S, "a replica that is gone, or too slow, is still asked")
        return found

    def slow_steps(self, seconds: float = SLOW_S) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """See ``paced_model.slow_steps``."""
        return slow_steps(Path(self.options["model"]), seconds)

    def http(self, **how: Any) -> httpx.Client:
        """A client that takes no other server's answers."""

        def check(response: httpx.Response) -> None:
            assert response.headers.get(INSTANCE) == self.instance

        return httpx.Client(base_url=self.url, timeout=SOON_S, event_hooks={"response": [check]}, **how)

    @contextlib.contextmanager
    def second_node(self) -> Iterator[psutil.Popen]:
        """Another node of this Ray cluster, on this machine, with one CPU and a resource of its own."""
        ports = PortBlock()
        # Ray's own choice for the last one, 10001, may be one of the others here.
        names = ("metrics-export-port", "dashboard-agent-listen-port", "ray-client-server-port")
        taken = {name: ports.take() for name in names}
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            f"--address={ray.get_runtime_context().gcs_address}",
            "--num-cpus=1",
            '--resources={"second": 1}',
            f"--object-store-memory={100 * 2**20}",
            *(f"--{name}={port}" for name, port in taken.items()),
            "--min-worker-port=0",  # any that are free
            "--max-worker-port=0",
            "--disable-usage-stats",
            "--include-log-monitor=false",
            "--block",
        ]
        before = len(ray.nodes())
        with tempfile.TemporaryFile("w+") as log, self._instance.inherited():
            how: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
            start = lambda: psutil.Popen(command, env={**os.environ, "RAY_AUTH_MODE": "token"}, **how)  # noqa: E731
            node, tries = start(), 1

            def joined() -> bool:
                nonlocal node, tries
                if node.poll() is not None:
                    log.seek(0)
                    if tries == NODE_TRIES:
                        raise RuntimeError(log.read())
                    node, tries = start(), tries + 1
                return len(ray.nodes()) > before

            try:
                wait_for(joined, SOON_S, "the second node does not join")
                yield node
            finally:
                kill_all(node)
                ports.release()

    def logs(self) -> list[Path]:
        """What the processes of the replicas have written."""
        return list(Path(self._instance.ray_folder).glob("session_latest/logs/worker-*.err"))

    def tell(self, replica: str, order: str, *how: Any) -> Any:
        """Call a method of one ``BreakableReplica``, which does it harm."""
        handle = serve.get_deployment_handle("engine", serving.APP_NAME)
        return getattr(handle, order).remote(*how, target=replica).result(timeout_s=SOON_S)


def kill_all(process: psutil.Popen) -> None:
    """As when a machine is switched off: a process and all that it has started, at once."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait(30)


EVENLY = {"routing": "least_tokens"}
"""Each engine gets some of the streams, whatever the router remembers of what was done to the others."""


def deploy_evenly(cluster: BreakableCluster, model: Path) -> None:
    """The paced ``model`` on two replicas."""
    cluster.ensure(**paced_options(model), **EVENLY)
    cluster.settle(2)
