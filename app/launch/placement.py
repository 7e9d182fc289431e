"""Where engine replicas fit: what one asks of Ray, and whether a cluster has it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from app.config import AppConfig
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

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
    """Engine replicas that share a node, at most, if they are spread evenly and there are as many as may be."""
    usable = _usable(options, nodes)
    share = math.ceil(options.most_replicas / max(len(usable), 1))
    if usable and wants_gpu(options, nodes):
        # Others start on nodes that have yet to join.
        share = min(share, max(math.ceil(node["GPU"]) for node in usable))
    return share


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

    Of those that only demand brings, a lack is logged: Ray's autoscaler may add nodes by then.

    Raises:
        ConfigError: there are fewer than replicas at first.
    """
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    if not nodes or not wants_gpu(options, nodes) or gpus >= options.most_replicas:
        return
    lack = f"each engine replica takes one GPU, but the cluster has {gpus}"
    if gpus >= options.first_replicas:
        logger.warning(
            "max_replicas is %d and %s: more than that start only once other nodes have joined",
            options.most_replicas,
            lack,
        )
        return
    if options.scales:
        cure = (
            f"set max_replicas to {gpus} and engine_replicas to at most that" if gpus else "set device to cpu"
        )
        number = (
            f"there are to be {options.first_replicas} engine replicas at first (engine_replicas, min_replicas)"
        )
    else:
        cure = f"set engine_replicas to {gpus}" if gpus else "set device to cpu"
        number = f"engine_replicas is {options.engine_replicas}"
    raise ConfigError(f"{number} and {lack}; {cure}, or let more nodes with GPUs join first")


def check_cpus(options: AppConfig, nodes: Sequence[Resources]) -> None:
    """Whether ``nodes`` have the processors that the engine replicas ask for, as many as there may be.

    Raises:
        ConfigError: some replica would never start.
    """
    each = actor_options(options, nodes)["num_cpus"]
    if not each:
        return
    room = sum(math.floor(node["CPU"] / each + 1e-9) for node in _usable(options, nodes))
    if room < options.most_replicas:
        raise ConfigError(
            f"there are processors for {room} of {options.most_replicas} engine replicas with {each:g} CPUs "
            f"each; lower {options.replicas_option} or engine_cpus"
        )


def _usable(options: AppConfig, nodes: Sequence[Resources]) -> list[Resources]:
    """Nodes that can hold a replica: a head that is there for Ray alone has no CPU."""
    gpu = wants_gpu(options, nodes)
    return [node for node in nodes if node.get("CPU", 0) > 0 and (not gpu or node.get("GPU", 0) > 0)]
