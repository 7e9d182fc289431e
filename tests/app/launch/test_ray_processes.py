"""Which of its processes Ray starts."""

from __future__ import annotations

import pytest
from ray._private.node import Node

from app.launch.ray_processes import left_out

NAMES = ("start_gcs_server", "start_monitor", "start_api_server", "start_raylet", "start_log_monitor")


@pytest.mark.parametrize(
    ("dashboard", "fewer"), [(False, {"start_monitor", "start_api_server"}), (True, {"start_monitor"})]
)
def test_only_what_is_not_needed_is_left_out_and_only_while_ray_starts(
    dashboard: bool, fewer: set[str]
) -> None:
    real = {name: getattr(Node, name) for name in NAMES}
    with left_out(dashboard):
        assert {name for name in NAMES if getattr(Node, name) is not real[name]} == fewer
    assert all(getattr(Node, name) is real[name] for name in NAMES)


def test_a_ray_without_such_a_method_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Node, "start_monitor")
    real = Node.start_api_server
    with left_out():
        assert not hasattr(Node, "start_monitor"), "nothing is added to Ray"
        assert Node.start_api_server is not real, "what it has is still left out"
    assert not hasattr(Node, "start_monitor")
    assert Node.start_api_server is real
