"""What the runner needs of the test files: their names, and their groups."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest


def test_xdist_knows_the_group(request: pytest.FixtureRequest) -> None:
    """It appends the group to the ID of a test; where it cannot, each test goes to any worker."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("there are no workers")
    assert request.node.nodeid.endswith(f"@{request.node.path}")


def test_no_two_files_have_one_name() -> None:
    """They would be one module: the second is not collected, and only an error says so."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1 and name != "conftest.py"] == []
