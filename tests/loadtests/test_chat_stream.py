from __future__ import annotations

import json

import pytest

from app.api.openai_responses import ChunkWriter, Envelope, Usage
from loadtests.chat_stream import ChatStream, events_of

WRITER = ChunkWriter(Envelope("id", 0, "m", "fp"), chat=True, include_usage=True, continuous_usage=False)
USAGE = Usage(prompt_tokens=5, completion_tokens=2)
WHOLE = [
    WRITER.role(),
    WRITER.text(0, "Grüß", None, USAGE),
    WRITER.text(0, " dich", "stop", USAGE),
    WRITER.usage(USAGE),
    b"data: [DONE]\n\n",
]


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_blocks_of_any_size_give_the_same_answer(size: int) -> None:
    body = b": keep-alive\n\n" + b"".join(WHOLE)
    stream = ChatStream()
    assert stream.read(body[i : i + size] for i in range(0, len(body), size)) is None
    assert (stream.text, stream.num_tokens, stream.finish_reason) == ("Grüß dich", 2, "stop")
    assert stream.began < stream.first_token <= stream.last_token


def test_events_are_their_data() -> None:
    assert list(events_of([b"data: 1\n", b"\ndata: 2\r\n\r\n"])) == [b"1", b"2"]


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (WHOLE[:-1], "without [DONE]"),
        ([WHOLE[0], WHOLE[1], WHOLE[-1]], "finish reason"),
        (
            [WHOLE[0], b"data: " + json.dumps({"error": {"message": "no engine"}}).encode() + b"\n\n"],
            "no engine",
        ),
        ([b"data: {nonsense\n\n"], "no JSON"),
        ([], "without [DONE]"),
    ],
)
def test_a_stream_that_is_not_whole_is_told(blocks: list[bytes], words: str) -> None:
    fault = ChatStream().read(blocks)
    assert fault is not None
    assert words in fault
