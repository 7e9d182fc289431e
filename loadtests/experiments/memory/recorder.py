"""Records beam searches of the bundled model: which beam went on from which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from app.launch.model_store import resolve
from engine import LLM, SamplingParams
from engine.scheduling.beam_search import BeamSearch, Selection
from engine.scheduling.candidates import Candidates
from loadtests.experiments.memory.beams import RECORDS, Parents, save_parents
from loadtests.experiments.memory.constants import WIDTHS
from loadtests.experiments.memory.findings import progress_bar

MODEL = "smollm2-135m-instruct"
STEPS = 128
TASKS = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain how a refrigerator keeps food cold.",
    "Give five tips for learning a new language.",
    "Describe a walk through a forest in autumn.",
    "Write a letter to a friend about moving to another city.",
    "What are the causes and the effects of inflation?",
    "Summarise the history of the bicycle.",
    "Plan a week of healthy dinners for two people.",
)


def record_beams(model: str = MODEL) -> None:
    """Search with 2, 4 and 6 beams for each task, ``STEPS`` tokens long, and write the parents."""
    llm = LLM(resolve(model), dtype="float32")
    searches: dict[int, Sequence[Parents]] = {}
    with progress_bar("beam searches", len(WIDTHS) * len(TASKS)) as progress:
        for width in WIDTHS:
            params = SamplingParams(
                max_tokens=STEPS, temperature=0.0, ignore_eos=True, use_beam_search=True, n=width
            )
            found = []
            for task in TASKS:
                prompt = llm.tokenizer.apply_chat_template(
                    [{"role": "user", "content": task}], add_generation_prompt=True, tokenize=False
                )
                with _recorded() as steps:
                    llm.generate(str(prompt), params)
                found.append(tuple(steps))
                progress()
            searches[width] = found
    save_parents(searches, f"{model}, {len(TASKS)} instructions, {STEPS} tokens each, past any end of sequence")
    print(f"wrote {RECORDS}")


@contextmanager
def _recorded() -> Iterator[list[tuple[int, ...]]]:
    """The parents that searches choose from here on, step by step; the last step has none."""
    steps: list[tuple[int, ...]] = []
    select = BeamSearch.select

    def recording(search: BeamSearch, beams: Sequence[tuple[float, Candidates]], generated: int) -> Selection:
        selection = select(search, beams, generated)
        if selection.next:
            steps.append(tuple(parent for parent, _, _ in selection.next))
        return selection

    setattr(BeamSearch, "select", recording)  # noqa: B010 - a type checker takes no assignment to a method
    try:
        yield steps
    finally:
        setattr(BeamSearch, "select", select)  # noqa: B010
