"""A small random model with the bundled tokenizer: real text and few computations."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from model_checkpoints import save_tiny

_MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "manifest.json")
_SIZES = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 49152}


def save_small(folder: Path, tokenizer: Path, seed: int, context: int, **changes: Any) -> Path:
    """Save the model with the tokenizer of the folder ``tokenizer``; returns ``folder``."""
    save_tiny(folder, "Llama", seed, max_position_embeddings=context, **_SIZES, **changes)
    for file in tokenizer.iterdir():
        if file.name not in _MODEL_FILES:
            shutil.copy(file, folder)
    return folder
