"""Tests of one group run on one worker."""

from __future__ import annotations

import os

import pytest


def test_xdist_knows_the_group(request: pytest.FixtureRequest) -> None:
    """It appends the group to the ID of a test; where it cannot, each test goes to any worker."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("there are no workers")
    assert request.node.nodeid.endswith(f"@{request.node.path}")
