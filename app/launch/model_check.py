"""Checks of a model before a deploy replaces anything, on each node that may run it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from app.api.prompt_tokenizer import PromptTokenizer
from app.api.tokenizer_parts import TokenizerParts
from app.config import AppConfig
from app.launch import model_store, placement
from app.launch.preflight import check_memory
from engine.errors import ConfigError
from engine.models.config import read_model_config

LIMIT_S = 60.0
"""A node that has not answered after this long is passed over."""

logger = logging.getLogger(__name__)


class Finding(NamedTuple):
    """What one node says: the ``error``, if any, and whether one engine more than asked for fits, too."""

    error: str = ""
    room: bool = True


def check_model(options: AppConfig) -> bool:
    """Check the model on each node that can hold an engine; without a cluster, here.

    Returns whether every node has the memory for one engine more, as while a deploy replaces one.

    Raises:
        ConfigError: one line, with the node where that matters.
    """
    nodes = placement.engine_nodes(options)
    sharers = placement.replicas_on_a_node(options, placement.cluster_nodes())
    here = ray.get_runtime_context().get_node_id() if nodes else ""
    room = True
    if not nodes or here in nodes:
        finding = look_at_model(options, sharers)
        if finding.error:
            raise ConfigError(finding.error)
        room = finding.room
    others = {node: address for node, address in nodes.items() if node != here}
    for address, finding in _ask(others, options, sharers).items():
        if finding.error:
            raise ConfigError(f"on node {address}: {finding.error}")
        room = room and finding.room
    return room


def look_at_model(options: AppConfig, sharers: int) -> Finding:
    """What this node says of the model, for ``sharers`` engines on it.

    Of a model that is yet to be fetched, weights and memory are not known. Memory counts whole, since engines
    of the version before hold some.
    """
    name = options.service.model
    try:
        folder = model_store.look_up(name)
        if folder is None:
            return Finding()
        read_model_config(folder)
        PromptTokenizer(TokenizerParts.read(folder))
        if not any(folder.glob("*.safetensors")) and not Path(name).expanduser().is_dir():
            return Finding()
        check_memory(options, folder, psutil.virtual_memory().total, sharers)
    except ConfigError as error:
        return Finding(str(error))
    try:
        check_memory(options, folder, psutil.virtual_memory().total, sharers + 1)
    except ConfigError:
        return Finding(room=False)
    return Finding()


def _ask(nodes: dict[str, str], options: AppConfig, sharers: int) -> dict[str, Finding]:
    """The finding of each node that answers, by address."""
    look = ray.remote(num_cpus=0, max_retries=0)(look_at_model)
    asked = {
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            options, sharers
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
