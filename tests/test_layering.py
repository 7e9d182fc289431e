"""Imports point one way: app -> engine -> kernels; only some rooms know Ray and HTTP."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "kernels": {"app", "engine", "loadtests", "tests", "ray", "starlette", "fastapi", "uvicorn"},
    "engine": {"app", "loadtests", "tests", "ray", "starlette", "fastapi", "uvicorn"},
    "app": {"loadtests", "tests"},
    "loadtests": {"tests"},
}


LONGEST = 350
LONGER = {"app/autoscaling/kv_demand.py": 440}
"""Serve's controller loads this module alone, so the decision and its adapter cannot be two files."""


def imported_packages(source: str) -> set[str]:
    """Top-level packages that a module imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_point_one_way(package: str) -> None:
    modules = list((ROOT / package).rglob("*.py"))
    assert modules
    wrong = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in modules
        if (bad := imported_packages(path.read_text()) & FORBIDDEN[package])
    }
    assert wrong == {}


def test_the_check_sees_a_wrong_import() -> None:
    assert imported_packages("def f():\n    from ray.serve import run\n    import app.config as c") == {
        "ray",
        "app",
    }


@pytest.mark.parametrize("package", ["kernels", "engine", "app", "loadtests"])
def test_no_file_has_grown_into_two_nouns(package: str) -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / package).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > LONGER.get(str(path.relative_to(ROOT)), LONGEST)
    }
    assert long == {}


def test_the_scaling_policy_imports_the_standard_library_alone() -> None:
    source = (ROOT / "app/autoscaling/kv_demand.py").read_text()
    assert imported_packages(source) <= set(sys.stdlib_module_names)
