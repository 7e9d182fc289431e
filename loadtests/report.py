"""What every measuring command does with its figures: a table, ``--json``, ``--check``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")


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

    def line(self) -> str:
        """Name, figure, bar, verdict."""
        bar = "" if self.bar is None else f"  bar {'<=' if self.at_most else '>='} {self.bar:g}"
        verdict = "" if self.bar is None else ("  ok" if self.holds else "  FAILED")
        return f"{self.name}: {self.value:.4g}{self.unit}{bar}{verdict}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that all measuring commands share."""
    parser.add_argument("--json", metavar="OUT", type=Path, help="also write every figure to this file")
    parser.add_argument("--check", action="store_true", help="exit non-zero unless every figure holds its bar")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns: the first to the left, the others to the right."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    for n, row in enumerate([header, *rows]):
        cells = [
            str(c).ljust(w) if i == 0 else str(c).rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
        if n == 0:
            print("  ".join("-" * w for w in widths))


def machine() -> dict[str, Any]:
    """Where the figures were measured."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    flags = ""
    if cpuinfo.exists():
        text = cpuinfo.read_text()
        model = next(
            (line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line), model
        )
        present = next(
            (line.split() for line in text.splitlines() if line.startswith(("flags", "Features"))), []
        )
        flags = " ".join(flag for flag in VECTOR_FLAGS if flag in present)
    where = {"cpu": model, "vector": flags, "cores": os.cpu_count(), "python": platform.python_version()}
    return where | gpu()


def gpu() -> dict[str, str]:
    """The GPU's name and the versions of what compiles for it; empty where there is none."""
    import torch  # takes seconds, and what is only simulated does not need it

    if not torch.cuda.is_available():
        return {}
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    return found | ({"triton": import_module("triton").__version__} if find_spec("triton") else {})


def save(command: str, figures: Sequence[Figure], out: Path, **extra: Any) -> None:
    """Write the JSON file."""
    rows = [{**asdict(figure), "holds": figure.holds} for figure in figures]
    document = {"command": command, "machine": machine(), "figures": rows, **extra}
    out.write_text(json.dumps(document, indent=2, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    """A number of numpy's or torch's as Python's own; JSON knows no other."""
    return value.item()


def finish(command: str, figures: Sequence[Figure], arguments: argparse.Namespace, **extra: Any) -> None:
    """Write the JSON file, print a line for each figure with a bar, and exit 1 if ``--check`` fails."""
    where = machine()
    beside = f", {where['gpu']}" if "gpu" in where else ""
    print(f"\n{command} on {where['cpu']} ({where['vector']}), {where['cores']} cores{beside}")
    if arguments.json is not None:
        save(command, figures, arguments.json, **extra)
        print(f"wrote {arguments.json}")
    for figure in figures:
        if figure.bar is not None:
            print(figure.line())
    if arguments.check and not all(figure.holds for figure in figures):
        sys.exit(1)
