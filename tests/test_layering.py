"""Imports point one way, app -> engine -> kernels, in no circle; what others use has a public name.

Only some packages know Ray and HTTP, and ``docs/architecture.md`` draws the imports as they are.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
from import_graph import PACKAGES, PAGE, Modules, circles, diagrams, drawn, module_name, redrawn

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "kernels": {"app", "clients", "engine", "loadtests", "tests", "ray", "starlette", "fastapi", "uvicorn"},
    "engine": {"app", "clients", "loadtests", "tests", "ray", "starlette", "fastapi", "uvicorn"},
    "app": {"clients", "loadtests", "tests"},
    "loadtests": {"clients", "tests"},
    "clients": {"app", "engine", "kernels", "tests"},
}


def imported_packages(source: str) -> set[str]:
    """Top-level packages that a module imports, anywhere in it."""
    return packages_of(ast.parse(source))


def packages_of(tree: ast.Module) -> set[str]:
    """The same of its syntax tree."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_no_test_module_imports_another() -> None:
    """What they share is in modules of its own: a test that is moved or run alone takes no other with it."""
    tests = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    importing = re.compile(r"^\s*(from|import)\b.*\btest_", re.MULTILINE)  # to parse them all takes seconds
    shared = {
        name: imported_packages(text) & tests.keys() for name, text in tests.items() if importing.search(text)
    }
    assert {name: found for name, found in shared.items() if found} == {}


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_imports_point_one_way(package: str) -> None:
    paths = [path.relative_to(ROOT).as_posix() for path in (ROOT / package).rglob("*.py")]
    assert paths
    wrong = {path: sorted(bad) for path in paths if (bad := packages(path) & FORBIDDEN[package])}
    assert wrong == {}


def packages(path: str) -> set[str]:
    """Top-level packages that the module at ``path``, relative to the root, imports."""
    name = module_name(path)
    known = name in modules().names
    return packages_of(modules().tree(name)) if known else imported_packages((ROOT / path).read_text())


def test_the_check_sees_a_wrong_import() -> None:
    assert imported_packages("def f():\n    from ray.serve import run\n    import app.config as c") == {
        "ray",
        "app",
    }


AUTOSCALING = ROOT / "app/autoscaling"
"""Pickled by value into Serve's controller, where Quire may be missing."""


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
    modules = list(AUTOSCALING.glob("*.py"))
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


@cache
def modules() -> Modules:
    """All of the project's own modules."""
    return Modules.read()


def test_no_circle_of_imports() -> None:
    """Those for types and those inside functions count, too."""
    assert circles(modules().graph()) == []


def private(name: str) -> bool:
    """Whether a name is for its own folder alone; ``__version__`` is not."""
    return name.startswith("_") and not name.endswith("__")


def private_imports(modules: Modules) -> list[str]:
    """Imports of private modules and names of another folder."""
    return [
        f"{found.importer} imports {found.module}.{found.name or ''}".rstrip(".")
        for module in modules.names
        for found in modules.imported_names(module)
        if modules.folder(module) != modules.folder(found.module)
        and (private(found.name or "") or any(map(private, found.module.split("."))))
    ]


def private_attributes(modules: Modules) -> list[str]:
    """Uses of private names through an imported module: ``module._name``."""
    wrong = []
    for module in modules.names:
        names = {
            alias.asname or alias.name
            for node in ast.walk(modules.tree(module))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if f"{getattr(node, 'module', None) or ''}.{alias.name}".lstrip(".") in modules.names
        }
        wrong += [
            f"{module} uses {node.value.id}.{node.attr}"
            for node in ast.walk(modules.tree(module))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in names
            and private(node.attr)
        ]
    return wrong


def test_what_other_folders_import_is_public() -> None:
    assert private_imports(modules()) == []
    assert private_attributes(modules()) == []


