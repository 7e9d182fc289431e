"""Sizes in bytes as people write and read them."""

from __future__ import annotations

import math
import re

from engine.errors import ConfigError, shown

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i)?)?B?\s*", re.IGNORECASE)
_UNITS = " KMGT"


def parse_bytes(text: str) -> int:
    """``40GiB``, ``24G``, ``512MB`` or a plain number of bytes; units with an ``i`` are powers of 1024.

    Raises:
        ConfigError: the text is no positive size.
    """
    match = _SIZE.fullmatch(text)
    size = 0
    if match:
        number, unit, binary = match.groups()
        exact = float(number) * (1024 if binary else 1000) ** _UNITS.index((unit or " ").upper())
        size = int(exact) if exact < math.inf else 0
    if size < 1:
        raise ConfigError(f"{shown(text)} is not a size in bytes; write for example 40GiB or 512MB")
    return size


def format_bytes(size: int) -> str:
    """The size with a binary unit and at most two decimals: ``40 KiB``, ``16.43 GiB``."""
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.2f}".rstrip("0").rstrip(".") + f" {unit}"
