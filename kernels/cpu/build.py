"""Compile the C++ kernels once for this machine, and load them.

All ``*.cpp`` of this folder become one shared library with a plain C interface. It is kept in the user's cache
folder under a name made from everything it depends on: sources, flags, compiler and CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
# Never -ffast-math or -Ofast: linked into a shared library they set flush-to-zero for the whole process.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)


class BuildError(RuntimeError):
    """There is no compiler, or it refused; the message says which and what it printed."""


def find_compiler() -> str:
    """The C++ compiler: ``$CXX`` if set, else the first of ``g++``, ``c++`` and ``clang++`` on the path.

    Raises :class:`BuildError` where there is none.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        if shutil.which(name):
            return name
    if wanted:
        raise BuildError(f"CXX={wanted!r} is not a command on this machine; unset it or name a C++ compiler")
    raise BuildError(f"no C++ compiler on this machine (tried {', '.join(COMPILERS)}; CXX names another)")


def cache_folder() -> Path:
    """``$QUIRE_CACHE``, else ``$XDG_CACHE_HOME/quire``, else ``~/.cache/quire``."""
    if folder := os.environ.get("QUIRE_CACHE"):
        return Path(folder)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "quire"
    return Path.home() / ".cache" / "quire"


def load_library() -> ctypes.CDLL:
    """The compiled kernels, built first if this machine has no copy yet (some seconds, once).

    Processes that ask at the same time build one after the other, and all but the first find it done. Raises
    :class:`BuildError`.
    """
    compiler = find_compiler()
    sources = sorted(SOURCE_FOLDER.glob("*.cpp"))
    folder = cache_folder() / "kernels"
    target = folder / f"cpu-{_key(compiler, sources)}.so"
    try:
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / f"{target.stem}.lock"):
                if not target.exists():
                    _compile(compiler, sources, target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(
            f"cannot keep or load the compiled kernels in {folder}: {error}; QUIRE_CACHE names another folder"
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, and so does the end of the process


def _native_flags() -> list[str]:
    arm = platform.machine().lower() in ("arm64", "aarch64")
    return ["-mcpu=native"] if arm else ["-march=native"]


def _key(compiler: str, sources: list[Path]) -> str:
    version = _run([compiler, "--version"]).stdout
    digest = hashlib.blake2b(digest_size=12)
    parts = [*FLAGS, *_native_flags(), version, platform.machine(), _cpu_flags()]
    for path in [*sources, *sorted(SOURCE_FOLDER.glob("*.h"))]:
        parts += [path.name, path.read_text()]
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def _cpu_flags() -> str:
    """What ``native`` means here, so that a cache folder shared by unlike machines serves each its own."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = ("flags", "Features", "model name", "CPU implementer", "CPU part")
        found = {line for line in lines if line.startswith(wanted)}
        return "\n".join(sorted(found))
    return platform.processor()


def _compile(compiler: str, sources: list[Path], target: Path) -> None:
    """Compile the sources side by side, link them and move the library into place."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as name:
        scratch = Path(name)
        flags = [*FLAGS, *_native_flags()]
        objects = [scratch / f"{source.stem}.o" for source in sources]
        jobs = [
            subprocess.Popen(
                [compiler, *flags, "-c", str(source), "-o", str(output)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for source, output in zip(sources, objects, strict=True)
        ]
        printed = [job.communicate()[0] for job in jobs]
        for job, source, text in zip(jobs, sources, printed, strict=True):
            if job.returncode != 0:
                raise BuildError(f"{compiler} cannot compile {source.name}:\n{text.strip()}")
        library = scratch / target.name
        linked = _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(library)])
        if linked.returncode != 0:
            raise BuildError(f"{compiler} cannot link the kernels:\n{(linked.stdout + linked.stderr).strip()}")
        library.replace(target)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
