"""Our engine beside its rivals, or beside itself behind HTTP, in one run.

``python -m loadtests.throughput`` takes turns: each round runs every workload on every side with the same fresh
random prompts, and the medians over the rounds are compared. A side is a function of workload and prompts that
returns the tokens it made. ``transformers.generate`` runs static batches of 32, in bfloat16 or float32: the one
that is faster for the workload in a short warm-up. Where ``QUIRE_PEERS`` names a folder with their
environments, vLLM and llama.cpp take part (see :mod:`loadtests.experiments.peers.process`). llama.cpp's binding
has no batches, so it runs only workloads of one request.

``python -m loadtests.throughput --http`` compares one engine behind the whole HTTP path with the same engine
used offline (see :mod:`loadtests.experiments.http_path`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from app.launch.model_store import resolve
from engine import LLM
from loadtests.experiments.peers.process import LLAMA_CPP, peer_processes
from loadtests.experiments.rivals import (
    OURS,
    PEER_DTYPES,
    TRANSFORMERS,
    WORKLOADS,
    Side,
    Transformers,
    Workload,
    run_ours,
    tokens_per_second,
)
from loadtests.report import Figure, add_arguments, finish, print_table
from loadtests.stats import median, ratio, spread


def compare(arguments: argparse.Namespace) -> None:
    """Run all sides in turns and report."""
    torch.set_num_threads(arguments.threads)
    folder = str(resolve(arguments.model))
    workloads = [w for w in WORKLOADS if w.key in arguments.workloads]
    llm = LLM(folder, dtype=arguments.dtype, num_threads=arguments.threads)
    peer = Transformers(folder, arguments.peer_dtypes)
    sides: dict[str, Side] = {
        OURS: lambda workload, prompts: run_ours(llm, prompts, workload.output),
        TRANSFORMERS: peer,
    }
    logs = Path(tempfile.mkdtemp(prefix="quire-peers-"))
    with peer_processes(os.environ.get("QUIRE_PEERS"), arguments.threads, logs) as peers:
        sides.update(peers)
        for workload in workloads:
            peer.warm_up(workload)
        warm_up = Workload("warm-up", 1, 16, 0, 8, 0.0)
        for name, side in sides.items():
            if name != TRANSFORMERS:
                side(warm_up, warm_up.prompts(-1))
        rates = by_turns(sides, workloads, arguments.rounds, arguments.seed)

    figures: list[Figure] = []
    rows = []
    for workload in workloads:
        ours = rates[workload.key][OURS]
        row = [workload.title, f"{median(ours):.1f}", spread(ours)]
        figures.append(Figure(f"{workload.title} {OURS}", median(ours), " tokens/s"))
        for name in list(sides)[1:]:
            theirs = rates[workload.key][name]
            if not theirs:
                row += ["", ""]
                continue
            title = f"{name} {peer.chosen[workload.key]}" if name == TRANSFORMERS else name
            row += [f"{median(theirs):.1f}", f"{ratio(ours, theirs):.2f}x"]
            figures.append(Figure(f"{workload.title} {title}", median(theirs), " tokens/s"))
            bar = workload.bar if name == TRANSFORMERS else None
            figures.append(Figure(f"{workload.title} {OURS} / {title}", ratio(ours, theirs), "x", bar))
        rows.append([*row, peer.chosen[workload.key]])
    header = [f"output tokens/s, median of {arguments.rounds}", f"{OURS} {arguments.dtype}", "spread"]
    for name in list(sides)[1:]:
        header += [name, "ratio"]
    print_table([*header, f"{TRANSFORMERS} in"], rows)
    finish(
        "loadtests.throughput",
        figures,
        arguments,
        tokens_per_second=rates,
        peer_dtypes=peer.chosen,
        threads=arguments.threads,
    )


def by_turns(
    sides: dict[str, Side], workloads: list[Workload], rounds: int, seed: int
) -> dict[str, dict[str, list[float]]]:
    """Tokens a second of each round, by workload and side."""
    rates: dict[str, dict[str, list[float]]] = {w.key: {side: [] for side in sides} for w in workloads}
    with tqdm(total=rounds * len(workloads) * len(sides), unit="run") as bar:
        for number in range(rounds):
            for workload in workloads:
                prompts = workload.prompts(seed + number)
                for name, side in sides.items():
                    if name == LLAMA_CPP and workload.requests > 1:
                        bar.update()
                        continue
                    bar.set_description(f"round {number + 1} {workload.title} {name}")
                    rates[workload.key][name].append(tokens_per_second(partial(side, workload, prompts)))
                    bar.update()
    return rates


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.throughput", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--http", action="store_true", help="one engine behind HTTP against itself offline")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of our engine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workloads", default="abcd", help="which to run, for example 'ac'")
    parser.add_argument(
        "--peer-dtypes",
        nargs="+",
        default=list(PEER_DTYPES),
        choices=PEER_DTYPES,
        help="of which transformers runs in the faster one (default: both)",
    )
    arguments = parser.parse_args()
    if arguments.http:
        from loadtests.experiments.http_path import compare_http

        compare_http(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
