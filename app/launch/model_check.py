"""Checks of a model before a deploy replaces anything, on each node that may run it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.api.prompt_tokenizer import PromptTokenizer
from app.api.tokenizer_parts import TokenizerParts
from app.config import AppConfig, ServedModel
from app.launch import model_store, placement
from app.launch.preflight import Need, check_memory, engine_bytes, naming
from engine.errors import ConfigError
from engine.models.config import read_model_config
from engine.models.folders import at_home

LIMIT_S = 60.0
"""A node that has not answered after this long is skipped."""

logger = logging.getLogger(__name__)


Others: TypeAlias = Sequence[tuple[AppConfig, int]]
"""Options of other models with the number of their engines on the same node."""


class Finding(NamedTuple):
    """What one node says: the ``error``, if any, and whether one engine more than asked for fits, too."""

    error: str = ""
    room: bool = True


def check_models(models: Sequence[ServedModel]) -> bool:
    """Check each model on each node that can hold an engine of it; without a cluster, here.

    Returns whether every node has the memory for one more engine of any model, as during a deploy.

    Raises:
        ConfigError: one line, with the model and the node where that matters.
    """
    nodes = placement.cluster_nodes()
    on_a_node = [(model.options, placement.replicas_on_a_node(model.options, nodes)) for model in models]
    room = True
    for index, model in enumerate(models):
        with naming(model):
            others = [*on_a_node[:index], *on_a_node[index + 1 :]]
            room = _check_model(model.options, on_a_node[index][1], others) and room
    return room


def _check_model(options: AppConfig, sharers: int, others: Others) -> bool:
    nodes = placement.engine_nodes(options)
    here = ray.get_runtime_context().get_node_id() if nodes else ""
    room = True
    if not nodes or here in nodes:
        finding = look_at_model(options, sharers, others)
        if finding.error:
            raise ConfigError(finding.error)
        room = finding.room
    elsewhere = {node: address for node, address in nodes.items() if node != here}
    for address, finding in _ask(elsewhere, options, sharers, others).items():
        if finding.error:
            raise ConfigError(f"on node {address}: {finding.error}")
        room = room and finding.room
    return room


def look_at_model(options: AppConfig, sharers: int, others: Others = ()) -> Finding:
    """What this node says of the model, for ``sharers`` engines on it beside ``others``.

    The weights and memory of a model that has yet to be downloaded are not checked. All memory counts as free,
    because engines of the previous version hold some of it.
    """
    name = options.service.model
    try:
        folder = model_store.look_up(name)
        if folder is None:
            return Finding()
        read_model_config(folder)
        PromptTokenizer(TokenizerParts.read(folder))
        if not _has_weights(name, folder):
            return Finding()
        needs = [_need(*other) for other in others]
        check_memory(options, folder, psutil.virtual_memory().total, sharers, needs)
    except ConfigError as error:
        return Finding(str(error))
    try:
        check_memory(options, folder, psutil.virtual_memory().total, sharers + 1, needs)
    except ConfigError:
        return Finding(room=False)
    return Finding()


def _has_weights(name: str, folder: Path) -> bool:
    """Whether they are here, or must be: only those of a Hub model are fetched later."""
    return any(folder.glob("*.safetensors")) or at_home(name).is_dir()


def _need(options: AppConfig, replicas: int) -> Need:
    """What engines of another model need, as far as it is known here; its own check reports what is wrong."""
    name = options.service.model
    try:
        folder = model_store.look_up(name)
        known = folder is not None and _has_weights(name, folder)
        return Need(replicas, replicas * engine_bytes(options, folder) if known and folder else 0)
    except ConfigError:
        return Need(replicas)


def _ask(nodes: dict[str, str], options: AppConfig, sharers: int, others: Others) -> dict[str, Finding]:
    """The finding of each node that answers, by address."""
    look = ray.remote(num_cpus=0, max_retries=0)(look_at_model)
    asked = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            options, sharers, others
        ): address
        for node, address in nodes.items()
    }
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LIMIT_S) if asked else ([], [])
    found = {}
    for answer in done:
        try:
            found[asked[answer]] = ray.get(answer)
        except RayError as error:
            logger.warning("the model could not be checked on node %s: %s", asked[answer], error)
    for address in asked.values():
        if address not in found:
            logger.warning("the model was not checked on node %s", address)
    return found
