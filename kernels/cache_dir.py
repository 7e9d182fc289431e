"""Where Quire keeps what it builds or downloads once per machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Quire's cache folder: ``$QUIRE_CACHE``, else ``$XDG_CACHE_HOME/quire``, else ``~/.cache/quire``."""
    own = os.environ.get("QUIRE_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "quire"
