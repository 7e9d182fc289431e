"""``python -m loadtests.gpu_engine``: the engine on a GPU beside ``transformers.generate``, random weights.

Both sides generate as many tokens for the same random prompts, greedily, in bfloat16; the peer in static
batches of 32. What the weights are changes no time.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import LLM
from loadtests.experiments.rivals import PEER_BATCH, Workload, run_ours, run_peer, tokens_per_second
from loadtests.report import Figure, finish, parse

SHAPES = {  # of a Llama: hidden, intermediate, layers, heads, KV heads
    "8b": (4096, 14336, 32, 32, 8),
    "1b": (2048, 8192, 16, 32, 8),
    "tiny": (256, 512, 2, 4, 2),
}
VOCAB = 128_256
ROUNDS = 2


def make_model(shape: tuple[int, ...]) -> Any:
    """A Llama of that shape with random bfloat16 weights on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden, inner, layers, heads, kv_heads = shape
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=VOCAB,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def timed(run: Callable[[], int]) -> float:
    """Tokens a second, to the end of what the device has to do."""

    def ended() -> int:
        made = run()
        torch.cuda.synchronize()
        return made

    torch.cuda.synchronize()
    return tokens_per_second(ended)


def measure(arguments: argparse.Namespace, folder: Path) -> list[Figure]:
    """Both sides in turns, the best rate of each."""
    peer = make_model(SHAPES[arguments.shape])
    peer.save_pretrained(folder)
    options: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda", "recovery": "recompute"}
    llm = LLM(folder, max_num_seqs=arguments.requests, kv_memory=16 << 30, **options)
    load = Workload("gpu", arguments.requests, arguments.prompt, 0, arguments.output, 0.0)
    ours, theirs = [], []
    with torch.inference_mode():
        run_ours(llm, load.prompts(-1), 4)
        for number in range(ROUNDS):
            same = load.prompts(number)
            ours.append(timed(partial(run_ours, llm, same, load.output)))
            run_peer(peer, load.prompts(-2)[:PEER_BATCH], 2)
            theirs.append(timed(partial(run_peer, peer, same, load.output)))
    title = f"{arguments.shape}, {arguments.requests} x {arguments.prompt} in, {arguments.output} out"
    return [
        Figure(f"{title}: ours", max(ours), " tokens/s"),
        Figure(f"{title}: ours over transformers", max(ours) / max(theirs), "x"),
    ]


def main() -> None:
    options = {
        "--shape": (tuple(SHAPES), "of the model"),
        "--requests": (64, "at once"),
        "--prompt": (512, "tokens"),
        "--output": (128, "tokens"),
    }
    arguments = parse("gpu_engine", __doc__, options)
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as folder:
        figures = measure(arguments, Path(folder))
    finish("loadtests.gpu_engine", figures, arguments, "engine on a GPU")
