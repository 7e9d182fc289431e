"""Sections of a frame: changes of a replica's prefix cache, its load, and its figures.

Little-endian, after the frame's records::

    section   kind u8, then
    load      the fields of :class:`app.routing.load.LoadReport` in their order, f64 or u64 each
    batch     sequence u64, cleared u8, stored u32, removed u32, xor u64, count u32; then the keys, u64 each
    slice     sequence u64, part u32, parts u32, xor u64, count u32, keys u32; then the keys, u64 each
    figures   count u16; then the figures, f64 each
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TypeAlias

from app.routing import load
from app.routing.load import LoadReport
from engine.kv.kv_events import KvBatch, KvSnapshot

SLICE_KEYS = 4096
"""Maximum number of keys in one slice of a snapshot."""

_BATCH = struct.Struct("<QBIIQI")
_SLICE = struct.Struct("<QIIQII")
_FIGURES = struct.Struct("<H")


class SectionKind(enum.IntEnum):
    """The content of a section."""

    LOAD = 1
    BATCH = 2
    SLICE = 3
    FIGURES = 4


@dataclass(frozen=True, slots=True)
class SnapshotSlice:
    """Part ``part`` of ``parts`` of a snapshot; the first part replaces everything before."""

    sequence: int
    part: int
    parts: int
    keys: list[int]
    xor: int
    count: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What the replica has counted so far; ``app/metrics/samples.py`` knows which number is which."""

    numbers: tuple[float, ...]


KvSection: TypeAlias = KvBatch | SnapshotSlice
Section: TypeAlias = LoadReport | KvSection | Figures


def slices(snapshot: KvSnapshot) -> list[SnapshotSlice]:
    """A snapshot in one or more parts that fit a frame."""
    keys = snapshot.keys
    parts = max(1, -(-len(keys) // SLICE_KEYS))
    return [
        SnapshotSlice(
            snapshot.sequence,
            part,
            parts,
            keys[part * SLICE_KEYS : (part + 1) * SLICE_KEYS],
            snapshot.xor,
            snapshot.count,
        )
        for part in range(parts)
    ]


def pack_section(section: Section) -> bytes:
    """Encode one section, beginning with its kind."""
    match section:
        case LoadReport():
            return bytes((SectionKind.LOAD,)) + load.pack(section)
        case Figures(numbers):
            count = len(numbers)
            return bytes((SectionKind.FIGURES,)) + _FIGURES.pack(count) + struct.pack(f"<{count}d", *numbers)
        case KvBatch(sequence, stored, removed, cleared, xor, count):
            keys = [*stored, *removed]
            head = _BATCH.pack(sequence, cleared, len(stored), len(removed), xor, count)
            return bytes((SectionKind.BATCH,)) + head + struct.pack(f"<{len(keys)}Q", *keys)
        case SnapshotSlice(sequence, part, parts, keys, xor, count):
            head = _SLICE.pack(sequence, part, parts, xor, count, len(keys))
            return bytes((SectionKind.SLICE,)) + head + struct.pack(f"<{len(keys)}Q", *keys)


def unpack_section(data: bytes, offset: int) -> tuple[Section, int]:
    """Decode the section at ``offset``; also returns where it ends.

    Raises:
        struct.error, ValueError, IndexError: it is truncated or of an unknown kind.
    """
    kind = SectionKind(data[offset])
    offset += 1
    if kind is SectionKind.LOAD:
        return load.unpack_from(data, offset), offset + load.WIRE.size
    if kind is SectionKind.FIGURES:
        (count,) = _FIGURES.unpack_from(data, offset)
        offset += _FIGURES.size
        return Figures(struct.unpack_from(f"<{count}d", data, offset)), offset + 8 * count
    if kind is SectionKind.BATCH:
        sequence, cleared, stored, removed, xor, count = _BATCH.unpack_from(data, offset)
        offset += _BATCH.size
        keys = list(struct.unpack_from(f"<{stored + removed}Q", data, offset))
        end = offset + 8 * len(keys)
        return KvBatch(sequence, keys[:stored], keys[stored:], bool(cleared), xor, count), end
    sequence, part, parts, xor, count, length = _SLICE.unpack_from(data, offset)
    offset += _SLICE.size
    keys = list(struct.unpack_from(f"<{length}Q", data, offset))
    return SnapshotSlice(sequence, part, parts, keys, xor, count), offset + 8 * length
