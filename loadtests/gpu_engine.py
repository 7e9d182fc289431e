"""``python -m loadtests.gpu_engine``: the engine on a GPU beside ``transformers.generate``, random weights.

Both sides generate as many tokens for the same random prompts, greedily, in bfloat16; the peer in static
batches of 32. What the weights are changes no time. A profile of some decode steps tells how long
the GPU was idle.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.autograd import DeviceType

from engine import LLM, SamplingParams
from engine.request import Request
from loadtests.report import Figure, add_arguments, finish, print_table
from loadtests.throughput import PEER_BATCH, run_ours, run_peer

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
VOCAB = 128_256
PROFILED_STEPS = 10
Prompts = list[list[int]]


def save_random(folder: Path, shape: dict[str, Any], device: str) -> None:
    """Write a Llama checkpoint of that shape with random bfloat16 weights, a file for each layer."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        **shape,
        vocab_size=VOCAB,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        dtype="bfloat16",
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    torch.manual_seed(0)
    files = {}
    for number, part in enumerate(_parts(shape, device)):
        name = f"model-{number:03d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def _parts(shape: dict[str, Any], device: str) -> Iterator[dict[str, Tensor]]:
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]

    def draw(rows: int, columns: int) -> Tensor:
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        return weight.normal_(0.0, columns**-0.5).cpu()

    def ones() -> Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    yield {"model.embed_tokens.weight": draw(VOCAB, hidden), "model.norm.weight": ones()}
    yield {"lm_head.weight": draw(VOCAB, hidden)}
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield {
            f"{prefix}.self_attn.q_proj.weight": draw(hidden, hidden),
            f"{prefix}.self_attn.k_proj.weight": draw(keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": draw(keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": draw(hidden, hidden),
            f"{prefix}.mlp.gate_proj.weight": draw(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": draw(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": draw(hidden, inner),
            f"{prefix}.input_layernorm.weight": ones(),
            f"{prefix}.post_attention_layernorm.weight": ones(),
        }


def timed(run: Callable[[], int]) -> float:
    """Tokens made in a second."""
    gc.collect()
    torch.cuda.synchronize()
    began = time.perf_counter()
    made = run()
    torch.cuda.synchronize()
    return made / (time.perf_counter() - began)


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
    while not all(request.num_generated > 2 for request in requests):
        engine.step()
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
    from transformers import AutoModelForCausalLM

    began = time.perf_counter()
    save_random(folder, SHAPES[arguments.shape], "cuda")
    print(f"weights made in {time.perf_counter() - began:.0f} s", flush=True)
    llm = LLM(
        folder,
        dtype="bfloat16",
        device="cuda",
        kv_memory=arguments.kv_memory << 30,
        max_num_seqs=arguments.requests,
        recovery="recompute",
    )
    print(f"ours loaded after {time.perf_counter() - began:.0f} s", flush=True)
    peer: Any = None
    if not arguments.no_peer:
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda").eval()
        print(f"theirs loaded after {time.perf_counter() - began:.0f} s", flush=True)
    chance = random.Random(0)

    def prompts(count: int = arguments.requests) -> Prompts:
        return [chance.choices(range(100, 100_000), k=arguments.prompt) for _ in range(count)]

    ours, theirs = [], []
    with torch.inference_mode():
        run_ours(llm, prompts(), 4)
        for _ in range(arguments.rounds):
            same = prompts()
            ours.append(timed(lambda p=same: run_ours(llm, p, arguments.output)))  # type: ignore[misc]
            if peer is not None:
                run_peer(peer, prompts(PEER_BATCH), 2)
                theirs.append(timed(lambda p=same: run_peer(peer, p, arguments.output)))  # type: ignore[misc]
        step, busy, queueing = profile_steps(llm, prompts(), arguments.profile)
    title = f"{arguments.shape}, {arguments.requests} x {arguments.prompt} in, {arguments.output} out"
    ratio = max(ours) / max(theirs) if theirs else None
    peer_cells = ["-", "-"] if ratio is None else [f"{max(theirs):.0f}", f"{ratio:.2f}x"]
    print_table(
        ("output tokens/s", "ours", "transformers", "ratio"),
        [[title, f"{max(ours):.0f}", *peer_cells]],
    )
    idle = 1 - busy / step
    print(
        f"a decode step of {arguments.requests}: {step * 1e3:.2f} ms, the GPU works {busy * 1e3:.2f} ms "
        f"(idle {idle:.0%}); queueing the layers takes {queueing * 1e3:.2f} ms"
    )
    return [
        Figure(f"{title}: ours", max(ours), " tokens/s"),
        *([] if ratio is None else [Figure(f"{title}: ours over transformers", ratio, "x")]),
        Figure("decode step", step * 1e3, "ms"),
        Figure("decode step: GPU busy", busy * 1e3, "ms"),
        Figure("decode step: GPU idle", idle),
    ]


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
