"""Leaves out, or does not wait for, what a server on one machine does not need; Ray has no options for that."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def left_out(dashboard: bool = False, logs: bool = True) -> Iterator[None]:
    """While Ray starts here: no monitor of its autoscaler, and no dashboard unless wanted.

    Without ``logs`` nothing passes on what its workers write to their log files.

    Without a dashboard Ray would start its process all the same, for usage reports alone, and wait for it.
    The agent of a node picks a free port: by default it is the same in every Ray of a host, and the second one
    tries for seconds to get it. These are private methods of Ray: where it has none of that name, its process
    starts as it would, which costs only time.
    """
    from ray._private.node import Node

    wanted = {"start_monitor": False, "start_api_server": dashboard, "start_log_monitor": logs}
    names = [name for name, needed in wanted.items() if not needed]
    real = {name: getattr(Node, name) for name in [*names, "start_raylet"] if hasattr(Node, name)}
    if len(real) <= len(names):
        missing = {*names, "start_raylet"} - set(real)
        logger.warning("this Ray starts processes that are not needed: it has no %s", missing)

    def start_raylet(node: Any, *args: Any, **kwargs: Any) -> Any:
        node._ray_params.dashboard_agent_listen_port = 0
        return real["start_raylet"](node, *args, **kwargs)

    for name in real:
        setattr(Node, name, start_raylet if name == "start_raylet" else _nothing)
    try:
        yield
    finally:
        for name, method in real.items():
            setattr(Node, name, method)


AGENTS = {
    "--dashboard_agent_command=": ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"),
    "--runtime_env_agent_command=": ("runtime_env_agent_port",),
}
"""Arguments of Ray's node process, and the files in which it then looks for the agent's ports."""

NO_AGENT, NO_PORT = "cat", "-1"
"""A command that ends with Ray's node process, whose pipe it reads; and Ray's own sign that nothing listens."""


@contextlib.contextmanager
def without_agents() -> Iterator[None]:
    """While Ray starts here, it starts no agents, for which it would wait a second.

    One serves Ray's dashboard and metrics, the other makes environments of workers: no worker may ask for any.
    """
    from ray._private import ray_constants, services

    real = services.start_ray_process

    def start(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            command = _agentless(command)
        return real(command, process_type, *args, **kwargs)

    services.start_ray_process = start
    try:
        yield
    finally:
        services.start_ray_process = real


def _agentless(command: list[str]) -> list[str]:
    """The command of Ray's node process with other agents, whose ports it finds at once."""
    given = dict(argument.split("=", 1) for argument in command if "=" in argument)
    session, node = given.get("--session_dir"), given.get("--node_id")
    if session is None or node is None or not all(name[:-1] in given for name in AGENTS):
        logger.warning("this Ray starts agents that are not needed: its command has changed")
        return command
    for port in (port for ports in AGENTS.values() for port in ports):
        (Path(session) / f"{port}_{node}").write_text(NO_PORT)
    names = tuple(AGENTS)
    return [
        next((name + NO_AGENT for name in names if argument.startswith(name)), argument) for argument in command
    ]


@contextlib.contextmanager
def proxies_later() -> Iterator[list[Any]]:
    """While Serve starts here, it does not wait for its proxies, so that replicas load meanwhile.

    Yields what Serve would have waited for: references to answers that come when a proxy serves, or an error.
    """
    from ray.serve._private import api

    name, waited = "_create_controller_and_proxy_refs", list[Any]()
    real = getattr(api, name, None)
    if real is None:
        logger.warning("Serve waits for its proxies before replicas start: this Ray has no %s", name)
        yield waited
        return

    def create(*args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        controller, proxies = real(*args, **kwargs)
        waited.extend(proxies)
        return controller, []

    setattr(api, name, create)
    try:
        yield waited
    finally:
        setattr(api, name, real)


_INTERVAL = "CONTROL_LOOP_INTERVAL_S"


def pace_controller(controller: Any, seconds: float) -> Any:
    """Let Serve's ``controller`` rest so long between two looks at its replicas, until it restarts.

    Serve itself reads the interval only when it starts. Returns a reference to whether this Ray has it.
    """
    return controller.__ray_call__.remote(_pace, seconds)


def _pace(_: Any, seconds: float) -> bool:
    """In the controller's process, where several modules have imported the interval."""
    having = [
        module
        for name, module in sys.modules.items()
        if name.startswith("ray.serve.") and hasattr(module, _INTERVAL)
    ]
    for module in having:
        setattr(module, _INTERVAL, seconds)
    return bool(having)


def _nothing(*_: Any, **__: Any) -> None:
    pass
