"""vLLM's server beside ours, both under vLLM's client: ``python -m loadtests.throughput --http --peer vllm``.

Each workload runs on both servers in turn, with the same fresh prompts. vLLM's stands still while ours works,
since its threads may spin.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path

from tqdm import tqdm

from app.launch.port_block import PortBlock
from loadtests.client import MODEL
from loadtests.cluster import application, running
from loadtests.experiments.peers.process import VLLM_SCRIPT, PeerError
from loadtests.locust_run import answers
from loadtests.report import Figure, finish
from loadtests.stats import median

RANDOM = "random --random-input-len {} --random-output-len {} --num-prompts {} --max-concurrency {}"
PREFIXES = (
    "prefix_repetition --prefix-repetition-prefix-len 512 --prefix-repetition-suffix-len 128 --num-prompts 48"
)
PREFIXES += " --prefix-repetition-num-prefixes 4 --prefix-repetition-output-len 64 --max-concurrency 16"
# Title, data of the client, and the least ratio of output; without one only the time to the first token counts.
WORKLOADS: dict[str, tuple[str, str, float | None]] = {
    "A": ("48 x (512 of 4 prefixes + 128) in, 64 out, 16 at once", PREFIXES, 1.3),
    "B": ("64 x 256 in, 64 out, 32 at once", RANDOM.format(256, 64, 64, 32), 1.3),
    "C": ("4 x 64 in, 128 out, one at once", RANDOM.format(64, 128, 4, 1), 2.0),
} | {str(n): (f"one prompt of {n:,}", RANDOM.format(n, 2, 3, 1), None) for n in (500, 1000, 2000, 3800)}
DEPLOYMENTS = {"one engine": ["engine_replicas=1"], "two engines": ["engine_replicas=2"]}
MEASURES = {"output_throughput": " tokens/s", "median_ttft_ms": " ms", "p99_ttft_ms": " ms"}
VLLM_OPTIONS = "--dtype bfloat16 --max-model-len 4096 --max-num-seqs 64 --host 127.0.0.1 --port"
Result = dict[str, float]


def run_client(peers: Path, url: str, model: str, data: str, seed: int) -> Result:
    """One run of vLLM's client. Raises :class:`PeerError` if it fails, or one of its requests."""
    with tempfile.TemporaryDirectory() as folder:
        of = f"--backend openai --base-url {url} --model {model} --tokenizer smol_hf --ignore-eos --seed {seed}"
        to = f"--save-result --result-dir {folder} --result-filename result.json"
        command = ["bash", VLLM_SCRIPT, "vllm", "bench", "serve", *f"{of} {to} --dataset-name {data}".split()]
        ran = subprocess.run(command, cwd=peers, capture_output=True, text=True, check=False)
        made = Path(folder) / "result.json"
        result: Result = json.loads(made.read_text()) if made.exists() else {"failed": -1}
    if ran.returncode or result["failed"] or not result["completed"]:
        raise PeerError(
            f"{result['failed']:g} requests to {url} failed:\n{ran.stdout[-500:]}{ran.stderr[-2000:]}"
        )
    return {measure: result[measure] for measure in MEASURES}


def figures_of(name: str, bar: float | None, rounds: list[tuple[Result, Result]], barred: bool) -> list[Figure]:
    """Medians of ours and of theirs, and of their ratios, with the ratios' spread."""
    figures = []
    for measure in MEASURES if bar else ["median_ttft_ms"]:
        what = f"{name}, {measure.removesuffix('_ms')}"
        for side, of in enumerate(("ours", "vLLM")):
            middle = median([one[side][measure] for one in rounds])
            figures.append(Figure(f"{what}, {of}", middle, MEASURES[measure]))
        ratios = [ours[measure] / theirs[measure] for ours, theirs in rounds]
        limit = {"median_ttft_ms": 0.5 if bar else 0.85, "p99_ttft_ms": 1.0}.get(measure, bar)
        title = f"{what}, ours / vLLM ({min(ratios):.2f} to {max(ratios):.2f})"
        figures.append(Figure(title, median(ratios), "x", limit if barred else None, at_most="ttft" in measure))
    return figures


def compare(arguments: argparse.Namespace) -> None:
    figures: list[Figure] = []
    peers, ports, seed = Path(arguments.peers).absolute(), PortBlock(), 0
    if not (peers / "vllm" / ".ready").exists():
        raise SystemExit(f"{peers} has no vLLM: name the folder of the peers with --peers or QUIRE_PEERS")
    port = ports.take()
    theirs, command = f"http://127.0.0.1:{port}", f"vllm serve smol_hf {VLLM_OPTIONS} {port}"
    with running(["bash", VLLM_SCRIPT, *command.split()], lambda: answers(theirs), cwd=peers) as vllm:
        for deployment in arguments.deployments:
            rounds: dict[str, list[tuple[Result, Result]]] = {key: [] for key in arguments.served}
            os.killpg(vllm.pid, signal.SIGSTOP)
            options = f"model={MODEL} served_model_name=ours dtype=bfloat16 weights=model speculation=0".split()
            with application([*options, *DEPLOYMENTS[deployment]]) as (_, url, _):
                for key in tqdm(arguments.served * arguments.rounds, unit="run", desc=deployment):
                    seed += 1
                    ours = run_client(peers, url, "ours", WORKLOADS[key][1], seed)
                    os.killpg(vllm.pid, signal.SIGCONT)
                    rounds[key].append((ours, run_client(peers, theirs, "smol_hf", WORKLOADS[key][1], seed)))
                    os.killpg(vllm.pid, signal.SIGSTOP)
            for key, pairs in rounds.items():
                title, _, bar = WORKLOADS[key]
                figures += figures_of(f"({key}) {title}, {deployment}", bar, pairs, deployment == "one engine")
            os.killpg(vllm.pid, signal.SIGCONT)
    ports.release()
    title = f"over HTTP, median of {arguments.rounds}"
    finish("loadtests.throughput --http --peer vllm", figures, arguments, title)
