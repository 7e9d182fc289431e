"""Block keys: names of blocks that are the same in every process, by which routers and engines name prefixes.

``key_i = BLAKE2b-64(key_{i-1} ‖ tokens of block i)``; the first follows the key of a root, which names
everything else that the KV depends on. A key says where a prefix *probably* is; an engine compares tokens
before it uses a block (:mod:`engine.kv.prefix_index`): a wrong or colliding key costs a hit, never correctness.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from engine.request import CacheNamespace

KEY_BYTES = 8

_PERSON = b"quire.kv.blocks1"  # sixteen bytes; a change of this format takes a new one
_PROBE_BLOCKS = 3
_START = hashlib.blake2b(digest_size=KEY_BYTES, person=_PERSON)


def root_key(model_revision: str, dtype: str, block_size: int, namespace: CacheNamespace) -> int:
    """Return the 64-bit key of one root; equal only for equal parts.

    Each part is framed by its tag and its length in bytes, so that no text in one part can pass for another.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=_PERSON)
    parts = {
        b"rev ": model_revision.encode(),
        b"type": dtype.encode(),
        b"size": str(block_size).encode(),
        b"adap": namespace.adapter.encode(),
        b"tena": namespace.tenant.encode(),
        b"salt": namespace.salt.encode(),
    }
    for tag, value in parts.items():
        digest.update(tag + struct.pack("<Q", len(value)) + value)
    return int.from_bytes(digest.digest(), "little")


def block_keys(root: int, token_ids: Sequence[int], block_size: int) -> list[int]:
    """Return the 64-bit key of each full block of ``token_ids``, first to last; a partial last block has none.

    ``root`` is a key of :func:`root_key`, or the key of the block before ``token_ids[0]`` to continue from
    there.

    Raises:
        ValueError: a token id is negative or needs more than 32 bits.
    """
    blocks = len(token_ids) // block_size
    count = blocks * block_size
    try:
        data = struct.pack(f"<{count}I", *token_ids[:count])
    except struct.error:
        raise ValueError("token ids must be integers from 0 to 4294967295 to be hashed") from None
    width = 4 * block_size
    key = root.to_bytes(KEY_BYTES, "little")
    made = []
    for start in range(0, blocks * width, width):
        state = _START.copy()  # quicker than a new one
        state.update(key + data[start : start + width])
        key = state.digest()
        made.append(key)
    return list(struct.unpack(f"<{blocks}Q", b"".join(made)))


class BlockHash:
    """The key of one block after another; the same values as :func:`block_keys`, for one block at a time."""

    def __init__(self, block_size: int) -> None:
        self._pack = struct.Struct(f"<Q{block_size}I").pack

    def __call__(self, key: int, token_ids: Sequence[int]) -> int:
        """Return the key of the full block ``token_ids`` after that of ``key``.

        Raises:
            ValueError: it is not a full block, or an id is negative or needs more than 32 bits.
        """
        try:
            data = self._pack(key, *token_ids)
        except struct.error as error:
            raise ValueError(f"no block of tokens to be hashed: {error}") from None
        state = _START.copy()
        state.update(data)
        return int.from_bytes(state.digest(), "little")


@dataclass(frozen=True, slots=True)
class KeyScheme:
    """What the keys of one model's blocks depend on besides tokens and namespace."""

    model_revision: str
    dtype: str
    block_size: int

    def root(self, namespace: CacheNamespace) -> int:
        """See :func:`root_key`."""
        return root_key(self.model_revision, self.dtype, self.block_size, namespace)

    def keys(self, token_ids: Sequence[int], namespace: CacheNamespace) -> list[int]:
        """See :func:`block_keys`."""
        return block_keys(self.root(namespace), token_ids, self.block_size)

    def probe(self) -> list[int]:
        """Keys of a fixed text: two processes that agree on them agree on all keys."""
        tokens = [(7 * place * place + 3) % 40_961 for place in range(_PROBE_BLOCKS * self.block_size)]
        return self.keys(tokens, CacheNamespace(adapter="probe", tenant="of", salt="keys"))
