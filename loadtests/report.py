"""What every measuring command does with its figures: tables, ``--json``, ``--check``.

Machine and commit stand below each table and in each file: a figure without them says nothing.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
WORKERS = (os.cpu_count() or 1, "runs at the same time")
"""The option ``--workers``."""
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
Run = TypeVar("Run")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number and, if it must hold, its bar.

    ``bar`` is the least allowed value, or the most where ``at_most`` is set.
    """

    name: str
    value: float
    unit: str = ""
    bar: float | None = None
    at_most: bool = False

    @property
    def holds(self) -> bool:
        """Whether the figure is on the right side of its bar (true where it has none)."""
        if self.bar is None:
            return True
        return bool(self.value <= self.bar if self.at_most else self.value >= self.bar)

    def verdict(self) -> str:
        """The bar, and whether it holds; empty without a bar. A miss fails the run only with ``--check``."""
        if self.bar is None:
            return ""
        return f"  bar {'<=' if self.at_most else '>='} {self.bar:g}  {'ok' if self.holds else 'missed'}"

    def line(self) -> str:
        return f"{self.name}: {self.value:.4g}{self.unit}{self.verdict()}"


def most(name: str, value: float, bar: float = 0, unit: str = "") -> Figure:
    """A figure that must not exceed its bar; without one, of which there must be none."""
    return Figure(name, value, unit, bar, at_most=True)


def parse(
    command: str,
    description: str | None,
    options: Mapping[str, tuple[Any, str]] | None = None,
    argv: Sequence[str] | None = None,
) -> argparse.Namespace:
    """The arguments of ``python -m loadtests.COMMAND``; ``options`` have a default and a meaning each.

    The default says what an option takes: nothing (``False``: a flag), words or numbers of its type, one or
    more of them where it is a list, one of a tuple, whose first is the default, some keys of a mapping
    (all by default). A number must be above 0 where its default is.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {command if '.' in command else f'loadtests.{command}'}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="OUT", type=Path, help="also write every figure to this file")
    parser.add_argument("--check", action="store_true", help="exit non-zero unless every figure meets its bar")
    for name, (default, meaning) in (options or {}).items():
        if default is False:
            parser.add_argument(name, action="store_true", help=meaning)
        elif isinstance(default, Mapping):
            names, text = list(default), f"{meaning}: {', '.join(default)}"
            parser.add_argument(name, nargs="+", choices=names, default=names, metavar="NAME", help=text)
        elif isinstance(default, tuple):
            parser.add_argument(name, choices=default, default=default[0], help=f"{meaning} (%(default)s)")
        else:
            several = isinstance(default, list)
            parser.add_argument(
                name,
                type=_reader(next(iter(default), "") if several else default),
                nargs=("+" if name.startswith("-") else "*") if several else None,
                default=default,
                help=meaning if default in ("", []) else f"{meaning} (%(default)s)",
            )
    return parser.parse_args(argv)


def _reader(default: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = type(default)(text)
        if isinstance(default, int | float) and default > 0 and not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
        return value

    read.__name__ = type(default).__name__  # argparse names it where a value is refused
    return read


def experiment(name: str) -> None:
    """Run ``loadtests.experiments.NAME``; exit with one line where an installed wheel has none."""
    try:
        module = import_module(f"loadtests.experiments.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("loadtests.experiments"):
            raise
        sys.exit("this command is an experiment; the wheel has none: run it in a checkout of the repository")
    module.main()


def in_processes(call: Callable[[Run], Result], runs: Sequence[Run], workers: int) -> list[Result]:
    """What came of each run, in their order, with a progress bar where somebody watches.

    ``call`` and the runs must be picklable: they go to fresh processes, unless there is one worker only.
    """
    watched = functools.partial(tqdm, total=len(runs), unit="run", disable=None)
    if min(workers, len(runs)) <= 1:
        return list(watched(map(call, runs)))
    with get_context("spawn").Pool(min(workers, len(runs))) as pool:
        return list(watched(pool.imap(call, runs, chunksize=1)))


def print_figures(header: str, figures: Sequence[Figure]) -> None:
    """All of them as a table, with bars and verdicts, and where they were measured."""
    rows = [(header, "figure", ""), *((f.name, f"{f.value:.4g}{f.unit}", f.verdict()) for f in figures)]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, verdict in (rows[0], ("-" * first, "-" * second, ""), *rows[1:]):
        print(f"{name:<{first}}  {value:>{second}}{verdict}")
    print(f"[{where()}]")


def where() -> str:
    on = machine()
    gpu = f", {on['gpu']}" if "gpu" in on else ""
    return f"{on['cpu']} ({on['vector']}), {on['cores']} cores{gpu}; commit {commit()}"


@functools.cache
def commit() -> str:
    """The checkout's, marked if it has changes; the version where Quire is installed from a wheel."""
    if not (ROOT / ".git").exists():
        return f"of version {importlib.metadata.version('quire')}"
    git = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False)
    changed = git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    return str(git(["git", "rev-parse", "--short=10", "HEAD"]).stdout.strip()) + ("+changes" if changed else "")


@functools.cache
def machine() -> dict[str, Any]:
    model, flags = platform.processor(), ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), model)
        present = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
        flags = " ".join(flag for flag in VECTOR_FLAGS if flag in present)
    on = {"cpu": model, "vector": flags, "cores": os.cpu_count(), "python": platform.python_version()}
    return on | gpu()


def gpu() -> dict[str, str]:
    """The GPU's name and the versions of what compiles for it; empty where there is none."""
    if not Path("/proc/driver/nvidia").exists() and "torch" not in sys.modules:
        return {}  # torch takes seconds to import, and what is only simulated does not need it
    import torch

    if not torch.cuda.is_available():
        return {}
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    return found | ({"triton": import_module("triton").__version__} if find_spec("triton") else {})


def save(command: str, figures: Sequence[Figure], out: Path, **extra: Any) -> None:
    rows = [{**asdict(figure), "holds": figure.holds} for figure in figures]
    document = {"command": command, "machine": machine(), "commit": commit(), "figures": rows, **extra}
    out.write_text(json.dumps(document, indent=2, default=_plain) + "\n")


def missed(out: Path) -> list[str]:
    """The figures in a JSON file that miss their bars, a line each; or that the command has not got so far."""
    if not out.exists():
        return ["it ended before it had figures; its output above says why"]
    rows = [row for row in json.loads(out.read_text())["figures"] if not row.pop("holds")]
    lines = [Figure(**row).line().removesuffix("  missed") for row in rows]
    return [*lines, f"all its figures are in {out}"]


def _plain(value: Any) -> Any:
    """A number of numpy's or torch's as Python's own; JSON knows no other."""
    return value.item()


def finish(
    command: str, figures: Sequence[Figure], arguments: argparse.Namespace, title: str = "", **extra: Any
) -> None:
    """Print a table with a title, else the bars; write the JSON file; exit 1 if ``--check`` fails."""
    if title:
        print_figures(title, figures)
    else:
        print(f"\n{command} on {where()}", *(one.line() for one in figures if one.bar is not None), sep="\n")
    if arguments.json is not None:
        save(command, figures, arguments.json, **extra)
        print(f"wrote {arguments.json}")
    if arguments.check and not all(figure.holds for figure in figures):
        sys.exit(1)
