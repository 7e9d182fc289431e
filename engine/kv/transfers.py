"""The block copies that a step begins with."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Transfers:
    """Block copies in this order of kinds; pairs are (source, destination).

    Sources hold what the previous step left in them: within a kind all sources are read before any
    destination is written. The copies must be carried out even if the step itself fails.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)  # device block, host block
    copies: list[tuple[int, int]] = field(default_factory=list)  # copy-on-write, both on the device
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # host block, device block

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.copies or self.swap_in)
