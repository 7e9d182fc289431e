"""Compile the C++ kernels once for this machine, and load them.

All ``*.cpp`` of this folder become one shared library with a plain C interface. It is kept in the user's cache
folder under a hash of what it depends on: sources, flags, CPU and CXX.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kernels.cache_dir import cache_root

logger = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
MINIMUM = "GCC 11 or Clang 12"
ROOM_MB = 10
"""In which a build has room; its files take 3 MB for a while, and the library 1 MB."""
# Never -ffast-math or -Ofast: linked into a shared library they set flush-to-zero for the whole process.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)


class BuildError(RuntimeError):
    """There is no compiler, or it refused; the message says which and what it printed."""


def find_compilers() -> list[list[str]]:
    """Commands that may compile: ``$CXX`` if set, else those of ``g++``, ``c++`` and ``clang++`` on the path.

    Raises :class:`BuildError` where there is none.
    """
    wanted = os.environ.get("CXX")
    if wanted:
        command = shlex.split(wanted)
        if command and shutil.which(command[0]):
            return [command]
        raise BuildError(f"CXX={wanted!r} is not a command on this machine; unset it or name a C++ compiler")
    found = [[name] for name in COMPILERS if shutil.which(name)]
    if not found:
        raise BuildError(
            f"no C++ compiler on this machine (tried {', '.join(COMPILERS)}): install {MINIMUM}, or name one "
            "in CXX"
        )
    return found


def load_library() -> ctypes.CDLL:
    """The compiled kernels, built first if this machine has no copy yet, which takes half a minute or so.

    Only a build needs a compiler; the first one that can compile the sources does it. While one process builds,
    others wait for its library. Raises :class:`BuildError`.
    """
    sources = sorted(SOURCE_FOLDER.glob("*.cpp"))
    folder = cache_root() / "kernels"
    target = folder / f"cpu-{_key(sources)}.so"
    try:
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / f"{target.stem}.lock"):
                if not target.exists():
                    _build(sources, target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(
            f"cannot keep or load the compiled kernels in {folder}: {error}; set QUIRE_CACHE to a folder that "
            f"can be written and has {ROOM_MB} MB of room"
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, and so does the end of the process


def _native_flags() -> list[str]:
    arm = platform.machine().lower() in ("arm64", "aarch64")
    return ["-mcpu=native"] if arm else ["-march=native"]


def _key(sources: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    parts = [os.environ.get("CXX", ""), *FLAGS, *_native_flags(), platform.machine(), _cpu_flags()]
    for path in [*sources, *sorted(SOURCE_FOLDER.glob("*.h"))]:
        parts += [path.name, path.read_text()]
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


def _cpu_flags() -> str:
    """What ``native`` means here: machines with different CPUs may share a cache folder."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = ("flags", "Features", "model name", "CPU implementer", "CPU part")
        found = {line for line in lines if line.startswith(wanted)}
        return "\n".join(sorted(found))
    return platform.processor()


def _build(sources: list[Path], target: Path) -> None:
    """Compile with the first compiler that succeeds."""
    logger.warning("compiling the CPU kernels for this machine, once; this takes a minute or so")
    refused = []
    for compiler in find_compilers():
        try:
            return _compile(compiler, sources, target)
        except BuildError as error:
            refused.append(str(error))
    raise BuildError("\n".join([*refused, f"the kernels need {MINIMUM}: install one, or name it in CXX"]))


def _compile(compiler: list[str], sources: list[Path], target: Path) -> None:
    """Compile the sources side by side, link them and move the library into place; the caller holds its lock.

    Raises:
        OSError: there was no room for the files.
    """
    name, prefix = " ".join(compiler), f"{target.stem}.build-"
    for dead in target.parent.glob(f"{prefix}*"):  # of a process that was killed
        shutil.rmtree(dead, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as folder:
        scratch = Path(folder)
        flags = [*FLAGS, *_native_flags()]
        objects = [scratch / f"{source.stem}.o" for source in sources]
        jobs = [
            _start([*compiler, *flags, "-c", str(source), "-o", str(output)], scratch)
            for source, output in zip(sources, objects, strict=True)
        ]
        printed = [job.communicate()[0] for job in jobs]
        for job, source, text in zip(jobs, sources, printed, strict=True):
            if job.returncode != 0:
                raise _failed(f"{name} cannot compile {source.name}", text)
        library = scratch / target.name
        link = _start([*compiler, *flags, "-shared", *map(str, objects), "-o", str(library)], scratch)
        text = link.communicate()[0]
        if link.returncode != 0:
            raise _failed(f"{name} cannot link the kernels", text)
        with library.open("rb") as file:
            os.fsync(file.fileno())  # else a crash of the machine could leave an empty file under the name
        library.replace(target)


def _failed(what: str, printed: str) -> Exception:
    """What to raise: another compiler would do no better where there is no room."""
    full = os.strerror(errno.ENOSPC)
    return OSError(errno.ENOSPC, full) if full in printed else BuildError(f"{what}:\n{printed.strip()}")


def _start(command: list[str], scratch: Path) -> subprocess.Popen[str]:
    # In English, for `_failed`; and not in /tmp, which may be small.
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(scratch)}
    try:
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
