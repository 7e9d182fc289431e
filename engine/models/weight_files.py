"""The files of a model folder that hold its weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

from engine.errors import ConfigError, shown

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, from its index or the single file, in order.

    Raises:
        ConfigError: there are none, or the index names one that is missing.
    """
    index = folder / _INDEX
    if index.is_file():
        try:
            values = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            if wrong := [value for value in values if not isinstance(value, str)]:
                raise TypeError(f"weight_map names {wrong[0]!r}, which is not a file name")
            names = sorted(set(values))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"cannot read {index}: {error!r}") from error
        files = [folder / Path(name).name for name in names]
    else:
        files = [folder / _SINGLE]
        if not files[0].is_file():
            files = sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not os.path.isfile(path)]  # Path's method raises for long names
    if missing:
        raise ConfigError(f"{folder}: weight file {shown(missing[0])} is named in {_INDEX} but missing")
    if not files:
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise ConfigError(
                f"{folder} has only pickled weights ({pickles[0]}), which can run code when read; "
                "convert them to safetensors"
            )
        gguf = "; GGUF is not read" if next(folder.glob("*.gguf"), None) else ""
        raise ConfigError(f"{folder} has no *.safetensors file, so there are no weights to load{gguf}")
    return files
