"""Where engine replicas fit: what one asks of Ray, and whether a cluster has it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from app.config import AppConfig
from engine.errors import ConfigError

Resources = Mapping[str, float]

_HEAD = "node:__internal_head__"


def cluster_nodes() -> list[dict[str, float]]:
    """Ray's resources of each living node; none where this process belongs to no cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []


def on_head(node_id: str) -> bool:
    """Whether that node is the one that Ray's head runs on."""
    return any(node["NodeID"] == node_id and _HEAD in node["Resources"] for node in ray.nodes())


def wants_gpu(options: AppConfig, nodes: Sequence[Resources]) -> bool:
    """Whether replicas ask for GPUs: told to, or left the choice on a cluster that has some."""
    if options.device == "auto":
        return any(node.get("GPU", 0) > 0 for node in nodes)
    return options.device.startswith("cuda")


def replicas_on_a_node(options: AppConfig, nodes: Sequence[Resources]) -> int:
    """Engine replicas that share a node, at most, if they are spread evenly."""
    return math.ceil(options.engine_replicas / max(len(_usable(options, nodes)), 1))


def actor_options(options: AppConfig, nodes: Sequence[Resources]) -> dict[str, Any]:
    """What one engine replica asks of Ray.

    Left to itself, each actor asks for one CPU, so that an ingress and two engines never all start on two
    cores. Ours ask for their share of the smallest node: with the ingress at 0 they always fit.
    """
    cpus = options.engine_cpus
    if cpus is None:
        cores = min((node["CPU"] for node in _usable(options, nodes)), default=float(os.cpu_count() or 1))
        share = max(cores, 1.0) / replicas_on_a_node(options, nodes)
        # Rounded down, or the last replica does not fit.
        cpus = int(share) if share >= 1 else math.floor(share * 1000) / 1000
    return {"num_cpus": cpus, **({"num_gpus": 1} if wants_gpu(options, nodes) else {})}


def check_gpus(options: AppConfig, nodes: Sequence[Resources]) -> None:
    """Whether there is a GPU for each engine replica, where each takes one; no ``nodes`` say nothing.

    Raises:
        ConfigError: there are fewer.
    """
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    if nodes and wants_gpu(options, nodes) and gpus < options.engine_replicas:
        cure = f"set engine_replicas to {gpus}" if gpus else "set device to cpu"
        raise ConfigError(
            f"engine_replicas is {options.engine_replicas} and each takes one GPU, but the cluster has {gpus}; "
            f"{cure}, or let more nodes with GPUs join first"
        )


def check_cpus(options: AppConfig, nodes: Sequence[Resources]) -> None:
    """Whether ``nodes`` have the processors that the engine replicas ask for.

    Raises:
        ConfigError: some replica would never start.
    """
    each = actor_options(options, nodes)["num_cpus"]
    if not each:
        return
    room = sum(math.floor(node["CPU"] / each + 1e-9) for node in _usable(options, nodes))
    if room < options.engine_replicas:
        raise ConfigError(
            f"there are processors for {room} of {options.engine_replicas} engine replicas with {each:g} CPUs "
            "each; lower engine_replicas or engine_cpus"
        )


def _usable(options: AppConfig, nodes: Sequence[Resources]) -> list[Resources]:
    """Nodes that can hold a replica: a head that is there for Ray alone has no CPU."""
    gpu = wants_gpu(options, nodes)
    return [node for node in nodes if node.get("CPU", 0) > 0 and (not gpu or node.get("GPU", 0) > 0)]
