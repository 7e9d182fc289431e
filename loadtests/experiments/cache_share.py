"""What prefix caching costs where it finds nothing: its share of all processor time, on the real engine."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.kv.prefix_index import PrefixIndex
from engine.sampling_params import SamplingParams
from engine.scheduling import admission

TOKENS = range(100, 40_000)  # ordinary tokens

CACHE_FUNCTIONS: list[tuple[Any, str]] = [
    (PrefixIndex, "match"),
    (PrefixIndex, "blocks"),
    (PrefixIndex, "extend"),
    (PrefixIndex, "_forget"),  # evictions
    (admission, "blocks_needed"),
    (admission, "is_next_block_scheduled"),
]


@contextmanager
def clocked(functions: list[tuple[Any, str]]) -> Iterator[list[float]]:
    """Sum this thread's processor time in ``functions`` (owner, name) and all they call, into a list of one."""
    spent = [0.0]
    inside = False
    before: list[tuple[Any, str, Callable[..., Any]]] = []

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*arguments: Any) -> Any:
            nonlocal inside
            if inside:
                return method(*arguments)
            inside = True
            began = time.thread_time()
            try:
                return method(*arguments)
            finally:
                spent[0] += time.thread_time() - began
                inside = False

        return run

    for owner, name in functions:
        before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield spent
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def cache_share(model: str, requests: int, prompt: int, output: int) -> float:
    """Processor time spent on the prefix cache over the process's, with ``requests`` unique prompts.

    The time that the clock itself takes is counted as the cache's.

    Raises:
        RuntimeError: something was found there.
    """
    from app.launch.model_store import resolve
    from engine import LLM

    draw = random.Random(0)
    with clocked(CACHE_FUNCTIONS) as spent:
        llm = LLM(str(resolve(model)))
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        llm.generate([[5, 6, 7, 8]], params, progress=False)
        prompts = [[draw.choice(TOKENS) for _ in range(prompt)] for _ in range(requests)]
        spent[0], began = 0.0, time.process_time()
        results = llm.generate(prompts, params, progress=False)
        total = time.process_time() - began
    if any(result.cached_tokens for result in results):
        raise RuntimeError("a prompt that should be unique was found in the prefix cache")
    return spent[0] / total
