"""The kernels' library: built once by however many processes, replaced where no compiler is, and harmless."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from kernels import cpu
from kernels.cache_dir import cache_root
from kernels.cpu import BuildError, CpuKernels, build, load_or_reference
from kernels.cpu.calls import REPLAYED
from kernels.interface import Activation
from kernels.reference import ReferenceKernels
from kernels.registry import get_kernels

ROOT = Path(__file__).parents[2]

# A library that compiles in no time; the lock, the key and the move are those of the real one.
SOURCE = 'extern "C" int answer() { return 42; }\n'
# By its file: the package around it would load torch.
LOAD = """
import importlib.util
import sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("build", sys.argv[2])
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
build.SOURCE_FOLDER = Path(sys.argv[1])
assert build.load_library().answer() == 42
"""


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCE_FOLDER", folder)
    return folder


def libraries(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "kernels").iterdir() if path.suffix != ".lock")


def test_several_processes_build_one_library(tmp_path: Path, small_source: Path) -> None:
    command = [sys.executable, "-c", LOAD, str(small_source), str(build.__file__)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    names = libraries(tmp_path)
    assert len(names) == 1
    assert names[0].endswith(".so")


def test_is_built_once_and_again_when_a_source_changes(
    tmp_path: Path, small_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build.load_library().answer() == 42
    with monkeypatch.context() as patch:
        patch.setattr(build, "_compile", lambda *_: pytest.fail("compiled a second time"))
        assert build.load_library().answer() == 42
    (small_source / "answer.cpp").write_text(SOURCE.replace("42", "43"))
    assert build.load_library().answer() == 43
    assert len(libraries(tmp_path)) == 2


def test_flags_and_cpu_are_part_of_the_name(small_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [small_source / "answer.cpp"]
    keys = {build._key(sources)}
    with monkeypatch.context() as patch:
        patch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
        keys.add(build._key(sources))
    with monkeypatch.context() as patch:
        patch.setattr(build, "_cpu_flags", lambda: "another CPU")
        keys.add(build._key(sources))
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "clang++")
        keys.add(build._key(sources))
    assert len(keys) == 4


def test_a_source_that_does_not_compile_names_itself(tmp_path: Path, small_source: Path) -> None:
    (small_source / "answer.cpp").write_text("not C++\n")
    with pytest.raises(BuildError, match=r"cannot compile answer\.cpp"):
        build.load_library()
    assert libraries(tmp_path) == []  # nothing half-made stays


def test_without_a_compiler_the_reference_runs_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    cpu._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"no C\+\+ compiler on this machine.*: install GCC") as caught:
        assert isinstance(load_or_reference(2), ReferenceKernels)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_kernels("auto", "cpu").name == "reference"
    with pytest.raises(BuildError, match="no C"):
        CpuKernels(1)


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="CXX='no-such-compiler'"):
        build.find_compilers()


def test_a_library_in_the_cache_needs_no_compiler(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build.load_library()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.load_library().answer() == 42


def test_cxx_may_have_arguments(small_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "env QUIRE_TEST='a b' g++")
    assert build.load_library().answer() == 42


def test_the_next_compiler_is_tried(small_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("false", "g++"))
    assert build.load_library().answer() == 42


def test_if_all_compilers_refuse_the_minimum_is_named(
    small_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("false", "false"))
    with pytest.raises(BuildError, match=r"false cannot compile answer.cpp[\s\S]*need GCC 11 or Clang 12"):
        build.load_library()


def test_a_cache_folder_that_cannot_be_made_is_named(
    small_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(small_source / "answer.cpp"))
    with pytest.raises(BuildError, match="set QUIRE_CACHE to a folder that can be written"):
        build.load_library()


def test_a_full_disk_is_named_and_no_other_compiler_tried(
    tmp_path: Path, small_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler's own files are in the cache folder, too: /tmp may be smaller."""
    full = tmp_path / "full"
    full.write_text(
        '#!/bin/sh\ncase "$TMPDIR" in */cache/kernels/*) ;; *) exit 1 ;; esac\n'
        'echo "fatal error: error writing to $TMPDIR/a.s: No space left on device"; exit 1\n'
    )
    full.chmod(0o755)
    monkeypatch.setattr(build, "COMPILERS", (str(full), "g++"))
    with pytest.raises(
        BuildError,
        match=r"in \S+/cache/kernels: \[Errno 28\] No space left on device; set QUIRE_CACHE .* 10 MB",
    ):
        build.load_library()
    assert libraries(tmp_path) == []
    monkeypatch.setattr(build, "COMPILERS", ("g++",))
    assert build.load_library().answer() == 42, "the next start finds nothing in its way"


def test_what_a_killed_build_left_is_deleted(tmp_path: Path, small_source: Path) -> None:
    key = build._key([small_source / "answer.cpp"])
    dead, other = (tmp_path / "cache" / "kernels" / f"cpu-{name}.build-x" for name in (key, "of-another"))
    for folder in (dead, other):
        folder.mkdir(parents=True)
        (folder / "attention.o").touch()
    assert build.load_library().answer() == 42
    assert libraries(tmp_path) == [f"cpu-{key}.so", other.name]


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setenv("QUIRE_CACHE", "/q")
    assert cache_root() == Path("/q")
    monkeypatch.setenv("QUIRE_CACHE", "~/q")
    assert cache_root() == Path.home() / "q"
    monkeypatch.delenv("QUIRE_CACHE")
    assert cache_root() == Path("/x/quire")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "quire"


def test_denormals_survive_the_loading() -> None:
    CpuKernels(2).activate_mul(torch.randn(64, 4096), Activation.SILU)  # on both threads
    tiny = torch.full((300_000,), 1e-40)
    assert (tiny * 0.5 != 0).all()
    assert float(torch.tensor(2.0**-149)) / 1.0 != 0.0


def test_the_number_of_threads_must_be_positive() -> None:
    with pytest.raises(ValueError, match="num_threads is 0"):
        CpuKernels(0)


def test_a_recording_numbers_functions_as_the_library_does() -> None:
    listed = re.findall(r"Replayed<(\w+)>::function", (build.SOURCE_FOLDER / "replay.cpp").read_text())
    assert listed == list(REPLAYED)
