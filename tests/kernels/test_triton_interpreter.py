"""Run the interpreter's cases in a child: Triton decides on its import whether kernels are interpreted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

triton = pytest.importorskip("triton", reason="Triton is published for Linux only")

CASES = Path(__file__).with_name("triton_interpreter_cases.py")
ROOT = Path(__file__).parents[2]


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@pytest.mark.skipif(
    _release(triton.__version__) < (3, 7) and _release(numpy.__version__) >= (2, 4),
    reason="Triton's interpreter before 3.7 takes loop bounds in a way that NumPy 2.4 refuses",
)
@pytest.mark.timeout(1800)  # of all cases together, on a busy machine
def test_triton_kernels_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", str(CASES), "-p", "no:cacheprovider", "--maxfail=3"]
    child = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout[-8000:] + child.stderr[-2000:]
    assert re.search(r"\d+ passed", child.stdout)


def test_a_cpu_is_refused_without_the_interpreter() -> None:
    from kernels.triton import TritonKernels

    with pytest.raises(ValueError, match="cannot run on device cpu"):
        TritonKernels("cpu")
