"""README and docs name nothing that is not there, such as commands, files, links, tests, settings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.config import OPTIONS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("app", "clients", "engine", "kernels", "loadtests", "tests")
FOREIGN_MODULES = {"pip", "pytest", "timeit", "venv"}
FOREIGN_NAMES = {"HuggingFaceTB", "WorkerId"}
OTHER_SETTINGS = (
    "QUIRE_KEYS",
    "QUIRE_CACHE",
    "QUIRE_HAPROXY_",
    "QUIRE_URL",
    "QUIRE_API_KEY",
    "QUIRE_LOAD_",
    "QUIRE_API_KEY",
    "QUIRE_PEERS",
    "QUIRE_SCHEMA",
    "QUIRE_PORT",
)  # the last one is set by Kubernetes

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each module that is run, with the options that are written behind it in the same piece of code.

    Code is what stands between backticks, behind a prompt, or on a line of its own in a block.
    """
    line = r"(?:    )?(?:\w+=\S+ )*(?:\S*/)?python3? -m .+"
    for code in re.findall(rf"`([^`\n]+)`|^(\$ .+|{line})$", text, flags=re.MULTILINE):
        for module, rest in re.findall(r"python3? -m ([\w.]+)([^|;&#]*)", "".join(code)):
            yield module, re.findall(r"--[a-z][a-z-]*", rest)


def source_of(module: str) -> Path | None:
    """The file of a command; of an experiment, the one that its command runs."""
    path = ROOT / module.replace(".", "/")
    source = next((one for one in (path.with_suffix(".py"), path / "__main__.py") if one.exists()), None)
    runs = re.search(r'\bexperiment\("([\w.]+)"\)', source.read_text()) if source else None
    return source_of(f"loadtests.experiments.{runs[1]}") if runs else source


def imported(source: Path) -> Iterator[Path]:
    """Files of the same top folder that a file imports from."""
    package = source.relative_to(ROOT).parts[0]
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}", *(f"{node.module}.{name}" for name in names)]
        for name in names:
            path = (ROOT / name.replace(".", "/")).with_suffix(".py")
            if name.partition(".")[0] == package and path.exists():
                yield path


def takes(source: Path, option: str) -> bool:
    """Whether a command has an option: it adds it, or a module that it imports does."""
    return any(f'"{option}"' in path.read_text() for path in {source, *imported(source)})


def defined_tests() -> set[str]:
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "loadtests").rglob("test_*.py")]
    found = {path.stem for path in files}
    for path in files:
        found.update(re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), flags=re.MULTILINE))
    return found


@pages
def test_commands_exist_and_take_their_options(page: Path) -> None:
    wrong = []
    for module, options in commands(page.read_text()):
        if module in FOREIGN_MODULES:
            continue
        source = source_of(module)
        if source is None:
            wrong.append(module)
            continue
        wrong += [f"{module} {option}" for option in options if not takes(source, option)]
    assert wrong == []


@pages
def test_files_exist(page: Path) -> None:
    names = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    wrong = []
    for code in re.findall(r"`([^`\n]+)`", page.read_text()):
        if re.fullmatch(rf"(?:{'|'.join(FOLDERS)}|docs|deploy)/[\w./-]*", code):
            wrong += [] if (ROOT / code).exists() else [code]
        elif re.fullmatch(r"\w+\.py", code) and code not in names:
            wrong.append(code)
    assert wrong == []


@pages
def test_classes_exist(page: Path) -> None:
    defined = {
        name
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"^ *class (\w+)", path.read_text(), flags=re.MULTILINE)
    }
    named = set(re.findall(r"`([A-Z][a-z]+[A-Z]\w*)", page.read_text()))
    assert {name for name in named - defined - FOREIGN_NAMES if not name.endswith("ForCausalLM")} == set()


@pages
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text())
    wrong = []
    for target in targets:
        path, _, heading = target.partition("#")
        whole = page.parent / path if path else page
        if not whole.exists() or (heading and heading not in headings(whole)):
            wrong.append(target)
    assert wrong == []


def test_every_page_is_linked_from_another() -> None:
    linked = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        if (page.parent / target).resolve() != page
    }
    assert [page.name for page in PAGES[1:] if page not in linked] == []


