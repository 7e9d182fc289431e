"""``python -m loadtests.experiments.structured_step``: what a JSON schema adds to a step of 32 sequences.

Two engines over the bundled model take steps in turn; the rows of one are held to a schema.
"""

from __future__ import annotations

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.folders import BUNDLED_NAME, local_folder
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput
from loadtests.report import Figure, finish, most, parse, print_figures
from loadtests.stats import by_turns, median

ROWS, STEPS, WARM_UP = 32, 250, 10
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["alpha", "beta", "gamma"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORM = StructuredOutput.of_schema({"type": "array", "items": PERSON, "minItems": 200})


def decoding(form: StructuredOutput | None) -> Engine:
    """An engine whose rows have all begun."""
    config = EngineConfig(model=str(local_folder(BUNDLED_NAME)), max_model_len=1024, kv_memory=512 << 20)
    engine = Engine(config, offline=True)
    for row in range(ROWS):
        params = SamplingParams(max_tokens=STEPS + 60, seed=row, structured_output=form, ignore_eos=True)
        engine.add(Request(f"row-{row}", [1, 2, 3 + row], params))
    for _ in range(WARM_UP):
        engine.step()
    return engine


def measure() -> list[Figure]:
    """The time of steps, and how many times as long those with a schema take."""
    engines = [decoding(None), decoding(FORM)]
    free, held = by_turns(STEPS, *(engine.step for engine in engines))
    if any(len(engine.scheduler.state.running) != ROWS for engine in engines):
        raise RuntimeError("a row has ended")
    return [
        Figure("free", 1e3 * median(free), " ms"),
        Figure("held", 1e3 * median(held), " ms"),
        most("ratio", median([h / f for f, h in zip(free, held, strict=True)]), 1.1),
    ]


def main() -> None:
    """Measure, print a table, hold the ratio to its bar."""
    arguments = parse("structured_step", __doc__)
    figures = measure()
    print_figures("step", figures)
    finish("loadtests.experiments.structured_step", figures, arguments)


if __name__ == "__main__":
    main()
