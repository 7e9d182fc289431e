"""Placement of engine replicas: what each requests from Ray, and whether the cluster has it."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray._raylet import IMPLICIT_RESOURCE_PREFIX  # type: ignore[attr-defined]
from ray.serve._private.common import ReplicaID

from app.config import AppConfig, ServedModel
from app.option_groups import MAX_REPLICAS, RESOURCE_PARTS
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

Resources = Mapping[str, float]

_HEAD = "node:__internal_head__"

MAX_SURGE_PERCENT = 20
"""As many as Serve replaces at a time."""

ANY_CPU = 0.001
"""What an engine requests by default: a node that has CPUs. A share of them would change with the number of
engines, models or nodes. Serve restarts a replica whose request changes, and waits forever if it finds no room
for it beside the old ones."""


def cluster_nodes() -> list[dict[str, float]]:
    """Ray's resources of each living node; empty if this process belongs to no cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []


def nodes_and_free() -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """``cluster_nodes``, and what is free now of each; from one look, since nodes join and leave."""
    if not ray.is_initialized():
        return [], []
    nodes, free = [node for node in ray.nodes() if node["Alive"]], available_resources_per_node()
    return [node["Resources"] for node in nodes], [free.get(node["NodeID"], {}) for node in nodes]


def running_replicas() -> Counter[str]:
    """Number of replicas by deployment, of every application."""
    if not ray.is_initialized():
        return Counter()
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return Counter(
        ReplicaID.from_full_id_str(name).deployment_id.name for name in names if ReplicaID.is_full_id_str(name)
    )


def on_head(node_id: str) -> bool:
    """Whether that node runs Ray's head."""
    return any(node["NodeID"] == node_id and _HEAD in node["Resources"] for node in ray.nodes())


def wants_gpu(options: AppConfig, nodes: Sequence[Resources]) -> bool:
    """Whether replicas ask for GPUs: by option, or because the cluster has some."""
    if options.engine.device == "auto":
        return any(node.get("GPU", 0) > 0 for node in nodes)
    return options.engine.device.startswith("cuda")


def engines_on_a_node(model: ServedModel, nodes: Sequence[Resources]) -> int:
    """Maximum number of engine replicas on a node with one of ``model``, if each model's are spread evenly."""
    spread = max(len(_usable(model.options, nodes)), 1)
    others = sum(math.ceil(most / spread) for most in model.neighbors)
    return replicas_on_a_node(model.options, nodes) + others


def replicas_on_a_node(options: AppConfig, nodes: Sequence[Resources]) -> int:
    """Maximum number of a model's engine replicas on one node, if they are spread evenly."""
    usable = _usable(options, nodes)
    share = math.ceil(options.scaling.upper_limit / max(len(usable), 1))
    if usable and wants_gpu(options, nodes):
        # Others start on nodes that have yet to join.
        share = min(share, max(math.ceil(node["GPU"]) for node in usable))
    return share


def actor_options(model: ServedModel, nodes: Sequence[Resources]) -> dict[str, Any]:
    """What one engine replica requests from Ray.

    By default, each actor requests one CPU, so an ingress and two engines would never start on two cores. Ours
    request ``ANY_CPU``. Among several nodes, GPUs spread them, and without GPUs ``_place_on_a_node`` does, if
    there is only one model.
    """
    options = model.options
    gpu = wants_gpu(options, nodes)
    asked: dict[str, Any] = {"num_cpus": options.scaling.engine_cpus, **({"num_gpus": 1} if gpu else {})}
    if asked["num_cpus"] is None:
        asked["num_cpus"] = ANY_CPU
        if not gpu and not model.one_of_several and len(_usable(options, nodes)) > 1:
            asked["resources"] = _place_on_a_node(model, nodes)
    return asked


def _place_on_a_node(model: ServedModel, nodes: Sequence[Resources]) -> dict[str, float]:
    """One of as many places as each node has for a model's engines.

    Without them Ray may start an engine where others run already, though another node has none. Each node has
    one of every resource whose name begins with Ray's prefix. The number of places is part of the name, so that
    engines which run, and asked for another one, leave all of these: there is always room beside them.
    """
    places = replicas_on_a_node(model.options, nodes)
    # Rounded down, or the last replica does not fit.
    part = math.floor(RESOURCE_PARTS / places) / RESOURCE_PARTS
    return {f"{IMPLICIT_RESOURCE_PREFIX}{model.deployment}:{places}_per_node": part}


def threads_of_an_engine(model: ServedModel, nodes: Sequence[Resources]) -> int:
    """CPU threads of one engine: by option, else its share of the smallest node's cores, at least 1."""
    scaling = model.options.scaling
    if scaling.threads is not None:
        return scaling.threads
    share = scaling.engine_cpus
    if share is None:
        share = _cores(model.options, nodes) / engines_on_a_node(model, nodes)
    return max(1, int(share))


