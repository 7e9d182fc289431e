"""The sides of the comparison of throughput: our engine, and rivals on the same prompts.

A rival is a ``Side``: a callable that makes the tokens of a workload, in this process or in one of its own.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine import LLM, SamplingParams
from loadtests.report import machine

PEER_BATCH = 32
TOKEN_RANGE = (100, 40_000)  # ordinary tokens: neither special nor the rare tail
OURS = "ours"
Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Workload:
    """``requests`` prompts of ``prompt`` random tokens, the first ``shared`` of them common to all."""

    key: str
    requests: int
    prompt: int
    shared: int
    output: int
    bar: float  # least ratio to transformers

    @property
    def title(self) -> str:
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
    made, length = 0, {"max_new_tokens": output, "min_new_tokens": output}
    for start in range(0, len(prompts), PEER_BATCH):
        ids = torch.tensor(prompts[start : start + PEER_BATCH], device=model.device)
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **length
        )
        made += generated.numel() - ids.numel()
    return made


class Transformers:
    """The peer with the same weights, in bfloat16 where the CPU multiplies it in hardware, else float32."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        self.dtype = "bfloat16" if "bf16" in machine()["vector"] else "float32"
        dtype = getattr(torch, self.dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def __call__(self, workload: Workload, prompts: Prompts) -> int:
        return run_peer(self._model, prompts, workload.output)


def tokens_per_second(run: Callable[[], int]) -> float:
    """Of the tokens that ``run`` says it made."""
    gc.collect()
    began = time.perf_counter()
    return run() / (time.perf_counter() - began)
