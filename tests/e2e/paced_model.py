"""A small random model with the bundled tokenizer whose steps take as long as a large one's, and cost little.

Streams then last as long as a test needs, without taking the processor from the replicas that start meanwhile.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.request import TokenDelta

CONTEXT = 4096
STEP_S, SLOW_S = 0.025, 0.5
PACE = "paced"
"""In the model's folder: its steps take ``STEP_S`` or longer."""
SLOW = "slow"
"""As long as it is in the model's folder, they take ``SLOW_S`` or longer: streams outlast what they should."""

_MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "manifest.json")


def save_paced(folder: Path, tokenizer: Path, seed: int) -> Path:
    """Save the model with the tokenizer of the folder ``tokenizer``; returns ``folder``."""
    from model_checkpoints import save_tiny  # loads transformers, which no replica should

    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4}
    save_tiny(folder, "Llama", seed, vocab_size=49152, max_position_embeddings=CONTEXT, **sizes)
    for file in tokenizer.iterdir():
        if file.name not in _MODEL_FILES:
            shutil.copy(file, folder)
    (folder / PACE).touch()
    return folder


def keep_pace(folder: Path) -> None:
    """From now on each step of this process's engines, which serve ``folder``, takes as long as that says."""
    from engine.engine import Engine

    step = Engine.step

    def slow(engine: Engine) -> list[TokenDelta]:
        ends = time.monotonic() + (SLOW_S if (folder / SLOW).exists() else STEP_S)
        deltas = step(engine)
        time.sleep(max(ends - time.monotonic(), 0.0))
        return deltas

    Engine.step = slow  # type: ignore[method-assign]
