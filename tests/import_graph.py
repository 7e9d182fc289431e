"""The imports among the project's own modules, read from their source, and the diagrams that docs draw of them.

``python -m tests.import_graph`` prints the diagrams; ``--write`` puts them into ``docs/architecture.md``.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGES = ("app", "engine", "kernels", "loadtests")
PAGE = ROOT / "docs" / "architecture.md"

Graph = dict[str, set[str]]
"""What each node imports; every node is a key."""


class ImportedName(NamedTuple):
    """One name that ``importer`` takes out of ``module``: ``name`` is ``None`` for the module itself."""

    importer: str
    module: str
    name: str | None


class Modules:
    """The modules below some top-level packages: their paths, their imports, their folders."""

    def __init__(self, paths: Mapping[str, str], sources: Mapping[str, str]) -> None:
        """``paths`` and ``sources`` by the modules' full names; paths are relative to the root."""
        self._paths = dict(paths)
        self._trees = {name: ast.parse(sources[name]) for name in paths}
        self._imported: dict[str, list[ImportedName]] = {}

    @classmethod
    def read(cls, root: Path = ROOT, packages: Iterable[str] = PACKAGES) -> Modules:
        """Every module of the packages on disk."""
        found = {
            module_name(path.relative_to(root).as_posix()): path
            for package in packages
            for path in sorted((root / package).rglob("*.py"))
        }
        return cls(
            {name: path.relative_to(root).as_posix() for name, path in found.items()},
            {name: path.read_text() for name, path in found.items()},
        )

    @property
    def names(self) -> list[str]:
        """All modules, sorted."""
        return sorted(self._paths)

    def tree(self, module: str) -> ast.Module:
        """The syntax tree of a module."""
        return self._trees[module]

    def folder(self, module: str) -> str:
        """The folder of a module, such as ``engine/kv``."""
        return str(PurePosixPath(self._paths[module]).parent)

    def imported_names(self, module: str) -> list[ImportedName]:
        """All imports of project modules anywhere in ``module``: at the top, in functions, for types only."""
        if module not in self._imported:  # to walk over all trees takes a second
            self._imported[module] = self._find_imported(module)
        return self._imported[module]

    def _find_imported(self, module: str) -> list[ImportedName]:
        found = []
        for node in ast.walk(self._trees[module]):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in self._paths:
                        found.append(ImportedName(module, alias.name, None))
            elif isinstance(node, ast.ImportFrom):
                source = self._absolute(module, node)
                for alias in node.names:
                    if f"{source}.{alias.name}" in self._paths:
                        found.append(ImportedName(module, f"{source}.{alias.name}", None))
                    elif source in self._paths:
                        found.append(ImportedName(module, source, alias.name))
        return found

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = PurePosixPath(self._paths[module]).name == "__init__.py"
        parents = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
        return ".".join([*parents, *([node.module] if node.module else [])])

    def graph(self) -> Graph:
        """Module to module."""
        return {name: {found.module for found in self.imported_names(name)} for name in self.names}

    def folder_graph(self) -> Graph:
        """Folder to other folder."""
        graph: Graph = {self.folder(name): set() for name in self.names if not self._is_empty(name)}
        for name, imported in self.graph().items():
            if not self._is_empty(name):
                graph[self.folder(name)] |= {self.folder(other) for other in imported} - {self.folder(name)}
        for imported in list(graph.values()):
            for folder in imported:
                graph.setdefault(folder, set())
        return graph

    def _is_empty(self, module: str) -> bool:
        """Whether there is nothing but a docstring: a package file that only marks its folder."""
        return all(isinstance(node, ast.Expr) for node in self._trees[module].body)


def module_name(path: str) -> str:
    """The full name of the module at a relative path: ``a/b.py`` is ``a.b``, and so is ``a/b/__init__.py``."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(graph: Graph) -> list[list[str]]:
    """Sets of nodes that all reach each other (strongly connected components of two and more), sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1 or node in graph.get(node, ()):
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found)


def mermaid(graph: Graph) -> str:
    """A flow chart: a node for each folder, grouped by package, and an arrow from each to those it imports."""
    lines = ["```mermaid", "flowchart TD"]
    for package in sorted({package_of(folder) for folder in graph}):
        inside = sorted(folder for folder in graph if package_of(folder) == package)
        if inside == [package]:
            lines.append(f'    {_node(package)}["{package}"]')
            continue
        lines.append(f"    subgraph {package}_package [{package}]")
        lines += [f'        {_node(folder)}["{folder}"]' for folder in inside]
        lines.append("    end")
    for folder in sorted(graph):
        for other in sorted(graph[folder]):
            mutual = folder in graph.get(other, ())
            if not mutual or folder < other:
                lines.append(f"    {_node(folder)} {'<-->' if mutual else '-->'} {_node(other)}")
    return "\n".join([*lines, "```"]) + "\n"


def diagrams(graph: Graph) -> list[str]:
    """Two charts of the folders: the server, and the load tests with the server's packages as one node each."""
    server = {
        folder: {other for other in imported if package_of(other) != "loadtests"}
        for folder, imported in graph.items()
        if package_of(folder) != "loadtests"
    }
    tools: Graph = {}
    for folder, imported in graph.items():
        if package_of(folder) == "loadtests":
            tools[folder] = {
                other if package_of(other) == "loadtests" else package_of(other) for other in imported
            }
    for other in set().union(*tools.values()) - set(tools):
        tools[other] = set()
    return [mermaid(server), mermaid(tools)]


def package_of(folder: str) -> str:
    """The top-level package of a folder."""
    return folder.partition("/")[0]


def _node(folder: str) -> str:
    return folder.replace("/", "_")


def drawn(page: str) -> list[str]:
    """The diagrams in a page."""
    return re.findall(r"^```mermaid\n.*?^```\n", page, flags=re.MULTILINE | re.DOTALL)


def redrawn(page: str, diagrams: list[str]) -> str:
    """The page with each of its diagrams replaced, in order.

    Raises:
        ValueError: The page has another number of diagrams.
    """
    old = drawn(page)
    if len(old) != len(diagrams):
        raise ValueError(f"the page has {len(old)} mermaid diagrams, not {len(diagrams)}")
    for before, after in zip(old, diagrams, strict=True):
        page = page.replace(before, after, 1)
    return page


def main() -> None:
    """Print the diagrams or put them into the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.import_graph", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"put them into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    made = diagrams(Modules.read().folder_graph())
    if arguments.write:
        PAGE.write_text(redrawn(PAGE.read_text(), made))
    else:
        print("\n".join(made), end="")


if __name__ == "__main__":
    main()
