"""What a planted fault is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One exact replacement in one source file, and the tests that must notice it."""

    file: str
    """Path of the source file, relative to the root."""
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Unit tests of the file, relative to ``tests/``; of one that takes long, ``file::test``."""
    why: str
    """What goes wrong with it, as one would report it."""
    hangs: bool = False
    """Whether its symptom is that the tests never end; any other fault whose tests do not is not decided."""
