"""Our engine beside its rivals, or beside itself behind HTTP, in one run.

``python -m loadtests.throughput`` takes turns: each round runs every workload on every side with the same fresh
random prompts, and the medians over the rounds are compared. A side is a function of workload and prompts that
returns the tokens it made. ``transformers.generate`` runs static batches of 32, in bfloat16 or float32: the one
that is faster for the workload in a short warm-up.

``python -m loadtests.throughput --http`` compares one engine behind the whole HTTP path with the same engine
used offline (see :mod:`loadtests.experiments.http_path`).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from app.launch.model_store import resolve
from engine import LLM, SamplingParams
from loadtests.report import Figure, add_arguments, finish, print_table
from loadtests.stats import median, ratio, seconds_of, spread

PEER_BATCH = 32
PEER_DTYPES = ("bfloat16", "float32")
TOKEN_RANGE = (100, 40_000)  # ordinary tokens: neither special nor the rare tail
OURS, TRANSFORMERS = "ours", "transformers"
Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Workload:
    """``requests`` prompts of ``prompt`` random tokens, the first ``shared`` of them common to all."""

    key: str
    requests: int
    prompt: int
    shared: int
    output: int
    bar: float  # least ratio to transformers in its faster dtype

    @property
    def title(self) -> str:
        """One line for the table."""
        shared = f", {self.shared} shared" if self.shared else ""
        return f"({self.key}) {self.requests} x {self.prompt}{shared} in, {self.output} out"

    def prompts(self, seed: int) -> Prompts:
        """Fresh prompts for one round, so that nothing is cached from an earlier one."""
        draw = random.Random(f"{self.key}/{seed}")
        common = [draw.randint(*TOKEN_RANGE) for _ in range(self.shared)]
        own = self.prompt - self.shared
        return [common + [draw.randint(*TOKEN_RANGE) for _ in range(own)] for _ in range(self.requests)]


Side = Callable[[Workload, Prompts], int]
"""Makes exactly ``workload.output`` tokens for each prompt, greedily; returns the number of tokens made."""

WORKLOADS = (
    Workload("a", 32, 256, 0, 64, 1.2),
    Workload("b", 64, 512, 448, 64, 3.0),
    Workload("c", 1, 16, 0, 128, 1.6),
    Workload("d", 32, 1024, 0, 32, 1.2),
)


def run_ours(llm: LLM, prompts: Prompts, output: int) -> int:
    """Generate exactly ``output`` tokens for each prompt; return the number of tokens made."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    return sum(len(result.token_ids) for result in llm.generate(prompts, params, progress=False))


@torch.inference_mode()
def run_peer(model: Any, prompts: Prompts, output: int) -> int:
    """The same with ``transformers.generate`` in static batches (all prompts are of one length: no padding)."""
    made = 0
    for start in range(0, len(prompts), PEER_BATCH):
        ids = torch.tensor(prompts[start : start + PEER_BATCH], device=model.device)
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            pad_token_id=0,
        )
        made += generated.numel() - ids.numel()
    return made


class Transformers:
    """The peer with the same weights, for each workload in the dtype that is faster there."""

    def __init__(self, folder: str, dtypes: list[str]) -> None:
        from transformers import AutoModelForCausalLM

        self._models: dict[str, Any] = {
            dtype: AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
            for dtype in dtypes
        }
        self.chosen: dict[str, str] = {}  # dtype, by workload

    def __call__(self, workload: Workload, prompts: Prompts) -> int:
        """See ``Side``."""
        return run_peer(self._models[self.chosen[workload.key]], prompts, workload.output)

    def warm_up(self, workload: Workload) -> None:
        """Choose the dtype: an eighth of the batch at most, and some tokens of each."""
        short = replace(workload, requests=max(1, min(workload.requests, PEER_BATCH) // 8), output=8)
        prompts = short.prompts(-1)
        self.chosen[workload.key] = min(
            self._models,
            key=lambda dtype: seconds_of(partial(run_peer, self._models[dtype], prompts, short.output)),
        )


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
    run_ours(llm, [[5, 6, 7, 8]], 4)
    for workload in workloads:
        peer.warm_up(workload)
    rates = by_turns(sides, workloads, arguments.rounds, arguments.seed)

    figures: list[Figure] = []
    rows = []
    for workload in workloads:
        ours = rates[workload.key][OURS]
        row = [workload.title, f"{median(ours):.1f}", spread(ours)]
        figures.append(Figure(f"{workload.title} {OURS}", median(ours), " tokens/s"))
        for name in list(sides)[1:]:
            theirs = rates[workload.key][name]
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
                    bar.set_description(f"round {number + 1} {workload.title} {name}")
                    rates[workload.key][name].append(tokens_per_second(partial(side, workload, prompts)))
                    bar.update()
    return rates


def tokens_per_second(run: Callable[[], int]) -> float:
    """Of the tokens that ``run`` says it made."""
    made = 0

    def counted() -> None:
        nonlocal made
        made = run()

    seconds = seconds_of(counted)
    return made / seconds


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
