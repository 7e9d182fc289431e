"""The messages on the TCP connection of a channel.

A message is the bytes of its body u32, its kind u8, and the body. The ingress begins with the ``KEY_BYTES`` of
the key in the hello. Then follow, with the layouts of :mod:`app.channel.wire`::

    ingress to engine   SUBMIT  attempt u64, submission
                        BEAT    acknowledged u32, resync u8, stale u16, unwanted u16; attempts u64 each;
                                attempt u64 and sequence u32 each
    engine to ingress   FRAME   frame
                        ANSWER  attempt u64, JSON: why the attempt has ended without a final record
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.channel.wire import WireError

KEY_BYTES = 32
MAX_MESSAGE_BYTES = 2**30

_PREFIX = struct.Struct("<IB")
_ATTEMPT = struct.Struct("<Q")
_BEAT = struct.Struct("<IBHH")
_SEQUENCE = struct.Struct("<QI")


class MessageKind(enum.IntEnum):
    """What the body of a message is; see the module."""

    SUBMIT = 1
    BEAT = 2
    FRAME = 3
    ANSWER = 4


@dataclass(frozen=True, slots=True)
class Beat:
    """The arguments of ``ChannelHub.beat`` that its caller chooses."""

    acknowledged: int
    stale: Sequence[int] = ()
    unwanted: Sequence[tuple[int, int]] = ()
    resync: bool = False


class Messages:
    """Joins what arrives on a connection to messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The kind and the body of each message that is complete with ``data``.

        Raises:
            WireError: a message is too long.
        """
        whole: bytes | bytearray = data
        if self._rest:
            self._rest += data
            whole = self._rest
        start = 0
        while len(whole) - start >= _PREFIX.size:
            length, kind = _PREFIX.unpack_from(whole, start)
            if length > MAX_MESSAGE_BYTES:
                raise WireError(f"message of {length} bytes; at most {MAX_MESSAGE_BYTES} are read")
            end = start + _PREFIX.size + length
            if end > len(whole):
                break
            yield kind, bytes(whole[start + _PREFIX.size : end])
            start = end
        if start or whole is data:
            self._rest = bytearray(whole[start:])


def pack_message(kind: MessageKind, *body: bytes) -> bytes:
    """One message; ``body`` is joined."""
    return b"".join((_PREFIX.pack(sum(map(len, body)), kind), *body))


def pack_submit(attempt: int, submission: bytes) -> bytes:
    """A message that submits an attempt."""
    return pack_message(MessageKind.SUBMIT, _ATTEMPT.pack(attempt), submission)


def unpack_submit(body: bytes) -> tuple[int, bytes]:
    """The attempt and its submission.

    Raises:
        WireError: the message is unreadable.
    """
    if len(body) < _ATTEMPT.size:
        raise WireError(f"unreadable submission of {len(body)} bytes")
    return _ATTEMPT.unpack_from(body)[0], body[_ATTEMPT.size :]


def pack_beat(beat: Beat) -> bytes:
    """A message that is a beat."""
    stale, unwanted = beat.stale, beat.unwanted
    return pack_message(
        MessageKind.BEAT,
        _BEAT.pack(beat.acknowledged, beat.resync, len(stale), len(unwanted)),
        *map(_ATTEMPT.pack, stale),
        *(_SEQUENCE.pack(attempt, sequence) for attempt, sequence in unwanted),
    )


def unpack_beat(body: bytes) -> Beat:
    """Decode a beat.

    Raises:
        WireError: the message is unreadable.
    """
    try:
        acknowledged, resync, num_stale, num_unwanted = _BEAT.unpack_from(body)
        middle = _BEAT.size + num_stale * _ATTEMPT.size
        stale = [attempt for (attempt,) in _ATTEMPT.iter_unpack(body[_BEAT.size : middle])]
        unwanted = list(_SEQUENCE.iter_unpack(body[middle:]))
    except struct.error as error:
        raise WireError(f"unreadable beat of {len(body)} bytes: {error}") from error
    if (len(stale), len(unwanted)) != (num_stale, num_unwanted):
        raise WireError(f"beat of {len(body)} bytes has another length than it says")
    return Beat(acknowledged, stale, unwanted, bool(resync))


def pack_answer(attempt: int, outcome: dict[str, Any]) -> bytes:
    """A message that answers a submission; see ``run_attempt`` for the outcome."""
    return pack_message(MessageKind.ANSWER, _ATTEMPT.pack(attempt), json.dumps(outcome).encode())


def unpack_answer(body: bytes) -> tuple[int, dict[str, Any]]:
    """The attempt and its outcome.

    Raises:
        WireError: the message is unreadable.
    """
    attempt, data = unpack_submit(body)
    try:
        outcome = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"unreadable answer of {len(body)} bytes: {error}") from error
    if not isinstance(outcome, dict):
        raise WireError("an answer must be a JSON object")
    return attempt, outcome
