"""A peer's offline engine, for an environment that has it; imports nothing of Quire.

Arguments: the peer, its model (a folder, or a GGUF file), and threads. Then reads one JSON object per line:
``{"prompts": [[token, ...], ...], "output": tokens}``, and answers each with the number of tokens made.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def vllm(model: str) -> Callable[[list[list[int]], int], int]:
    """Batches of up to 64."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=4096, max_num_seqs=64, enable_prefix_caching=True, seed=0)

    def run(prompts: list[list[int]], output: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        results = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    return run


def llama_cpp(model: str, threads: int) -> Callable[[list[list[int]], int], int]:
    """One prompt after the other: the binding has no batches."""
    from llama_cpp import Llama

    llm: Any = Llama(model, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)

    def run(prompts: list[list[int]], output: int) -> int:
        made = 0
        for prompt in prompts:
            llm.reset()
            made += sum(1 for _ in zip(range(output), llm.generate(prompt, temp=0.0), strict=False))
        return made

    return run


def main() -> None:
    """Serve standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints must not pass for an answer
    peer, model, threads = sys.argv[1:]
    run = vllm(model) if peer == "vllm" else llama_cpp(model, int(threads))
    for line in sys.stdin:
        work = json.loads(line)
        print(run(work["prompts"], work["output"]), file=answers, flush=True)


if __name__ == "__main__":
    main()