def headings(page: Path) -> set[str]:
    """As they are linked to: in small letters, with hyphens for spaces."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pages
def test_tests_exist(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    assert named - defined_tests() == set()


@pages
def test_measured_figures_have_a_command_a_commit_and_a_machine(page: Path) -> None:
    """A section that tells of a machine, a commit or a rate names what measures it, on what, or the benchmarks.

    Where time is simulated or nothing runs, the machine does not matter.
    """
    assert [part.splitlines()[0] for part in sections(page.read_text()) if not is_founded(part)] == []


def sections(text: str) -> list[str]:
    return [part for part in re.split(r"(?m)^(?=#+ )", text) if part]


def is_founded(section: str) -> bool:
    measured = (
        r"\d (?:µs|[GM]B/s|[GT]FLOP/s|tokens/s)\b|\bcommit `?[0-9a-f]{7}|\bEPYC\b|\b(?:busy|idle) cores\b"
    )
    if not re.search(measured, section) or "benchmarks.md#" in section:
        return True
    command = re.search(
        r"python -m (?:tests|loadtests|clients|kernels|pytest|timeit)\b|^\$ \S*\btime ",
        section,
        flags=re.MULTILINE,
    )
    machine = re.search(r"\bEPYC\b|\bsimulated\b|\bon any machine\b", section)
    return bool(command and machine and re.search(r"\bcommit `?[0-9a-f]{7}", section))


@pages
def test_make_has_the_targets(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|\$ )make ([\w-]+)", page.read_text()))
    assert named - targets == set()


@pages
def test_settings_exist(page: Path) -> None:
    text = page.read_text()
    in_environment = {
        name for name in re.findall(r"\bQUIRE_[A-Z_]+\b", text) if not name.startswith(OTHER_SETTINGS)
    }
    assert {name.removeprefix("QUIRE_").lower() for name in in_environment} - {"", *OPTIONS} == set()
    assigned = [re.findall(r"(\w+)=", args) for args in re.findall(r'ARGS="([^"]+)"', text)]
    assert {name for names in assigned for name in names} - OPTIONS.keys() == set()


def test_the_checks_see_what_is_wrong() -> None:
    text = (
        "`python -m loadtests.no --check` and\n$ .venv/bin/python -m engine.capacity --model x --memery 4 # y\n"
        "\n    A=1 python -m loadtests.kernels --bad\n\n"
        "```\npython -m app.launch.model_store pull --no  # x\n```\n"
    )
    assert list(commands(text)) == [
        ("loadtests.no", ["--check"]),
        ("engine.capacity", ["--model", "--memery"]),
        ("loadtests.kernels", ["--bad"]),
        ("app.launch.model_store", ["--no"]),
    ]
    kernels = source_of("loadtests.kernels")
    assert kernels == ROOT / "loadtests" / "experiments" / "kernels.py"
    assert takes(kernels, "--device")
    assert takes(kernels, "--check"), "report.py adds it"
    assert not takes(kernels, "--workloads"), "other commands have it"
    assert source_of("loadtests.no") is None
    assert source_of("app") == ROOT / "app" / "__main__.py"
    assert "test_the_checks_see_what_is_wrong" in defined_tests()
    assert sections("a\n# b\nc\n## d\n") == ["a\n", "# b\nc\n", "## d\n"]
    assert is_founded("At 5 s it ends.")
    assert not is_founded("It takes 40 µs.")
    assert not is_founded("On an AMD EPYC, at commit 0123456, it takes 40 ms.")
    assert not is_founded("`python -m tests.speed` says 40 µs.")
    assert not is_founded("`python -m tests.speed` says 40 µs at commit `0123456`.")
    assert is_founded("`python -m tests.speed` says 40 µs on an AMD EPYC at commit `0123456`.")
    assert is_founded("`python -m tests.speed` says 40 s at commit `0123456`, in simulated time.")
    assert is_founded("It takes 40 µs ([all](benchmarks.md#here)).")


def test_the_architecture_page_says_what_each_folder_holds() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().partition("\n\nEach mechanism")[0]
    named = {folder.rstrip("/") for folder in re.findall(r"`([\w/]+/)`", table)}
    packages = {
        path.parent.relative_to(ROOT).as_posix()
        for folder in ("app", "engine", "kernels")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert packages - named == set()


def error_codes() -> set[str]:
    """Codes of errors for clients: by keyword, or as the third argument of ``InvalidRequestError``."""
    codes = set()
    paths = [path for folder in ("app", "engine") for path in (ROOT / folder).rglob("*.py")]
    for path in (path for path in paths if "Error(" in path.read_text()):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            if isinstance(node.func, ast.Name) and node.func.id == "InvalidRequestError":
                given += node.args[2:3]
            codes |= {
                one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)
            }
    return codes


def test_the_page_of_the_api_lists_every_error_code() -> None:
    page = (ROOT / "docs" / "http_api.md").read_text()
    table = page.partition("| Status | Code | When |")[2].partition("\n\n")[0]
    assert {"engine_died", "invalid_grammar", "reset_failed"} <= error_codes()
    offline = {"duplicate_id"}  # an ingress gives each attempt an ID of its own
    assert error_codes() - offline - set(re.findall(r"`(\w+)`", table)) == set()
