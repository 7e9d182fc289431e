"""Which of its processes Ray starts, and what Serve's start waits for."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import services
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.serve._private import api

from app.launch.ray_processes import left_out, proxies_later, without_agents

NAMES = ("start_gcs_server", "start_monitor", "start_api_server", "start_log_monitor")


@pytest.mark.parametrize(
    ("wanted", "fewer"),
    [
        ({}, {"start_monitor", "start_api_server"}),
        ({"dashboard": True}, {"start_monitor"}),
        ({"logs": False}, {"start_monitor", "start_api_server", "start_log_monitor"}),
    ],
)
def test_only_what_is_not_needed_is_left_out_and_only_while_ray_starts(
    wanted: dict[str, bool], fewer: set[str]
) -> None:
    real = {name: getattr(Node, name) for name in (*NAMES, "start_raylet")}
    with left_out(**wanted):
        assert {name for name in NAMES if getattr(Node, name) is not real[name]} == fewer
    assert all(getattr(Node, name) is method for name, method in real.items())


def test_a_ray_without_such_a_method_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Node, "start_monitor")
    real = Node.start_api_server
    with left_out():
        assert not hasattr(Node, "start_monitor"), "nothing is added to Ray"
        assert Node.start_api_server is not real, "what it has is still left out"
    assert not hasattr(Node, "start_monitor")
    assert Node.start_api_server is real


def test_the_agent_does_not_wait_for_a_port_that_another_ray_of_this_host_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert RayParams().dashboard_agent_listen_port, "the same for all, so that only one can have it"
    given = []
    monkeypatch.setattr(Node, "start_raylet", lambda node: given.append(node._ray_params))
    node: Any = SimpleNamespace(_ray_params=RayParams())
    with left_out():
        Node.start_raylet(node)
    assert [params.dashboard_agent_listen_port for params in given] == [0]


COMMAND = [
    "raylet",
    "--session_dir={folder}",
    "--node_id=abc",
    "--dashboard_agent_command=python -u agent.py --listen-port=1",
    "--runtime_env_agent_command=python main.py",
    "--head",
]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str]]:
    """Ray's processes that would have been started: command and type."""
    made: list[tuple[list[str], str]] = []
    monkeypatch.setattr(services, "start_ray_process", lambda *given, **_: made.append(given))
    return made


def test_a_node_finds_at_once_that_its_agents_have_no_ports(started: Any, tmp_path: Path) -> None:
    command = [part.format(folder=tmp_path) for part in COMMAND]
    with without_agents():
        services.start_ray_process(["gcs_server"], "gcs_server", fate_share=True)
        services.start_ray_process(command, "raylet", fate_share=True)
    services.start_ray_process(command, "raylet", fate_share=True)
    agents = ["--dashboard_agent_command=cat", "--runtime_env_agent_command=cat"]
    without = [*command[:3], *agents, command[-1]]
    assert started == [(["gcs_server"], "gcs_server"), (without, "raylet"), (command, "raylet")]
    ports = {path.name: path.read_text() for path in tmp_path.iterdir()}
    names = (
        "metrics_agent_port",
        "metrics_export_port",
        "dashboard_agent_listen_port",
        "runtime_env_agent_port",
    )
    assert ports == {f"{name}_abc": "-1" for name in names}


PRIVATE = {
    (Node, "start_monitor"): "start_head_processes calls it; no option of ray.init leaves it out",
    (Node, "start_api_server"): "likewise; with include_dashboard=False it starts a process for usage reports",
    (Node, "start_raylet"): "before it, the node's _ray_params have dashboard_agent_listen_port",
    (services, "start_ray_process"): "it starts each process of Ray's, of a command and a type",
    (api, "_create_controller_and_proxy_refs"): "serve.start waits for the proxies that it returns",
}
"""What ``ray_processes`` replaces for a moment, and what it relies on; Ray 2.60 has no public way.

When this test fails, Ray has changed: the server starts all the same, with a warning and some seconds later.
Read the new function, then mend ``ray_processes``, or delete the part that Ray has an option for by now.
"""


def test_the_private_names_are_those_of_this_ray() -> None:
    assert [name for owner, name in PRIVATE if not hasattr(owner, name)] == []
    head = inspect.getsource(Node.start_head_processes)
    assert "self.start_monitor()" in head
    assert "self.start_api_server(" in head
    assert hasattr(RayParams(), "dashboard_agent_listen_port")
    assert list(inspect.signature(services.start_ray_process).parameters)[:2] == ["command", "process_type"]
    assert "_create_controller_and_proxy_refs(" in inspect.getsource(api.serve_start)
    source = Path(services.__file__).read_text()
    assert all(f'"{part.partition("=")[0]}=' in source for part in COMMAND[1:5])


def test_a_node_of_another_kind_keeps_its_agents(started: Any, tmp_path: Path) -> None:
    command = [f"--session_dir={tmp_path}", *COMMAND[2:4]]
    with without_agents():
        services.start_ray_process(command, "raylet", fate_share=True)
    assert started == [(command, "raylet")]
    assert not list(tmp_path.iterdir())


def test_serve_does_not_wait_for_proxies_but_who_starts_it_learns_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "_create_controller_and_proxy_refs", lambda *_, **__: ("controller", ["a", "b"]))
    real = api._create_controller_and_proxy_refs
    with proxies_later() as proxies:
        assert api._create_controller_and_proxy_refs(None, host="h") == ("controller", [])
        assert proxies == ["a", "b"]
    assert api._create_controller_and_proxy_refs is real


def test_a_serve_without_such_a_function_waits_for_its_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(api, "_create_controller_and_proxy_refs")
    with proxies_later() as proxies:
        assert not hasattr(api, "_create_controller_and_proxy_refs")
    assert proxies == []
