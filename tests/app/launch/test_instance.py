"""What a server has for itself on its host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ray.serve._private import constants

from app.launch.instance import Instance

NODE = "f" * 56
LONGEST_SOCKET = 97
"""Characters that HAProxy takes."""


def test_two_instances_share_nothing() -> None:
    one, two = Instance(), Instance()
    assert one.name != two.name
    first, second = one.controller_environment(), two.controller_environment()
    own = {name for name in first if "PORT" in name or "/" in first[name]}
    assert len(own) == 14
    assert all(first[name] != second[name] for name in own)
    ranges = [
        {int(value) for name, value in environment.items() if name.endswith("_PORT")}
        for environment in (first, second)
    ]
    assert max(ranges[0]) < min(ranges[1]) or max(ranges[1]) < min(ranges[0])
    for instance in (one, two):
        instance.remove()
        assert not instance.folder.exists()


def test_every_name_that_serve_fixes_is_replaced() -> None:
    """A new release that adds a port or a path must be looked at."""
    instance = Instance()
    ours = instance.controller_environment()
    fixed = {
        name
        for name, value in vars(constants).items()
        if name.startswith("RAY_SERVE_")
        and (name.endswith("_PORT") or "/tmp" in str(value) or str(value).startswith("/"))
        and value is not None
    }
    assert fixed - ours.keys() == set()
    instance.remove()


def test_sockets_have_short_paths() -> None:
    instance = Instance()
    for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        path = Path(instance.controller_environment()[name])
        assert len(str(path.parent / NODE / path.name)) <= LONGEST_SOCKET
    instance.remove()


def test_rays_own_processes_inherit_free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:6379")
    monkeypatch.setenv("AUTOSCALER_METRIC_PORT", "44217")
    monkeypatch.setenv("DASHBOARD_METRIC_PORT", "44227")
    instance = Instance()
    instance.prepare_environment()
    assert "RAY_ADDRESS" not in os.environ
    assert os.environ["AUTOSCALER_METRIC_PORT"] not in ("44217", os.environ["DASHBOARD_METRIC_PORT"])
    instance.remove()
