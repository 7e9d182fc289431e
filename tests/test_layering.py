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


AUTOSCALING = ROOT / "app/autoscaling"
NOT_IN_THE_CONTROLLER = {"deployment.py", "replica_stats.py"}
"""Of the package; the others are pickled by value into Serve's controller, where Quire may be missing."""


def imports_of(source: str) -> tuple[set[str], set[str]]:
    """Modules, by their whole names, that a module imports when it is loaded, and inside its functions."""
    at_load: set[str] = set()
    later: set[str] = set()
    waiting: list[tuple[ast.AST, set[str]]] = [(ast.parse(source), at_load)]
    while waiting:
        node, found = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found = later
        waiting.extend((child, found) for child in ast.iter_child_nodes(node))
    return at_load, later


def test_what_the_controller_runs_imports_the_standard_library_alone() -> None:
    """And its own package; Ray only where it publishes, inside a function, since tests do without."""
    modules = [path for path in AUTOSCALING.glob("*.py") if path.name not in NOT_IN_THE_CONTROLLER]
    assert "policy.py" in {path.name for path in modules}
    for path in modules:
        at_load, later = imports_of(path.read_text())
        others = {name.split(".")[0] for name in at_load if not name.startswith("app.autoscaling.")}
        assert others <= set(sys.stdlib_module_names), path.name
        # What a function imports is looked up in the controller, this package, too.
        allowed = {"ray"} if path.name == "publishing.py" else set()
        assert {name.split(".")[0] for name in later} <= allowed, path.name


def test_the_check_tells_imports_at_load_from_later_ones() -> None:
    source = "import a.b\nif x:\n    import c\ndef f():\n    import d\n    from a.b import e"
    assert imports_of(source) == ({"a.b", "c"}, {"d", "a.b"})
