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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from loadtests.experiments.rivals import Prompts, Side, Workload

VLLM, LLAMA_CPP = "vLLM", "llama.cpp Q4_1"
SCRIPT = Path(__file__).with_name("offline.py")


class PeerError(Exception):
    """A peer's process ended or answered something else."""


class PeerProcess:
    """Runs workloads in a peer's interpreter; one at a time."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        self._name = name
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | environment,
                text=True,
            )

    def __call__(self, workload: Workload, prompts: Prompts) -> int:
        """See ``Side``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "output": workload.output}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the empty answer below says that the process has ended
        answer = self._process.stdout.readline()
        if not answer.strip().isdigit():
            raise PeerError(f"{self._name} did not answer; its log is {self._log}")
        self._process.send_signal(signal.SIGSTOP)  # its threads may spin between runs, on the others' cores
        return int(answer)

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def environment_of(peers: Path, name: str) -> Path | None:
    """The interpreter of a peer's environment; none if it is not complete."""
    interpreter = peers / name / "bin" / "python"
    return interpreter if (peers / name / ".ready").exists() and interpreter.exists() else None


def vllm_command(peers: Path, threads: int) -> tuple[list[str], dict[str, str]] | None:
    """With the allocator and the OpenMP library that its makers advise for a CPU."""
    python = environment_of(peers, "vllm")
    if python is None:
        return None
    preloaded = [
        *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))[:1],
        *sorted((peers / "vllm").rglob("libiomp5.so"))[:1],
    ]
    return [str(python), str(SCRIPT), "vllm", str(peers / "smol_hf"), str(threads)], {
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{peers / 'vllm' / 'bin'}:{os.environ.get('PATH', '')}",
    }


def llama_cpp_command(peers: Path, threads: int) -> tuple[list[str], dict[str, str]] | None:
    """With the weights that it is used with: four bits and a scale, a quarter of the bytes of bfloat16."""
    python = environment_of(peers, "llamacpp")
    weights = next((peers / "smol").rglob("*.gguf"), None)
    if python is None or weights is None:
        return None
    return [str(python), str(SCRIPT), "llama.cpp", str(weights), str(threads)], {}


COMMANDS: dict[str, Callable[[Path, int], tuple[list[str], dict[str, str]] | None]] = {
    VLLM: vllm_command,
    LLAMA_CPP: llama_cpp_command,
}


@contextmanager
def peer_processes(folder: str | None, threads: int, logs: Path) -> Iterator[dict[str, Side]]:
    """The peers of ``folder``, started; says on standard error which are absent."""
    with ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, command_of in COMMANDS.items():
            command = command_of(Path(folder), threads) if folder else None
            if command is None:
                print(f"{name} is left out: QUIRE_PEERS names no folder that has it", file=sys.stderr)
                continue
            log = logs / f"{name.split()[0].lower()}.log"
            sides[name] = peer = PeerProcess(name, *command, log)
            stack.callback(peer.stop)
        yield sides
