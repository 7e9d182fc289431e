"""The messages on a channel's connection: layouts, pieces, and what cannot be read."""

from __future__ import annotations

import random
import struct

import pytest

from app.channel import wire_messages
from app.channel.wire import WireError
from app.channel.wire_messages import (
    Beat,
    MessageKind,
    Messages,
    pack_answer,
    pack_beat,
    pack_message,
    pack_submit,
    unpack_answer,
    unpack_beat,
    unpack_submit,
)

BEATS = (
    Beat(0),
    Beat(2**32 - 1, [1, 2**64 - 1], [(3, 0), (2**64 - 1, 2**32 - 1)], True),
    Beat(7, [], [(1, 2)]),
    Beat(7, [5], []),
)


def body(message: bytes) -> bytes:
    ((_, one),) = Messages().feed(message)
    return one


def test_a_message_has_its_length_its_kind_and_its_body() -> None:
    assert pack_message(MessageKind.FRAME, b"ab", b"c") == b"\x03\0\0\0\x03abc"
    assert pack_message(MessageKind.BEAT) == b"\0\0\0\0\x02"


@pytest.mark.parametrize("beat", BEATS, ids=str)
def test_a_beat_arrives_as_it_was_sent(beat: Beat) -> None:
    assert unpack_beat(body(pack_beat(beat))) == Beat(
        beat.acknowledged, list(beat.stale), list(beat.unwanted), beat.resync
    )


def test_submissions_and_answers_arrive_as_they_were_sent() -> None:
    assert unpack_submit(body(pack_submit(2**64 - 1, b"rest"))) == (2**64 - 1, b"rest")
    outcome = {"invalid": ["\u00e4", None, "code"]}
    assert unpack_answer(body(pack_answer(3, outcome))) == (3, outcome)


@pytest.mark.parametrize("seed", range(30))
def test_pieces_of_any_size_join_to_the_same_messages(seed: int) -> None:
    rng = random.Random(seed)
    sent = [
        (rng.choice(list(MessageKind)), rng.randbytes(rng.choice((0, 1, 5, 300, 70_000)))) for _ in range(20)
    ]
    data = b"".join(pack_message(kind, text) for kind, text in sent)
    most = rng.choice((1, 3, 1000, 100_000)) if len(data) < 10_000 else rng.choice((1000, 65_536, 10**6))
    messages, arrived = Messages(), []
    while data:
        size = rng.randint(1, most)
        arrived += messages.feed(data[:size])
        data = data[size:]
    assert arrived == sent


def test_a_message_that_is_too_long_is_not_awaited() -> None:
    with pytest.raises(WireError, match="at most 1073741824"):
        list(Messages().feed(struct.pack("<IB", wire_messages.MAX_MESSAGE_BYTES + 1, 1)))


@pytest.mark.parametrize("seed", range(50))
def test_what_cannot_be_read_is_said_to_be_so(seed: int) -> None:
    rng = random.Random(seed)
    whole = body(rng.choice([pack_beat(BEATS[1]), pack_submit(1, b""), pack_answer(1, {"failed": "x"})]))
    cut = rng.randrange(len(whole))
    for read in (unpack_beat, unpack_submit, unpack_answer):
        for data in (whole[:cut], rng.randbytes(rng.randrange(40)), whole + b"\0"):
            try:
                read(data)
            except WireError:
                continue
    with pytest.raises(WireError):
        unpack_beat(body(pack_beat(BEATS[1]))[:-1])
    with pytest.raises(WireError):
        unpack_beat(body(pack_beat(BEATS[1])) + b"\0")
    with pytest.raises(WireError, match="must be a JSON object"):
        unpack_answer(b"\0" * 8 + b"[]")
    with pytest.raises(WireError, match="unreadable answer"):
        unpack_answer(b"\0" * 8 + b"{")
