"""Finds model folders on this machine; downloads nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from engine.errors import ConfigError, nearest
from kernels.cache_dir import cache_root

BUNDLED_NAME = "smollm2-135m-instruct"
BUNDLED_VERSION = "0.1.2"
BUNDLED_ALIASES = frozenset({BUNDLED_NAME, "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"})


def is_bundled(model: str) -> bool:
    """Whether ``model`` is a name of the bundled model; an existing folder of that name comes first."""
    return model in BUNDLED_ALIASES and not Path(model).is_dir()


def bundled_hint(model: str) -> str:
    """``; did you mean 'smollm2-135m-instruct'?`` for a name that misspells it, or nothing."""
    meant = nearest(model, sorted(BUNDLED_ALIASES)) or nearest(model.lower(), [BUNDLED_NAME])
    return f"; did you mean {meant!r}?" if meant else ""


def bundled_folder() -> Path:
    """The bundled model's converted folder, once it has been pulled."""
    return cache_root() / "models" / f"{BUNDLED_NAME}-{BUNDLED_VERSION}"


def at_home(path: str | Path) -> Path:
    """``path`` with ``~`` and ``~user`` written out, where there is such a user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def name_of(folder: Path) -> str:
    """The model's name by its folder, also in the hub's cache, where folders have the names of commits."""
    if folder.parent.name != "snapshots":
        return folder.name
    return folder.parent.parent.name.removeprefix("models--").replace("--", "/")


def local_folder(model: str | Path) -> Path:
    """The folder of a model that is already on this machine: a path, the bundled name, or a cached hub id.

    Raises:
        ConfigError: nothing of that name is here; the message says how to get it.
    """
    path = at_home(model)
    if os.path.isdir(path):  # Path's method raises for long names
        return path
    name = str(model)
    if is_bundled(name):
        folder = bundled_folder()
        if folder.is_dir():
            return folder
        raise ConfigError(
            f"model {name!r} is not in {folder.parent}; download it with: "
            f"{sys.executable} -m app.launch.model_store pull"
        )
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        cached = _hub_snapshot(name)
        if cached is not None:
            return cached
        raise ConfigError(
            f"model {name!r} is neither a folder here nor in the Hugging Face cache; give a folder with "
            f"config.json and *.safetensors, or download it with: hf download {name}"
        )
    raise ConfigError(
        f"model folder {name!r} does not exist; give a folder with config.json and *.safetensors, a hub id "
        f"(owner/name) or {BUNDLED_NAME!r}{bundled_hint(name)}"
    )


def _hub_snapshot(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None
