"""Ray's internal KV carries the news of replicas that will probably be stopped from one process to another."""

from __future__ import annotations

import json
from typing import Any

import ray
from local_cluster import SOON_S, BreakableCluster

from app.autoscaling.publishing import NAMESPACE


def test_what_one_process_writes_there_another_one_reads(bare_cluster: BreakableCluster) -> None:
    namespace = NAMESPACE

    class Ingress:
        def __init__(self) -> None:
            from app.fleet.victim_feed import VictimFeed
            from app.routing.timed_set import TimedSet

            self.feed = VictimFeed("an app", "engine", TimedSet())

        def look(self) -> dict[str, Any]:
            self.feed.poll()
            return self.feed.state()

    def put(seq: int, replicas: list[str]) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        value = json.dumps({"seq": seq, "replicas": replicas, "lasts_s": 60.0})
        _internal_kv_put(b"victims:an app:engine", value.encode(), namespace=namespace)

    remote: Any = ray.remote(num_cpus=0)
    ingress, write = remote(Ingress).remote(), remote(put)

    def look() -> dict[str, Any]:
        state: dict[str, Any] = ray.get(ingress.look.remote(), timeout=SOON_S)
        return state

    assert look() == {"received": 0, "faults": 0, "likely_victims": []}
    ray.get(write.remote(1, ["a", "b"]), timeout=SOON_S)
    assert look() == {"received": 1, "faults": 0, "likely_victims": ["a", "b"]}
    ray.get(write.remote(2, []), timeout=SOON_S)
    assert look() == {"received": 2, "faults": 0, "likely_victims": []}
    ray.kill(ingress)
