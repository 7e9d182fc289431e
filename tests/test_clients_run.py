"""``clients.run`` without a server, a network or an environment: what it installs, runs, reports and writes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clients import run as clients

LANGCHAIN = clients.CLIENTS[0]


def test_each_client_has_a_script_and_exact_pins() -> None:
    names = {client.name for client in clients.CLIENTS}
    assert {path.stem for path in (clients.HERE / "pins").glob("*")} == names
    assert {path.stem.removeprefix("run_") for path in (clients.HERE / "scripts").glob("*.py")} == names
    for client in clients.CLIENTS:
        lines = (clients.HERE / "pins" / f"{client.name}.txt").read_text().splitlines()
        others = [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.+]+", line)]
        assert others in ([], ["--extra-index-url https://download.pytorch.org/whl/cpu"])
        assert f"{client.package}=={client.version}" in lines


def test_a_client_that_counts_tokens_gets_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    client = clients.Client("lm-eval", "lm_eval", "lm_eval", counts=True)
    script = str(clients.HERE / "scripts" / "run_lm_eval.py")
    found = subprocess.CompletedProcess([], 0, stdout="/models/tiny\n")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: found if command[-1] == "tiny" else None)
    command = client.command(Path("/python"), "http://there", "tiny")
    assert command == ["/python", "-I", script, "http://there", "tiny", "/models/tiny"]


def test_a_client_without_a_pin_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"clients/pins/langchain\.txt does not pin openai-like"):
        _ = clients.Client("LangChain", "langchain", "openai-like").version


def test_the_page_names_the_pinned_versions() -> None:
    """Whoever changes a pin runs ``make clients`` again."""
    rows = re.findall(r"^\| (.+?) \| `(.+?)` (\S+) \| .+ \|$", clients.PAGE.read_text(), flags=re.MULTILINE)
    assert rows == [(client.title, client.package, client.version) for client in clients.CLIENTS]


def test_the_page() -> None:
    text = clients.page([(LANGCHAIN, "invoke; stream")], "tiny")
    assert (
        f"\n|---|---|---|\n| LangChain | `langchain-openai` {LANGCHAIN.version} | invoke; stream |\n\n" in text
    )
    assert " and the model tiny.\n" in text


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands that install packages; nothing runs."""
    ran: list[list[str]] = []
    (tmp_path / "pins").mkdir()
    (tmp_path / "pins" / "some.txt").write_text("some==1\n")
    monkeypatch.setattr(clients, "HERE", tmp_path)
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(clients.venv, "create", lambda folder, **_: folder.mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(subprocess, "run", lambda command, **_: ran.append(command))
    return ran


def test_an_environment_is_made_once_for_its_pins(installs: list[list[str]], tmp_path: Path) -> None:
    python = clients.environment("some")
    assert python.is_relative_to(tmp_path / "cache" / "clients")
    assert clients.environment("some") == python
    assert [command[0] for command in installs] == [str(python)]
    assert installs[0][-3:] == ["--no-deps", "-r", str(tmp_path / "pins" / "some.txt")]
    (tmp_path / "pins" / "some.txt").write_text("some==2\n")
    assert clients.environment("some") != python
    assert len(installs) == 2


def test_an_environment_whose_installation_failed_is_made_again(
    installs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command)

    with monkeypatch.context() as failing:
        failing.setattr(subprocess, "run", fail)
        with pytest.raises(subprocess.CalledProcessError):
            clients.environment("some")
    clients.environment("some")
    assert len(installs) == 1


@pytest.mark.parametrize(
    ("status", "out", "expected"),
    [
        (0, "invoke\n\n\033[1mnews\033[0m\nstream\n", (True, "invoke; stream")),
        (1, "invoke\n", (False, "invoke\n\nTraceback")),
    ],
)
def test_what_a_client_did(
    status: int, out: str, expected: tuple[bool, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.CompletedProcess([], status, stdout=out, stderr="Traceback" if status else "warning")
    commands: list[list[str]] = []
    monkeypatch.setattr(clients, "environment", lambda name: Path("/of") / name)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command) or ended)
    assert clients.run(LANGCHAIN, "http://there", "tiny") == expected
    script = str(clients.HERE / "scripts" / "run_langchain.py")
    assert commands == [["/of/langchain", "-I", script, "http://there", "tiny"]]


def test_a_client_that_hangs_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(clients, "environment", Path)
    monkeypatch.setattr(subprocess, "run", hang)
    assert clients.run(LANGCHAIN, "http://there", "tiny") == (False, "nothing after 600 s")


@pytest.mark.parametrize(
    ("arguments", "failing", "ran", "status", "written"),
    [
        ([], "", [client.name for client in clients.CLIENTS], 0, True),
        ([], "litellm", [client.name for client in clients.CLIENTS], 1, False),
        (["--only", "litellm"], "", ["litellm"], 0, False),
        (["--only", "litellm"], "litellm", ["litellm"], 1, False),
    ],
)
def test_the_page_is_written_when_every_client_completed(
    arguments: list[str],
    failing: str,
    ran: list[str],
    status: int,
    written: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    against: list[tuple[str, str]] = []

    @contextmanager
    def application(options: list[str]) -> Iterator[tuple[None, str, str]]:
        yield None, "http://own", ""

    def run(client: clients.Client, url: str, model: str) -> tuple[bool, str]:
        against.append((client.name, url))
        return client.name != failing, "invoke"

    monkeypatch.setattr(clients, "PAGE", tmp_path / "clients.md")
    monkeypatch.setattr(clients, "application", application)
    monkeypatch.setattr(clients, "environment", Path)
    monkeypatch.setattr(clients, "run", run)
    assert clients.main(arguments) == status
    assert against == [(name, "http://own") for name in ran]
    assert clients.PAGE.exists() == written
    against.clear()
    assert clients.main([*arguments, "--url", "http://there/"]) == status
    assert {url for _, url in against} == {"http://there"}
