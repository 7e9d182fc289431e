"""Log probabilities in a record, packed.

Little-endian::

    list    count u32; then the entries
    entry   log probability f64, rank u32, top u8; then so many ids, u32 each, and their log probabilities, f64
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from engine.token_logprobs import TokenLogprobs

_COUNT = struct.Struct("<I")
_ENTRY = struct.Struct("<dIB")


def pack_logprobs(entries: Sequence[TokenLogprobs]) -> bytes:
    """Encode a list of entries."""
    parts = [_COUNT.pack(len(entries))]
    for entry in entries:
        count = len(entry.top_ids)
        parts.append(_ENTRY.pack(entry.logprob, entry.rank, count))
        parts.append(struct.pack(f"<{count}I{count}d", *entry.top_ids, *entry.top_logprobs))
    return b"".join(parts)


def unpack_logprobs(data: bytes, offset: int) -> tuple[list[TokenLogprobs], int]:
    """Decode the list at ``offset``; also returns where it ends.

    Raises:
        struct.error: it is truncated.
    """
    (entries,) = _COUNT.unpack_from(data, offset)
    offset += _COUNT.size
    found = []
    for _ in range(entries):
        logprob, rank, count = _ENTRY.unpack_from(data, offset)
        offset += _ENTRY.size
        top = struct.unpack_from(f"<{count}I{count}d", data, offset)
        offset += 12 * count
        found.append(TokenLogprobs(logprob, rank, top[:count], top[count:]))
    return found, offset
