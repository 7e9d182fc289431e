"""A block of ports that belongs to one server of this host."""

from __future__ import annotations

import random
import socket

from engine.errors import ConfigError

FIRST, LAST, SIZE = 10_000, 30_000, 200
"""Blocks lie above the usual services, and below Serve's own range and Linux's of outgoing connections."""


class PortBlock:
    """``SIZE`` consecutive ports that no other block of this host overlaps, until ``release``.

    The first port is bound and serves nothing, so another server that draws this block finds it taken. A
    process that ends in any way frees its block.
    """

    def __init__(self) -> None:
        """Draw a block.

        Raises:
            ConfigError: every block of this host is taken.
        """
        starts = list(range(FIRST, LAST, SIZE))
        random.SystemRandom().shuffle(starts)
        for start in starts:
            reservation = socket.socket()
            try:
                reservation.bind(("", start))
            except OSError:
                reservation.close()
                continue
            self._reservation = reservation
            self._next, self._end = start + 1, start + SIZE
            return
        raise ConfigError(f"all ports from {FIRST} to {LAST} of this machine are taken; stop another server")

    def take(self) -> int:
        """The next port of the block on which nothing listens.

        Raises:
            ConfigError: none is left.
        """
        while self._next < self._end:
            port = self._next
            self._next += 1
            with socket.socket() as probe:
                try:
                    probe.bind(("", port))
                except OSError:
                    continue  # of some other program
                return port
        raise ConfigError(f"no port up to {self._end} is free; stop what listens there")

    def take_range(self, count: int) -> tuple[int, int]:
        """The next ``count`` ports, from the first (included) to the last (excluded); some may be in use.

        Raises:
            ConfigError: fewer are left.
        """
        low, self._next = self._next, self._next + count
        if self._next > self._end:
            raise ConfigError(f"fewer than {count} ports are left of {SIZE}")
        return low, self._next

    def release(self) -> None:
        """Leave the block to others."""
        self._reservation.close()
