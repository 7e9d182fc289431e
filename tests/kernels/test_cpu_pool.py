"""The kernels' threads: right under company, after a fork and with several callers, and no OpenMP."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.cpu import CpuKernels
from kernels.cpu.build import FLAGS, SOURCE_FOLDER, find_compilers, load_library

ROOT = Path(__file__).parents[2]
X = torch.linspace(-3, 3, 96 * 256).view(96, 256).sin()
WEIGHT = torch.linspace(-1, 1, 700 * 256).view(700, 256).cos()


def run_alone(code: str) -> str:
    """What ``code`` prints in a process of its own, which must succeed; it may wait for a build first."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def multiply(threads: int, rows: int = 96) -> Tensor:
    kernels = CpuKernels(threads)
    return kernels.linear(X[:rows], kernels.pack_linear(WEIGHT, None))


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8"])
def test_every_number_of_threads_gives_the_same_bits(form: str) -> None:
    """More threads than cores, and then fewer than the pool holds by now; none is what memory held before."""
    x = X.bfloat16() if form == "bfloat16" else X

    def product(threads: int, rows: int) -> Tensor:
        kernels = CpuKernels(threads)
        weight = WEIGHT.to(x.dtype)
        packed = kernels.pack_codes(weight, 8, None) if form == "int8" else kernels.pack_linear(weight, None)
        del weight
        torch.full((rows, len(WEIGHT)), torch.nan, dtype=x.dtype)  # its memory is free again
        return kernels.linear(x[:rows], packed)

    for rows in (1, 96):
        expected = product(1, rows)
        assert not expected.isnan().any()
        for threads in (2, 7, 3):
            assert torch.equal(product(threads, rows), expected)


def test_many_short_jobs_in_a_row() -> None:
    kernels = CpuKernels(3)
    packed = kernels.pack_linear(WEIGHT, None)
    expected = multiply(1, 2)
    assert all(torch.equal(kernels.linear(X[:2], packed), expected) for _ in range(2000))


def test_callers_at_the_same_time_do_not_disturb_each_other() -> None:
    kernels = CpuKernels(2)
    packed = kernels.pack_linear(WEIGHT, None)
    expected = {rows: multiply(1, rows) for rows in (1, 5, 40)}
    wrong: list[int] = []

    def call(rows: int) -> None:
        wrong.extend(
            rows for _ in range(200) if not torch.equal(kernels.linear(X[:rows], packed), expected[rows])
        )

    threads = [threading.Thread(target=call, args=(rows,)) for rows in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(sys.platform != "linux", reason="moves threads between CPUs")
def test_as_many_threads_as_cpus_keep_apart() -> None:
    """Each worker has a CPU of its own, not the caller's, wherever that goes; other numbers run anywhere."""
    code = (
        "import os, torch\n"
        "from pathlib import Path\n"
        "torch.set_num_threads(1)\n"
        "from kernels.cpu import CpuKernels\n"
        "cpus = sorted(os.sched_getaffinity(0))\n"
        "x, weight = torch.ones(64, 512), torch.ones(600, 512)\n"
        "def tids(): return {int(task.name) for task in Path('/proc/self/task').iterdir()}\n"
        "def run(threads):\n"
        "    kernels = CpuKernels(threads)\n"
        "    kernels.linear(x, kernels.pack_linear(weight, None))\n"
        "def places(): return sorted(sorted(os.sched_getaffinity(worker)) for worker in workers)\n"
        "others = tids()\n"
        "run(len(cpus) + 1)\n"
        "workers = tids() - others\n"
        "assert len(workers) == len(cpus), workers\n"
        "assert places() == [cpus] * len(cpus), places()\n"
        "workers = set(sorted(workers)[:-1])\n"
        "for cpu in (cpus[0], cpus[-1], cpus[0]):\n"
        "    os.sched_setaffinity(0, {cpu})\n"
        "    run(len(cpus))\n"
        "    assert places() == [[other] for other in cpus if other != cpu], (cpu, places())\n"
    )
    run_alone(code)


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_a_forked_child_has_threads_of_its_own() -> None:
    code = (
        "import os, sys, torch\n"
        "from kernels.cpu import CpuKernels\n"
        "torch.set_num_threads(1)\n"
        "kernels = CpuKernels(2)\n"
        "packed = kernels.pack_linear(torch.ones(600, 512), None)\n"
        "x = torch.ones(64, 512)\n"
        "def right(): return all(bool((kernels.linear(x, packed) == 512).all()) for _ in range(20))\n"
        "assert right()\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0 if right() else 1)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and right()\n"
    )
    run_alone(code)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits a process's memory")
def test_memory_that_runs_out_is_an_error_of_the_call() -> None:
    """On one thread and on two."""
    code = (
        "import resource, torch\n"
        # float32: products of bf16 are left to the processor where it has instructions for them
        "from kernels.cpu import CpuKernels\n"
        "x, weight = torch.zeros(64, 1 << 20), torch.zeros(8, 1 << 20)\n"
        "both = [(one, one.pack_linear(weight, None)) for one in (CpuKernels(1), CpuKernels(2))]\n"
        "for kernels, packed in both: kernels.linear(x[:1], packed)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, -1))\n"
        "for kernels, packed in both:\n"
        "    try: kernels.linear(x, packed)\n"
        "    except MemoryError as error: print(error)\n"
    )
    assert run_alone(code) == 2 * "no memory for the product of 64 rows of 1048576\n"


def test_the_library_uses_no_openmp_runtime() -> None:
    """Torch has one; a second pool that waits at barriers would fight for the cores."""
    library = Path(load_library()._name).read_bytes()
    assert not any(name in library for name in (b"GOMP_", b"__kmpc_", b"omp_get"))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of ``pool_cases.cpp``."""
    program = tmp_path_factory.mktemp("pool") / "pool_cases"
    flags = ["-O1" if flag == "-O3" else flag for flag in FLAGS]
    source = Path(__file__).with_name("pool_cases.cpp")
    command = [*find_compilers()[0], *flags, f"-I{SOURCE_FOLDER}", str(source), "-o", str(program), "-ldl"]
    subprocess.run(command, check=True)
    return program


def run_case(cases: Path, name: str) -> None:
    done = subprocess.run([cases, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="replaces functions of the C library")
@pytest.mark.parametrize("name", ["no-thread", "two-threads", *(f"memory-{count}" for count in range(7))])
def test_a_job_without_all_of_its_threads_is_done_by_the_others(cases: Path, name: str) -> None:
    """However early threads, or the memory to start them, run out. The caller's signals stay as they were."""
    run_case(cases, name)


@pytest.mark.skipif(sys.platform != "linux", reason="replaces functions of the C library")
def test_a_job_within_a_job_runs_on_the_thread_that_starts_it(cases: Path) -> None:
    run_case(cases, "nested")
