"""Runs each client unpatched, in an environment of its own, against one server, and writes docs/clients.md.

python -m clients.run [--url URL --model NAME] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import re
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.client import MODEL
from loadtests.cluster import application
from loadtests.report import ROOT

HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "clients.md"
LIMIT_S = 600.0
"""Of one client, on a machine that may be busy."""

HEAD = """# Clients

`make clients` starts a server, runs these clients against it, and writes this page. The clients are unpatched,
and each has its own environment (`clients/pins/`, kept in `QUIRE_CACHE` or `~/.cache/quire`).
`make clients ARGS="--url URL --model NAME"` runs them against a server that is already running. The tests also
use OpenAI's and Anthropic's own clients. Instructor's modes for other providers are omitted: with OpenAI's
client, it rejects them before it sends anything.

"""


@dataclass(frozen=True)
class Client:
    """``name`` is that of its pins and its script; ``package`` is the one whose version counts.

    ``counts`` tokens itself, so that its script also gets the folder of the model's tokenizer.
    """

    title: str
    name: str
    package: str
    counts: bool = False

    @property
    def version(self) -> str:
        """As pinned."""
        pins = (HERE / "pins" / f"{self.name}.txt").read_text()
        found = re.search(rf"^{re.escape(self.package)}==(\S+)$", pins, flags=re.MULTILINE)
        if found is None:
            raise ValueError(f"clients/pins/{self.name}.txt does not pin {self.package}")
        return found[1]

    def command(self, python: Path, url: str, model: str) -> list[str]:
        """What runs it."""
        script = [str(python), "-I", str(HERE / "scripts" / f"run_{self.name}.py"), url, model]
        return [*script, folder_of(model)] if self.counts else script


CLIENTS = (
    Client("LangChain", "langchain", "langchain-openai"),
    Client("LiteLLM", "litellm", "litellm"),
    Client("instructor", "instructor", "instructor"),
    Client("LlamaIndex", "llama_index", "llama-index-llms-openai-like"),
    Client("lm-eval", "lm_eval", "lm_eval", counts=True),
    Client("guidellm", "guidellm", "guidellm", counts=True),
    Client("aiperf", "aiperf", "aiperf", counts=True),
    Client("Schemathesis", "schemathesis", "schemathesis"),
)


def folder_of(model: str) -> str:
    """The folder of a model that this machine knows."""
    command = [sys.executable, "-m", "app.launch.model_store", "path", model]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def environment(name: str) -> Path:
    """The Python of an environment with exactly the pinned packages, made where it is not there yet."""
    pins = HERE / "pins" / f"{name}.txt"
    cache = Path(os.environ.get("QUIRE_CACHE") or Path.home() / ".cache" / "quire")
    folder = cache / "clients" / f"{name}-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        # No compiling, of which most would never be run. Pins may name a further index; where that cannot be
        # reached, every retry would delay every package.
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--retries", "1"]
        subprocess.run([*pip, "--disable-pip-version-check", "--no-deps", "-r", str(pins)], check=True)
        ready.touch()
    return python


@contextlib.contextmanager
def server(url: str) -> Iterator[str]:
    """``url``, or a server of our own."""
    if url:
        yield url
    else:
        with application(["engine_replicas=1"]) as (_, own, _):
            yield own


def run(client: Client, url: str, model: str) -> tuple[bool, str]:
    """Whether it completed, and what it printed: a line for each thing it did."""
    command = client.command(environment(client.name), url, model)
    settings = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_COLOR": "1"}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=settings)
    except subprocess.TimeoutExpired:
        return False, f"nothing after {LIMIT_S:.0f} s"
    if ended.returncode:
        return False, f"{ended.stdout}\n{ended.stderr}"[-6000:]
    return True, "; ".join(line for line in ended.stdout.splitlines() if line and "\033" not in line)


def page(rows: Sequence[tuple[Client, str]], model: str) -> str:
    """docs/clients.md."""
    table = "".join(
        f"| {client.title} | `{client.package}` {client.version} | {did} |\n" for client, did in rows
    )
    where = f"Run with Python {platform.python_version()} and the model {model}."
    return f"{HEAD}| Client | Package | What completed |\n|---|---|---|\n{table}\n{where}\n"


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 if a client failed."""
    parser = argparse.ArgumentParser(prog="python -m clients.run", description=__doc__)
    parser.add_argument("--url", default="", help="a running server; by default, one is started")
    parser.add_argument(
        "--model", default=MODEL, help="the served model, by a name that this machine knows, too"
    )
    parser.add_argument("--only", nargs="+", choices=[client.name for client in CLIENTS], help="these clients")
    options = parser.parse_args(arguments)
    chosen = [client for client in CLIENTS if not options.only or client.name in options.only]
    for client in chosen:
        environment(client.name)  # before the server, which would wait for it
    done: list[tuple[Client, str]] = []
    with server(options.url.rstrip("/")) as url:
        for client in chosen:
            completed, text = run(client, url, options.model)
            print(
                f"{client.title} {client.version}: {'completed' if completed else 'FAILED'}\n{text}\n",
                flush=True,
            )
            if completed:
                done.append((client, text))
    if len(done) == len(CLIENTS):
        PAGE.write_text(page(done, options.model))
    return int(len(done) < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
