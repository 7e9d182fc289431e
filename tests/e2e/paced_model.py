"""A small random model with the bundled tokenizer whose steps take as long as a large one's, and cost little.

Streams then last as long as a test needs, without taking the processor from the replicas that start meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.scheduling.candidates import Outcome
    from engine.scheduling.sequence import ScheduledChunk

CONTEXT = 4096
STEP_S, ROW_S, SLOW_S, HELD_S = 0.005, 0.001, 0.5, 1.5
"""Of a step; of each row in it besides, as routing spreads streams only if they cost something; if slow; and if
all but held up, though not for so long that the router would take the engine for stuck."""
LOOK_S = 0.02
"""After which a step that lasts sees that it should not any longer."""
PACE = "paced"
"""In the model's folder: its steps take ``STEP_S`` and ``ROW_S`` for each row, or longer."""
SLOW = "slow"
"""As long as it is in the model's folder, it says the seconds instead of ``STEP_S``: streams outlast what they
should."""


def save_paced(folder: Path, tokenizer: Path, seed: int) -> Path:
    """Save the model with the tokenizer of the folder ``tokenizer``; returns ``folder``."""
    from small_model import save_small  # loads torch: not in the ingress

    save_small(folder, tokenizer, seed, CONTEXT)
    (folder / PACE).touch()
    return folder


def step_s(folder: Path) -> float:
    """Seconds that a step takes now, whatever its rows."""
    try:
        return float((folder / SLOW).read_text())
    except FileNotFoundError:
        return STEP_S


@contextlib.contextmanager
def slow_steps(folder: Path, seconds: float = SLOW_S) -> Iterator[Callable[[], None]]:
    """Each step takes ``seconds`` until the block ends, or calls what it gets.

    However long a busy machine takes to look at a stream, it is still there to be disturbed.
    """
    new = folder / f"{SLOW}.new"
    new.write_text(str(seconds))
    new.replace(folder / SLOW)
    go_on = partial((folder / SLOW).unlink, missing_ok=True)
    try:
        yield go_on
    finally:
        go_on()


def keep_pace(folder: Path) -> None:
    """From now on each step of this process's engines, which serve ``folder``, takes as long as that says.

    Their own measurements include it: the router believes what they report.
    """
    from engine import engine_thread
    from engine.engine import Engine

    engine_thread.WARM_AFTER_S = threading.TIMEOUT_MAX  # a second of processor time in each, mostly for nothing
    run = Engine._run

    def slow(engine: Engine, chunks: Sequence[ScheduledChunk]) -> tuple[list[Outcome], dict[str, str]]:
        began = time.monotonic()
        made = run(engine, chunks)
        while (left := began + step_s(folder) + ROW_S * len(chunks) - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_S))
        return made

    Engine._run = slow  # type: ignore[method-assign]
