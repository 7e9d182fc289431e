"""What an ingress asks of a new channel: the attempts of the previous one that are to continue.

Little-endian::

    header   version u8, epoch u32 of the channel that ended, count u32
    attempt  number u64, sequences u32; then for each how many tokens have arrived, u32, or ``ENDED``
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from app.channel.wire import VERSION, WireError, check_version

ENDED = 2**32 - 1

_HEADER = struct.Struct("<BII")
_ATTEMPT = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class AttemptClaim:
    """An attempt to continue: how many tokens of each sequence have arrived, ``None`` if it has ended."""

    attempt: int
    received: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Resumption:
    """Attempts of the channel with this ``epoch`` that are to continue; all others are to be aborted."""

    epoch: int
    claims: tuple[AttemptClaim, ...]


def pack_resumption(epoch: int, claims: Iterable[AttemptClaim]) -> bytes:
    """Encode a resumption."""
    parts = [b""]
    for claim in claims:
        received = [ENDED if tokens is None else tokens for tokens in claim.received]
        parts.append(_ATTEMPT.pack(claim.attempt, len(received)))
        parts.append(struct.pack(f"<{len(received)}I", *received))
    parts[0] = _HEADER.pack(VERSION, epoch, (len(parts) - 1) // 2)
    return b"".join(parts)


def unpack_resumption(data: bytes) -> Resumption:
    """Decode a resumption.

    Raises:
        WireError: another version, or an unreadable message.
    """
    try:
        if data:
            check_version(data[0])
        _, epoch, count = _HEADER.unpack_from(data)
        offset, claims = _HEADER.size, []
        for _ in range(count):
            attempt, sequences = _ATTEMPT.unpack_from(data, offset)
            offset += _ATTEMPT.size
            received = struct.unpack_from(f"<{sequences}I", data, offset)
            offset += 4 * sequences
            claims.append(
                AttemptClaim(attempt, tuple(None if tokens == ENDED else tokens for tokens in received))
            )
    except struct.error as error:
        raise WireError(f"unreadable resumption of {len(data)} bytes: {error}") from error
    if offset != len(data):
        raise WireError(f"resumption of {len(data)} bytes has {len(data) - offset} bytes too many")
    return Resumption(epoch, tuple(claims))
