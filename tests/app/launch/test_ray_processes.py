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
