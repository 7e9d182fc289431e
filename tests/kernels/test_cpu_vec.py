"""Powers and tanh of vectors: right, and defined in every lane."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kernels.cpu.build import FLAGS, SOURCE_FOLDER, _native_flags, find_compilers

# What overflows is an instruction that ends the program; that needs no library.
TRAPS = ("-fsanitize=signed-integer-overflow,shift", "-fsanitize-undefined-trap-on-error")


def test_no_lane_overflows_and_results_are_near(tmp_path: Path) -> None:
    program = tmp_path / "vec_cases"
    sources = [str(Path(__file__).with_name("vec_cases.cpp")), str(SOURCE_FOLDER / "pool.cpp")]
    flags = ["-O1" if flag == "-O3" else flag for flag in FLAGS]
    command = [*find_compilers()[0], *flags, *_native_flags(), *TRAPS, f"-I{SOURCE_FOLDER}", *sources]
    subprocess.run([*command, "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout or f"ended by signal {-done.returncode}"
