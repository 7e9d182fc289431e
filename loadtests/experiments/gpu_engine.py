"""``python -m loadtests.gpu_engine``: the engine on a GPU beside ``transformers.generate``, random weights.

Both sides generate as many tokens for the same random prompts, greedily, in bfloat16; the peer in static
batches of 32. What the weights are changes no time. A profile of some decode steps tells how long
the GPU was idle.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType

from engine import LLM, SamplingParams
from engine.request import Request
from loadtests.experiments.rivals import PEER_BATCH, run_ours, run_peer, tokens_per_second
from loadtests.report import Figure, add_arguments, finish, print_figures

SHAPES = {  # of a Llama: hidden, intermediate, layers, heads, KV heads
    "8b": (4096, 14336, 32, 32, 8),
    "1b": (2048, 8192, 16, 32, 8),
    "tiny": (256, 512, 2, 4, 2),
}
VOCAB = 128_256
PROFILED_STEPS = 10
Prompts = list[list[int]]


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


def gpu_seconds(events: Iterable[Any]) -> float:
    """What the device worked in all, of a profile's averages.

    An operator has its kernels' time as well, and a region that was given a name all that runs in it.
    """
    return sum(
        float(event.self_device_time_total) / 1e6
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )


def profile_steps(llm: LLM, prompts: Prompts, trace: Path | None) -> tuple[float, float, float]:
    """Seconds of a decode step of all ``prompts``, of the GPU's work in it, and of queueing its layers."""
    from torch.profiler import ProfilerActivity, profile

    engine = llm.engine
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    requests = [Request(f"profiled-{number:03d}", prompt, params) for number, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    generated = dict.fromkeys([request.request_id for request in requests], 0)
    while min(generated.values()) <= 2:
        for delta in engine.step():
            generated[delta.request_id] += len(delta.token_ids)
    began = time.perf_counter()
    for _ in range(PROFILED_STEPS):
        engine.step()
    step = (time.perf_counter() - began) / PROFILED_STEPS
    queueing = 0.0
    forward = engine.runner.decoder.forward

    def timed_forward(*arguments: Any) -> Tensor:
        nonlocal queueing
        start = time.perf_counter()
        result = forward(*arguments)
        queueing += (time.perf_counter() - start) / PROFILED_STEPS
        return result

    engine.runner.decoder.forward = timed_forward  # type: ignore[assignment, method-assign]
    for _ in range(PROFILED_STEPS):
        engine.step()
    engine.runner.decoder.forward = forward  # type: ignore[method-assign]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            engine.step()
    averages = profiler.key_averages()
    busy = gpu_seconds(averages) / PROFILED_STEPS
    if trace is not None:
        tables = [
            averages.table(sort_by=f"self_{kind}_time_total", row_limit=25, max_name_column_width=60)
            for kind in ("cuda", "cpu")
        ]
        trace.write_text("\n".join(tables))
    for request in requests:
        engine.abort(request.request_id)
    return step, busy, queueing


def measure(arguments: argparse.Namespace, folder: Path) -> list[Figure]:
    """Both sides in turns, the best rate of each."""
    peer = make_model(SHAPES[arguments.shape])
    peer.save_pretrained(folder)
    if arguments.no_peer:
        peer = None
    llm = LLM(
        folder,
        dtype="bfloat16",
        device="cuda",
        kv_memory=arguments.kv_memory << 30,
        max_num_seqs=arguments.requests,
        recovery="recompute",
    )
    chance = random.Random(0)

    def prompts(count: int = arguments.requests) -> Prompts:
        return [chance.choices(range(100, 100_000), k=arguments.prompt) for _ in range(count)]

    def timed(run: Callable[[], int]) -> float:
        def ended() -> int:
            made = run()
            torch.cuda.synchronize()
            return made

        torch.cuda.synchronize()
        return tokens_per_second(ended)

    ours, theirs = [], []
    with torch.inference_mode():
        run_ours(llm, prompts(), 4)
        for _ in range(arguments.rounds):
            same = prompts()
            ours.append(timed(partial(run_ours, llm, same, arguments.output)))
            if peer is not None:
                run_peer(peer, prompts(PEER_BATCH), 2)
                theirs.append(timed(partial(run_peer, peer, same, arguments.output)))
        step, busy, queueing = profile_steps(llm, prompts(), arguments.profile)
    title = f"{arguments.shape}, {arguments.requests} x {arguments.prompt} in, {arguments.output} out"
    figures = [
        Figure(f"{title}: ours", max(ours), " tokens/s"),
        *([Figure(f"{title}: ours over transformers", max(ours) / max(theirs), "x")] if theirs else []),
        Figure("decode step", step * 1e3, "ms"),
        Figure("decode step: GPU busy", busy * 1e3, "ms"),
        Figure("decode step: GPU idle", 1 - busy / step),
        Figure("decode step: queueing the layers", queueing * 1e3, "ms"),
    ]
    print_figures(f"engine on a GPU, decode steps of {arguments.requests}", figures)
    return figures


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.gpu_engine", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-memory", type=int, default=16, help="GiB")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--profile", type=Path, help="write the profile's tables here")
    arguments = parser.parse_args()
    shared_memory = Path("/dev/shm")
    parent = shared_memory if shared_memory.is_dir() else None
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        figures = measure(arguments, Path(folder))
        finish("loadtests.gpu_engine", figures, arguments)


if __name__ == "__main__":
    main()
