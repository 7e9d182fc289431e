"""The cluster of the end-to-end tests: its engines can be broken from inside, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from ray import serve

from app.launch import serving
from loadtests.client import INSTANCE
from loadtests.cluster import LocalCluster, wait_for

OPTIONS: dict[str, Any] = {
    "dtype": "float32",  # moved requests then give the same text to the letter
    "kv_memory": "256MiB",
    "engine_cpus": 1,
    "threads": 1,
    "engine_replicas": 2,
    "check_invariants": True,
    "tenant_header": "x-tenant",
    "admin_routes": True,
}
"""Of most tests' application."""

SOON_S = 150.0
"""Until which something must have come about, however busy the machine is; usually it takes a second."""


class BreakableCluster(LocalCluster):
    """Serves ``breakable_application``."""

    def __init__(self) -> None:
        super().__init__("breakable_application:build", [Path(__file__).parent])

    def ensure(self, **options: Any) -> None:
        """Deploy, unless exactly that is deployed already."""
        if self.options != options:
            self.deploy(**options)

    def redeploy_one(self, options: dict[str, Any]) -> None:
        """Deploy, and wait until nothing but one replica with the pool of ``options`` is left."""
        self.deploy(**options)
        pool = ("referenced_blocks", "cached_blocks", "free_blocks")

        def replaced() -> bool:
            return [sum(state[part] for part in pool) for state in self.inspect()] == [options["num_blocks"]]

        wait_for(replaced, SOON_S, "the replica with the new pool is not alone")
        self.wait_routable(1)

    def http(self, **how: Any) -> httpx.Client:
        """A client that takes no other server's answers."""

        def check(response: httpx.Response) -> None:
            assert response.headers.get(INSTANCE) == self.instance

        return httpx.Client(base_url=self.url, timeout=120, event_hooks={"response": [check]}, **how)

    def break_engine(self, replica: str) -> None:
        """Make the loop of a replica's engine raise."""
        handle = serve.get_deployment_handle("engine", serving.APP_NAME)
        handle.break_engine.remote(target=replica).result(timeout_s=30)

    def cut_channels(self, replica: str) -> None:
        """End the channels of a replica; both their ends live."""
        handle = serve.get_deployment_handle("engine", serving.APP_NAME)
        handle.cut_channels.remote(target=replica).result(timeout_s=30)

    def stick_engine(self, replica: str) -> None:
        """Make a step of a replica's engine never end."""
        handle = serve.get_deployment_handle("engine", serving.APP_NAME)
        handle.stick_engine.remote(target=replica).result(timeout_s=30)
