"""The seeds of requests and of their sequences: functions of what is given, with no state."""

from __future__ import annotations

import hashlib


def request_seed(engine_seed: int, request_id: str) -> int:
    """Seed of a request that brought none: 63 bits of BLAKE2b over the engine's seed and the request's id."""
    digest = hashlib.blake2b(f"{engine_seed}:{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sequence_seed(seed: int, sequence: int) -> int:
    """Seed of one of a request's sequences: the request's own for the first, else 63 bits of BLAKE2b."""
    if sequence == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}#{sequence}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
