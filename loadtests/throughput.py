"""Our engine beside ``transformers.generate``, or beside itself behind HTTP, in one run.

``python -m loadtests.throughput`` takes turns: each round runs every workload on both sides with the same
fresh random prompts, and the medians over the rounds are compared. The peer runs static batches of 32.

``python -m loadtests.throughput --http`` compares one engine behind the whole HTTP path with the same engine
used offline (see :mod:`loadtests.http_path`).
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from app.launch.model_store import resolve
from engine import LLM, SamplingParams
from loadtests.report import Figure, add_arguments, finish, print_table

PEER_BATCH = 32
TOKEN_RANGE = (100, 40_000)  # ordinary tokens: neither special nor the rare tail


@dataclass(frozen=True, slots=True)
class Workload:
    """``requests`` prompts of ``prompt`` random tokens, the first ``shared`` of them common to all."""

    key: str
    requests: int
    prompt: int
    shared: int
    output: int
    bar: float  # least ratio to the peer

    @property
    def title(self) -> str:
        """One line for the table."""
        shared = f", {self.shared} shared" if self.shared else ""
        return f"({self.key}) {self.requests} x {self.prompt}{shared} in, {self.output} out"

    def prompts(self, seed: int) -> list[list[int]]:
        """Fresh prompts for one round, so that nothing is cached from an earlier one."""
        draw = random.Random(f"{self.key}/{seed}")
        common = [draw.randint(*TOKEN_RANGE) for _ in range(self.shared)]
        own = self.prompt - self.shared
        return [common + [draw.randint(*TOKEN_RANGE) for _ in range(own)] for _ in range(self.requests)]


WORKLOADS = (
    Workload("a", 32, 256, 0, 64, 3.0),
    Workload("b", 64, 512, 448, 64, 14.0),
    Workload("c", 1, 16, 0, 128, 1.6),
    Workload("d", 32, 1024, 0, 32, 2.9),
)


def run_ours(llm: LLM, prompts: list[list[int]], output: int) -> int:
    """Generate exactly ``output`` tokens for each prompt; return the number of tokens made."""
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    return sum(len(result.token_ids) for result in llm.generate(prompts, params, progress=False))


def run_peer(model: Any, prompts: list[list[int]], output: int) -> int:
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


def timed(run: Callable[[], int]) -> float:
    """Tokens made in a second."""
    gc.collect()
    began = time.perf_counter()
    made = run()
    return made / (time.perf_counter() - began)


def load_peer(folder: str, dtype: str) -> torch.nn.Module:
    """The peer's model with the same weights."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.eval()


def compare(arguments: argparse.Namespace) -> None:
    """Run both sides in turns and report."""
    torch.set_num_threads(arguments.threads)
    folder = str(resolve(arguments.model))
    workloads = [w for w in WORKLOADS if w.key in arguments.workloads]
    llm = LLM(folder, dtype=arguments.dtype, num_threads=arguments.threads)
    peers = {dtype: load_peer(folder, dtype) for dtype in arguments.peer_dtypes}
    sides = ["ours", *peers]
    rates: dict[tuple[str, str], list[float]] = {(w.key, side): [] for w in workloads for side in sides}
    run_ours(llm, [[5, 6, 7, 8]], 4)
    bar = tqdm(total=arguments.rounds * len(workloads) * len(sides), unit="run")
    for round_number in range(arguments.rounds):
        for workload in workloads:
            prompts = workload.prompts(arguments.seed + round_number)
            for side in sides:
                bar.set_description(f"round {round_number + 1} {workload.title} {side}")
                if side == "ours":
                    rate = timed(lambda p=prompts, w=workload: run_ours(llm, p, w.output))  # type: ignore[misc]
                else:
                    with torch.inference_mode():
                        rate = timed(lambda p=prompts, w=workload, s=side: run_peer(peers[s], p, w.output))  # type: ignore[misc]
                rates[workload.key, side].append(rate)
                bar.update()
    bar.close()

    figures: list[Figure] = []
    rows = []
    for workload in workloads:
        medians = {side: statistics.median(rates[workload.key, side]) for side in sides}
        row = [workload.title, f"{medians['ours']:.1f}"]
        figures.append(Figure(f"{workload.title} ours", medians["ours"], " tokens/s"))
        for dtype in peers:
            ratio = medians["ours"] / medians[dtype]
            row += [f"{medians[dtype]:.1f}", f"{ratio:.2f}x"]
            figures.append(Figure(f"{workload.title} transformers {dtype}", medians[dtype], " tokens/s"))
            bar_value = workload.bar if dtype == "bfloat16" else None
            figures.append(Figure(f"{workload.title} ours / transformers {dtype}", ratio, "x", bar_value))
        spread = rates[workload.key, "ours"]
        row.append(f"{min(spread):.1f}..{max(spread):.1f}")
        rows.append(row)
    header = [f"output tokens/s, median of {arguments.rounds}", f"ours {arguments.dtype}"]
    for dtype in peers:
        header += [f"transformers {dtype}", "ratio"]
    print_table([*header, "our spread"], rows)
    raw = {f"{key}/{side}": values for (key, side), values in rates.items()}
    finish("loadtests.throughput", figures, arguments, tokens_per_second=raw, threads=arguments.threads)


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
        nargs="*",
        default=["bfloat16"],
        choices=["bfloat16", "float32"],
        help="the bars hold against bfloat16; float32 is faster where the CPU has no bf16 instructions",
    )
    arguments = parser.parse_args()
    if arguments.http:
        from loadtests.http_path import compare_http

        compare_http(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
