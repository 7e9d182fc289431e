"""The types that a model can run in, by name; without torch, which takes seconds to load."""

from __future__ import annotations

from engine.errors import ConfigError
from engine.models.config import ModelConfig
from engine.models.tensor_files import TensorFiles

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Of a number, by the name of its type; the kernels take all of these."""

EMBEDDING = "model.embed_tokens.weight"
FILE_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Those of weights, as safetensors files call them."""


def dtype_name(wanted: str, config: ModelConfig, files: TensorFiles) -> str:
    """The type to run in; ``"auto"`` is that of the configuration, else of the checkpoint's embedding.

    Raises:
        ConfigError: the kernels do not take it, or there is no embedding.
    """
    if wanted != "auto":
        chosen = wanted
    elif config.dtype is not None:
        chosen = config.dtype
    else:
        stored = files.stored_as(EMBEDDING)
        chosen = FILE_TYPES.get(stored, stored)
    if chosen not in BYTES:
        raise ConfigError(f"dtype {chosen} is not supported; set dtype to one of {', '.join(BYTES)}")
    return chosen
