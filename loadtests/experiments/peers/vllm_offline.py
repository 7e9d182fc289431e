"""vLLM's offline engine, for an environment that has vLLM; imports nothing of Quire.

Reads a model folder from its arguments, then one JSON object per line: ``{"prompts": [[token, ...], ...],
"output": tokens}``. Answers each with one line: the number of tokens made.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Serve standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints must not pass for an answer
    from vllm import LLM, SamplingParams

    llm = LLM(
        sys.argv[1], dtype="bfloat16", max_model_len=4096, max_num_seqs=64, enable_prefix_caching=True, seed=0
    )
    for line in sys.stdin:
        work = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=work["output"], ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
        results = llm.generate(prompts, params, use_tqdm=False)
        print(sum(len(result.outputs[0].token_ids) for result in results), file=answers, flush=True)


if __name__ == "__main__":
    main()