def declared(tree: ast.Module) -> list[str] | None:
    """The ``__all__`` of a module, if it declares one."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


# By their text: each worker comes here while it collects tests, and to parse all modules takes seconds.
DECLARING = [
    module_name(path.relative_to(ROOT).as_posix())
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if "\n__all__ = " in path.read_text()
]


def test_all_that_declare_their_names_are_known() -> None:
    assert sorted(DECLARING) == [name for name in modules().names if declared(modules().tree(name)) is not None]


@pytest.mark.parametrize("name", DECLARING)
def test_all_is_true(name: str) -> None:
    """Each name is there, and what other modules import is among them."""
    names = declared(modules().tree(name)) or []
    assert len(names) == len(set(names))
    module = importlib.import_module(name)
    assert [one for one in names if not hasattr(module, one)] == []
    used = {
        found.name
        for importer in modules().names
        for found in modules().imported_names(importer)
        if found.module == name and found.name is not None
    }
    assert used - set(names) == set()


def test_the_page_draws_the_imports_as_they_are() -> None:
    """If not: ``python -m tests.import_graph --write``."""
    assert drawn(PAGE.read_text()) == diagrams(modules().folder_graph())


def house(**sources: str) -> Modules:
    """Modules by name, with ``_`` for a dot, at ``name.py``."""
    named = {name.replace("_", "."): source for name, source in sources.items()}
    return Modules({name: name.replace(".", "/") + ".py" for name in named}, named)


def test_the_checks_see_circles_through_functions_types_and_relative_imports() -> None:
    made = house(
        a_x="from b import y",
        b_y="def f():\n    from . import z",
        b_z="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..a.x import Thing",
        c_w="import a.x\nfrom b import y as why",
    )
    graph = made.graph()
    assert graph == {"a.x": {"b.y"}, "b.y": {"b.z"}, "b.z": {"a.x"}, "c.w": {"a.x", "b.y"}}
    assert circles(graph) == [["a.x", "b.y", "b.z"]]
    assert circles({"p": {"p"}, "q": {"r"}, "r": set()}) == [["p"]]
    assert made.folder_graph() == {"a": {"b"}, "b": {"a"}, "c": {"a", "b"}}


def test_the_checks_see_private_names() -> None:
    made = house(
        a_x="from b.y import _hidden, shown, __version__\nfrom b import y\ny._other()\ny.shown",
        b_y="_hidden = shown = 1",
        b_z="from b.y import _hidden",
    )
    assert private_imports(made) == ["a.x imports b.y._hidden"]
    assert private_attributes(made) == ["a.x uses y._other"]


def test_a_diagram_shows_each_folder_and_each_import_between_two() -> None:
    graph = {
        "app": {"app/api"},
        "app/api": {"app", "engine"},
        "engine": set[str](),
        "loadtests": {"app/api", "loadtests/experiments"},
        "loadtests/experiments": set[str](),
    }
    server, tools = diagrams(graph)
    assert server.splitlines() == [
        "```mermaid",
        "flowchart TD",
        "    subgraph app_package [app]",
        '        app["app"]',
        '        app_api["app/api"]',
        "    end",
        '    engine["engine"]',
        "    app <--> app_api",
        "    app_api --> engine",
        "```",
    ]
    assert '    app["app"]' in tools.splitlines()
    assert "    loadtests --> app" in tools.splitlines()
    page = f"# Page\n\n{server}\nBetween.\n\n{tools}\nEnd.\n"
    assert drawn(page) == [server, tools]
    assert redrawn(page, ["one\n", "two\n"]) == "# Page\n\none\n\nBetween.\n\ntwo\n\nEnd.\n"
    with pytest.raises(ValueError, match="2 mermaid diagrams, not 1"):
        redrawn(page, ["one\n"])


MOVE_KV = {"engine.kv.kv_cache", "engine.kv.swap_stream", "engine.kv.pool_size"}
"""Of ``engine/kv``: these hold or move tensors, or measure the memory for them."""


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """A module and all that it imports, directly or through others."""
    found, waiting = {start}, [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def importers_of_torch(modules: Modules, starts: Iterable[str]) -> dict[str, list[str]]:
    """For each start the modules below it that import torch, anywhere in them, if there are any."""
    graph = modules.graph()
    importers = {name for name in graph if "torch" in packages_of(modules.tree(name))}
    found = {start: sorted(reached(graph, start) & importers) for start in starts}
    return {start: names for start, names in found.items() if names}


def test_what_decides_on_blocks_and_steps_imports_no_torch() -> None:
    """Simulators and the router use it without a model."""
    folders = {"engine/scheduling", "engine/kv"}
    deciding = [name for name in modules().names if modules().folder(name) in folders and name not in MOVE_KV]
    assert {"engine.scheduling.scheduler", "engine.kv.block_pool"} <= set(deciding)
    assert importers_of_torch(modules(), deciding) == {}


def test_the_check_sees_torch_behind_other_modules() -> None:
    made = house(a="import b", b="def f():\n    from c import x", c="from torch import nn", d="import e", e="")
    assert importers_of_torch(made, ["a", "d"]) == {"a": ["c"]}