def surge_percents(
    models: Sequence[ServedModel], nodes: Sequence[Resources], free: Sequence[Resources] | None = None
) -> list[int]:
    """Engine replicas that a deploy may start before it stops old ones, in percent of all; 0: there is no room.

    Without room, Serve stops old replicas first, a fifth at a time. Those that request only ``ANY_CPU`` have
    room for one more on each node; the build has checked the memory (``model_check.py``). ``free`` is what the
    running engines, which may hold more than the new ones request, leave of ``nodes``; by default all.
    """
    percents = []
    for model in models:
        most = model.options.scaling.upper_limit
        spare = _room(model, models, nodes) - most
        if free is not None:
            spare = min(spare, _fit(model, nodes, free))
        if actor_options(model, nodes)["num_cpus"] <= ANY_CPU:
            spare = min(spare, len(_usable(model.options, nodes)))
        percents.append(min(max(100 * spare // most, 1), MAX_SURGE_PERCENT) if spare > 0 else 0)
    return percents


def check_gpus(models: Sequence[ServedModel], nodes: Sequence[Resources]) -> None:
    """Check that there is a GPU for each engine replica that needs one; without ``nodes`` nothing is checked.

    A lack of GPUs beyond the initial replicas is only logged: Ray's autoscaler may add nodes by then.

    Raises:
        ConfigError: there are fewer GPUs than initial replicas.
    """
    on_gpus = [model for model in models if wants_gpu(model.options, nodes)]
    if len(on_gpus) > 1:
        _check_gpus_of_several(on_gpus, nodes)
    elif on_gpus:
        _check_gpus(on_gpus[0].options, nodes)


def _check_gpus_of_several(models: Sequence[ServedModel], nodes: Sequence[Resources]) -> None:
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    first = {model.name: model.options.scaling.initial_replicas for model in models}
    most = sum(model.options.scaling.upper_limit for model in models)
    each = " + ".join(f"{number} of {name}" for name, number in first.items())
    if nodes and gpus < sum(first.values()):
        raise ConfigError(
            f"each engine replica takes one GPU, and the models start with {each}, but the cluster has {gpus}; "
            "lower engine_replicas or min_replicas of some models, set device to cpu for some, or add nodes "
            "with GPUs first"
        )
    if nodes and gpus < most:
        logger.warning(
            "the models may have %d engine replicas with one GPU each, but the cluster has %d; the others "
            "start only once other nodes have joined or other models have stopped theirs",
            most,
            gpus,
        )


def _check_gpus(options: AppConfig, nodes: Sequence[Resources]) -> None:
    scaling = options.scaling
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    if not nodes or not wants_gpu(options, nodes) or gpus >= scaling.upper_limit:
        return
    lack = f"each engine replica takes one GPU, but the cluster has {gpus}"
    if gpus >= scaling.initial_replicas:
        logger.warning(
            "max_replicas is %d and %s; the others start only once other nodes have joined",
            scaling.upper_limit,
            lack,
        )
        return
    if scaling.scales:
        fix = f"set max_replicas to {gpus} and engine_replicas to at most that"
        first = scaling.initial_replicas
        number = f"the initial number of engine replicas (engine_replicas, min_replicas) is {first}"
    else:
        fix = f"set engine_replicas to {gpus}"
        number = f"engine_replicas is {scaling.engine_replicas}"
    fix = fix if gpus else "set device to cpu"
    raise ConfigError(f"{number} and {lack}; {fix}, or let more nodes with GPUs join first")


def check_room(models: Sequence[ServedModel], nodes: Sequence[Resources]) -> None:
    """Check that ``nodes`` have the CPUs and GPUs that the engine replicas ask for, at their maximum number.

    Raises:
        ConfigError: some replica would never start.
    """
    for model in models:
        lack = _lack(model, models, nodes)
        if lack:
            raise ConfigError(lack)


def warn_of_lack(
    models: Sequence[ServedModel],
    nodes: Sequence[Resources],
    free: Sequence[Resources],
    running: Mapping[str, int],
) -> None:
    """Log why a deploy may wait for CPUs or GPUs, and what to change; nodes may still join, so it is no error.

    Without ``nodes`` nothing is known. ``free`` is what is free of ``nodes`` now, ``running`` the number of
    engine replicas by deployment. The number of GPUs that there are has a check of its own.
    """
    if not nodes:
        return
    for model in models:
        scaling = model.options.scaling
        lack = _lack(model, models, _with_gpus(nodes, nodes))
        run, room = running.get(model.deployment, 0), _fit(model, nodes, free)
        if scaling.engine_cpus is None and not _usable(model.options, nodes):
            logger.warning(
                "no node that can hold an engine has joined the cluster, so the engines of this deploy may all "
                "start on the first; let nodes join before the deploy, or set engine_cpus"
            )
        elif lack:
            logger.warning("%s, or add nodes: the others start only once there is room", lack)
        elif run < scaling.initial_replicas - room:
            short, each = _short_of(model, nodes, free)
            of = f" of {model.name}" if model.one_of_several else ""
            if run:
                hint = (
                    "; if engine_cpus has changed, first deploy it with the number of engines that run "
                    f"(engine_replicas={run}), then change the number"
                )
                logger.warning(
                    "%d engine replicas%s run, and there is room now for %d more with %s each, so the deploy "
                    "of %d waits until %s are free%s",
                    run,
                    of,
                    room,
                    each,
                    scaling.initial_replicas,
                    short,
                    hint if short == "CPUs" else "",
                )
            else:
                logger.warning(
                    "there is room now for %d of %d engine replicas%s with %s each, because other deployments "
                    "or applications hold %s; the others start only once these are free",
                    room,
                    scaling.initial_replicas,
                    of,
                    each,
                    short,
                )


def _lack(model: ServedModel, models: Sequence[ServedModel], nodes: Sequence[Resources]) -> str:
    """What is wrong if some replica of ``model`` would never start on ``nodes``, and what to change."""
    scaling = model.options.scaling
    each = actor_options(model, nodes)["num_cpus"]
    room = _room(model, models, nodes)
    if not each or room >= scaling.upper_limit:
        return ""
    short, amount = _short_of(model, nodes, _left_by_others(model, models, nodes))
    options = [scaling.limiting_option] * (scaling.upper_limit > 1) + ["engine_cpus"] * (short == "CPUs")
    cure = f"lower {' or '.join(options)}" if options else "set device to cpu"
    if not model.one_of_several:
        return (
            f"there are {short} for {room} of {scaling.upper_limit} engine replicas with {amount} each; {cure}"
        )
    return (
        f"models: {model.name}: after the other models, there are {short} for {room} of {scaling.upper_limit} "
        f"engine replicas with {amount} each; {cure} for some"
    )


def _short_of(model: ServedModel, nodes: Sequence[Resources], free: Sequence[Resources]) -> tuple[str, str]:
    """What of ``free`` limits the number of a model's engine replicas, and how much of it each one takes."""
    if _fit(model, nodes, _with_gpus(nodes, free)) > _fit(model, nodes, free):
        return "GPUs", "1 GPU"
    cpus = actor_options(model, nodes)["num_cpus"]
    return "CPUs", f"{cpus:g} CPU{'' if cpus == 1 else 's'}"


def _with_gpus(nodes: Sequence[Resources], free: Sequence[Resources]) -> list[Resources]:
    """``free``, with more GPUs than anyone needs on nodes that have some."""
    gpus = {"GPU": float(MAX_REPLICAS)}
    return [
        {**left, **gpus} if node.get("GPU", 0) > 0 else left for node, left in zip(nodes, free, strict=True)
    ]


def engine_nodes(options: AppConfig) -> dict[str, str]:
    """Addresses of the nodes that can hold an engine replica, by node ID; empty without a cluster."""
    nodes = [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    usable = _usable(options, [node["Resources"] for node in nodes])
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Resources"] in usable}


def _cores(options: AppConfig, nodes: Sequence[Resources]) -> float:
    """Cores of the smallest node that can hold a replica; without ``nodes``, of this machine."""
    return min((node["CPU"] for node in _usable(options, nodes)), default=float(os.cpu_count() or 1))


def _room(model: ServedModel, models: Sequence[ServedModel], nodes: Sequence[Resources]) -> int:
    """Replicas of ``model`` that ``nodes`` can hold at once, beside those of the others among ``models``."""
    return _fit(model, nodes, _left_by_others(model, models, nodes))


def _left_by_others(
    model: ServedModel, models: Sequence[ServedModel], nodes: Sequence[Resources]
) -> list[dict[str, float]]:
    """What replicas of the others among ``models`` leave of ``nodes``."""
    free = [dict(node) for node in nodes]
    for other in models:
        if other.name != model.name:
            _place(other, nodes, free, other.options.scaling.upper_limit)
    return free


def _fit(model: ServedModel, nodes: Sequence[Resources], free: Sequence[Resources]) -> int:
    """More replicas of ``model`` that fit into what is ``free`` of ``nodes``."""
    return _place(model, nodes, [dict(left) for left in free], MAX_REPLICAS)


def _place(model: ServedModel, nodes: Sequence[Resources], free: list[dict[str, float]], most: int) -> int:
    """Take what up to ``most`` replicas of a model ask for from what is ``free``; returns how many fit."""
    each = actor_options(model, nodes)
    asked = {"CPU": each["num_cpus"], "GPU": each.get("num_gpus", 0), **each.get("resources", {})}
    placed = 0
    for node, left in zip(nodes, free, strict=True):
        if node in _usable(model.options, nodes):
            fit = [math.floor(_left(left, name) / amount + 1e-9) for name, amount in asked.items() if amount]
            number = min([*fit, most - placed])
            placed += number
            for name, amount in asked.items():
                left[name] = _left(left, name) - number * amount
    return placed


def _left(node: Resources, name: str) -> float:
    return node.get(name, 1.0 if name.startswith(IMPLICIT_RESOURCE_PREFIX) else 0.0)


def _usable(options: AppConfig, nodes: Sequence[Resources]) -> list[Resources]:
    """Nodes that can hold a replica; a dedicated head has no CPU."""
    gpu = wants_gpu(options, nodes)
    return [node for node in nodes if node.get("CPU", 0) > 0 and (not gpu or node.get("GPU", 0) > 0)]
