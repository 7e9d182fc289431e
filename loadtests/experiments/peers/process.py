"""A peer in a process and an environment of its own, as a side of the comparison of throughput.

``QUIRE_PEERS`` names a folder with one virtual environment for each peer (``vllm``, ``llamacpp``) and the
bundled model in the form that they read (``smol_hf``; ``smol`` with the GGUF file). Peers whose environment is
absent are left out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from loadtests.experiments.rivals import Prompts, Side, Workload

VLLM, LLAMA_CPP = "vLLM", "llama.cpp Q4_1"
SCRIPT = Path(__file__).with_name("offline.py")
VLLM_SCRIPT = str(Path(__file__).with_name("vllm.sh"))


class PeerError(Exception):
    """A peer's process ended or answered something else."""


class PeerProcess:
    """Runs workloads in a peer's interpreter; one at a time."""

    def __init__(self, name: str, command: list[str], folder: Path, threads: int, log: Path) -> None:
        self._name = name
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                env=os.environ | {"OMP_NUM_THREADS": str(threads), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
                text=True,
            )

    def __call__(self, workload: Workload, prompts: Prompts) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # the empty answer below says that the process has ended
            self._process.stdin.write(json.dumps({"prompts": prompts, "output": workload.output}) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer.strip().isdigit():
            raise PeerError(f"{self._name} did not answer; its log is {self._log}")
        self._process.send_signal(signal.SIGSTOP)  # its threads may spin between runs, on the others' cores
        return int(answer)

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def command_of(name: str, peers: Path, threads: int) -> list[str] | None:
    """A peer's command, to be run in the folder ``peers``; none if its own environment is not complete."""
    folder = peers / ("vllm" if name == VLLM else "llamacpp")
    model = peers / "smol_hf" if name == VLLM else next((peers / "smol").rglob("*.gguf"), None)
    if not (folder / ".ready").exists() or model is None:
        return None
    if name == VLLM:
        return ["bash", VLLM_SCRIPT, "python", str(SCRIPT), "vllm", str(model), str(threads)]
    return [str(folder / "bin" / "python"), str(SCRIPT), "llama.cpp", str(model), str(threads)]


@contextmanager
def peer_processes(folder: str | None, threads: int, logs: Path) -> Iterator[dict[str, Side]]:
    """The peers of ``folder``, started; says on standard error which are absent."""
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name in (VLLM, LLAMA_CPP):
            peers = Path(folder or os.devnull).absolute()
            command = command_of(name, peers, threads)
            if command is None:
                print(f"{name} is left out: QUIRE_PEERS names no folder that has it", file=sys.stderr)
                continue
            log = logs / f"{name.split()[0].lower()}.log"
            sides[name] = peer = PeerProcess(name, command, peers, threads, log)
            stack.callback(peer.stop)
        yield sides
