"""``python -m loadtests.speculation``: one stream with speculation over the same without, by turns.

Two tasks ask the model to repeat code; what speculation gains depends on how well it copies. In the third,
random tokens are followed by drawn ones: nothing to guess. The tokens must be the same with and without.
"""

from __future__ import annotations

import time
from inspect import getsource

from app.launch.model_store import resolve
from engine import LLM, SamplingParams
from loadtests import stats
from loadtests.client import MODEL
from loadtests.experiments.rivals import Workload
from loadtests.report import Figure, finish, parse

RANDOM = Workload("speculation", 1, 200, 0, 128, 0.98)
COPIES = {"copy of quantile and median": (stats.quantile, stats.median), "copy of ratio": (stats.ratio,)}
BARS = dict(zip([*COPIES, "random"], (1.5, RANDOM.bar, RANDOM.bar), strict=True))


def tokens_of(llm: LLM, task: str, seed: int) -> list[int]:
    """What one stream makes."""
    if task not in COPIES:
        drawn = SamplingParams(max_tokens=RANDOM.output, ignore_eos=True, seed=seed)
        return llm.generate(RANDOM.prompts(seed), drawn, progress=False)[0].token_ids
    code = "".join(map(getsource, COPIES[task]))
    asked = [{"role": "user", "content": f"Repeat this code exactly:\n```python\n{code}```"}]
    return llm.chat(asked, SamplingParams(max_tokens=192, temperature=0.0))[0].token_ids


def main() -> None:
    """Measure by processor time, of which other processes take none."""
    options = {"--rounds": (7, "of each"), "--weights": ("model", "or int8, or int4")}
    arguments = parse("speculation", __doc__, options)
    sides = [LLM(str(resolve(MODEL)), weights=arguments.weights, speculation=most) for most in (None, 0)]
    ratios: dict[str, list[float]] = {task: [] for task in BARS}
    for number in range(arguments.rounds):
        for task, found in ratios.items():
            seconds, made = {}, {}
            for llm in sides if number % 2 else sides[::-1]:
                began = time.process_time()
                made[llm] = tokens_of(llm, task, number)
                seconds[llm] = time.process_time() - began
            if made[sides[0]] != made[sides[1]]:
                raise SystemExit(f"{task}: the tokens differ")
            found.append(seconds[sides[1]] / seconds[sides[0]])
    figures = [Figure(f"{t}: with / without", stats.median(found), "x", BARS[t]) for t, found in ratios.items()]
    finish("loadtests.speculation", figures, arguments, f"one stream, weights: {arguments.weights}")
