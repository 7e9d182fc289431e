"""llama.cpp through its Python binding, for an environment that has it; imports nothing of Quire.

Reads a GGUF file and a number of threads from its arguments, then one JSON object per line, as
``vllm_offline.py`` does. Prompts run one after the other: the binding has no batches.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Serve standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from llama_cpp import Llama

    threads = int(sys.argv[2])
    llm = Llama(sys.argv[1], n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
    for line in sys.stdin:
        work = json.loads(line)
        made = 0
        for prompt in work["prompts"]:
            llm.reset()
            for _ in zip(range(work["output"]), llm.generate(prompt, temp=0.0), strict=False):
                made += 1
        print(made, file=answers, flush=True)


if __name__ == "__main__":
    main()
