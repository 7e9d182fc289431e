"""Packed messages come back as they were, and nothing unreadable is taken for one."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.channel import wire
from app.channel.wire_sections import SLICE_KEYS, Section, SnapshotSlice, slices
from app.routing.load import LoadReport
from app.routing.requirement import Build
from engine.errors import InvalidRequestError
from engine.kv.block_keys import KeyScheme
from engine.kv.kv_events import KvBatch, KvSnapshot
from engine.models.identity import ModelIdentity
from engine.request import CacheNamespace, FinishReason, ModelLimits, RequestStats
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput
from engine.token_logprobs import TokenLogprobs

u32 = st.integers(0, 2**32 - 1)
logprobs = st.floats(-1e4, 0.0)
scores = st.lists(st.tuples(u32, logprobs), max_size=20).flatmap(
    lambda top: st.builds(
        TokenLogprobs,
        logprobs,
        u32,
        st.just(tuple(token for token, _ in top)),
        st.just(tuple(value for _, value in top)),
    )
)
records = st.lists(
    st.builds(
        wire.Record,
        attempt=st.integers(0, 2**64 - 1),
        index=u32,
        token_ids=st.lists(u32, max_size=40),
        cached_tokens=u32,
        end=st.sampled_from([None, *FinishReason]),
        message=st.text(max_size=100),
        sequence=u32,
        final=st.booleans(),
        logprobs=st.none() | st.lists(scores, max_size=3),
        prompt_logprobs=st.none() | st.lists(scores, max_size=3).map(tuple),
        stats=st.none()
        | st.builds(RequestStats, st.none() | st.floats(0, 1e9), st.none() | st.floats(0, 1e9), u32, u32),
    ),
    max_size=8,
)
u64 = st.integers(0, 2**64 - 1)
keys = st.lists(u64, max_size=9)
seconds = st.floats(0, 1e9)
loads = st.builds(LoadReport, *[u64] * 6, seconds, seconds, *[u64] * 4, seconds, seconds, seconds, *[u64] * 3)
batches = st.builds(KvBatch, u64, keys, keys, st.booleans(), u64, u32)
parts = st.builds(SnapshotSlice, u64, u32, u32, keys, u64, u32)
LIMITS = ModelLimits(vocab_size=49152, max_model_len=8192, num_blocks=100, block_size=16)


@given(epoch=u32, sequence=u32, batch=records)
def test_records_round_trip(epoch: int, sequence: int, batch: list[wire.Record]) -> None:
    frame = wire.unpack_frame(wire.pack_records(epoch, sequence, batch))
    assert (frame.epoch, frame.sequence, frame.hello) == (epoch, sequence, None)
    assert frame.records == batch


def test_frame_of_64_tokens_is_small() -> None:
    batch = [wire.Record(attempt, 7, [attempt]) for attempt in range(64)]
    assert len(wire.pack_records(1, 2, batch)) == 16 + 64 * (28 + 4)


def test_long_message_is_cut_at_the_limit() -> None:
    record = wire.Record(1, 0, [], end=FinishReason.ERROR, message="é" * 5000)
    (back,) = wire.unpack_frame(wire.pack_records(1, 0, [record])).records
    assert back.message == "é" * (wire.MAX_MESSAGE_BYTES // 2)


@given(batch=records, kv=st.lists(batches | parts, max_size=4), load=st.none() | loads)
def test_sections_round_trip(
    batch: list[wire.Record], kv: list[KvBatch | SnapshotSlice], load: LoadReport | None
) -> None:
    sections: list[Section] = [*kv, *([] if load is None else [load])]
    frame = wire.unpack_frame(wire.pack_records(1, 2, batch, sections))
    assert (frame.records, frame.kv, frame.load) == (batch, kv, load)


@given(kv=st.lists(batches | parts, max_size=3), load=loads, data=st.data())
def test_truncated_or_longer_sections_are_refused(
    kv: list[KvBatch | SnapshotSlice], load: LoadReport, data: st.DataObject
) -> None:
    packed = wire.pack_records(1, 2, [], [load, *kv])
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(wire.WireError):
        wire.unpack_frame(packed[:cut])
    with pytest.raises(wire.WireError):
        wire.unpack_frame(packed + b"\0")


def test_sections_of_unknown_kinds_are_refused() -> None:
    load = LoadReport(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, 0)
    packed = bytearray(wire.pack_records(1, 2, [], [load]))
    packed[16] = 9
    with pytest.raises(wire.WireError, match="9"):
        wire.unpack_frame(bytes(packed))


def test_sections_are_small() -> None:
    load = LoadReport(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, 0)
    assert len(wire.pack_records(1, 2, [], [load])) == 16 + 1 + 160
    assert len(wire.pack_records(1, 2, [], [KvBatch(1, [1, 2], [3], False, 0, 2)])) == 16 + 1 + 29 + 3 * 8


@pytest.mark.parametrize("count", [0, 1, SLICE_KEYS, SLICE_KEYS + 1, 3 * SLICE_KEYS])
def test_slices_make_the_snapshot(count: int) -> None:
    snapshot = KvSnapshot(7, list(range(count)), 5, count)
    made = slices(snapshot)
    assert [key for part in made for key in part.keys] == snapshot.keys
    assert max(len(part.keys) for part in made) <= SLICE_KEYS
    assert [part.part for part in made] == list(range(len(made)))
    assert {(part.sequence, part.parts, part.xor, part.count) for part in made} == {(7, len(made), 5, count)}


@pytest.mark.parametrize("window", [None, 4096])
def test_hello_round_trip_with_keys(window: int | None) -> None:
    model, build = ModelIdentity("revision", "torch.float32", "tokenizer"), Build("version", 1.5)
    hello = wire.Hello.of(LIMITS, KeyScheme("revision", "torch.float32", 16), window, model, build)
    back = wire.unpack_frame(wire.pack_hello(3, 0, hello)).hello
    assert back == hello
    assert back.agrees
    assert len(back.probe) == 3


def test_a_probe_of_other_keys_does_not_agree() -> None:
    hello = wire.Hello(LIMITS, KeyScheme("revision", "torch.float32", 16), None, (1, 2, 3))
    assert not hello.agrees
    assert wire.Hello.of(LIMITS, None, None).agrees


def test_hello_round_trip() -> None:
    hello = wire.Hello(LIMITS)
    frame = wire.unpack_frame(wire.pack_hello(3, 0, hello))
    assert (frame.epoch, frame.sequence, frame.hello, frame.records) == (3, 0, hello, [])


@given(batch=records, data=st.data())
def test_truncated_or_longer_frames_are_refused(batch: list[wire.Record], data: st.DataObject) -> None:
    packed = wire.pack_records(1, 2, batch)
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(wire.WireError):
        wire.unpack_frame(packed[:cut])
    with pytest.raises(wire.WireError):
        wire.unpack_frame(packed + b"\0")


def test_other_versions_are_refused() -> None:
    frame = bytearray(wire.pack_records(1, 2, []))
    frame[0] = wire.VERSION + 1
    with pytest.raises(wire.WireError, match=f"version {wire.VERSION + 1}"):
        wire.unpack_frame(bytes(frame))


@given(
    tokens=st.lists(u32, max_size=50),
    outputs=st.lists(st.none() | st.lists(u32, max_size=9).map(tuple), max_size=5).map(tuple),
    stops=st.lists(st.integers(0, 100), max_size=5),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    salt=st.text(max_size=20),
    priority=st.integers(-5, 5),
)
def test_submission_round_trip(
    tokens: list[int],
    outputs: tuple[tuple[int, ...] | None, ...],
    stops: list[int],
    seed: int | None,
    salt: str,
    priority: int,
) -> None:
    submission = wire.Submission(
        request_id="r-1",
        attempt=2**40,
        token_ids=tokens,
        params=SamplingParams(
            max_tokens=None, top_p=0.9, seed=seed, stop_token_ids=tuple(stops), n=3, best_of=5
        ),
        namespace=CacheNamespace(adapter="a", tenant="t", salt=salt),
        priority=priority,
        generated_before=3,
        outputs=outputs,
        age_s=0.25,
        client=salt,
        sender=salt + "s",
    )
    assert wire.unpack_submission(wire.pack_submission(submission)) == submission


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_every_field_of_a_beam_search_arrives(early_stopping: bool | str) -> None:
    params = SamplingParams(
        n=2, use_beam_search=True, beam_width=4, length_penalty=-0.5, early_stopping=early_stopping
    )
    submission = wire.Submission("r", 1, [1, 2], params)
    assert wire.unpack_submission(wire.pack_submission(submission)).params == params


def test_what_changes_logits_and_asks_for_log_probabilities_arrives() -> None:
    params = SamplingParams(
        max_tokens=0,
        presence_penalty=-0.5,
        frequency_penalty=2,
        repetition_penalty=1.25,
        logit_bias={7: -100, 3: 0.5},
        bad_words=((1, 2), (3,)),
        allowed_token_ids=(5, 3),
        logprobs=0,
        prompt_logprobs=20,
    )
    submission = wire.Submission("r", 1, [1, 2], params)
    assert wire.unpack_submission(wire.pack_submission(submission)).params == params


def test_the_form_of_the_output_arrives() -> None:
    form = StructuredOutput("choice", '["yes", "nó"]')
    submission = wire.Submission("r", 1, [1, 2], SamplingParams(structured_output=form))
    assert wire.unpack_submission(wire.pack_submission(submission)).params.structured_output == form


def test_bad_submissions() -> None:
    packed = wire.pack_submission(
        wire.Submission("r", 1, [1, 2], SamplingParams(temperature=0.5), outputs=((3,), None, (4, 5)))
    )
    for bad in (*(packed[:cut] for cut in (0, 5, 30, len(packed) - 1)), packed + b"\0"):
        with pytest.raises(wire.WireError):
            wire.unpack_submission(bad)
    with pytest.raises(InvalidRequestError, match="temperature"):
        wire.unpack_submission(packed.replace(b'"temperature": 0.5', b'"temperature": 9.0'))


EDITS = st.tuples(st.integers(0, 2000), st.integers(0, 9), st.binary(max_size=9))
"""Of bytes: where, how many go, what comes instead."""
TOP = TokenLogprobs(-0.5, 2, (4, 5), (-0.1, -0.5))
SAMPLE_FRAME = wire.pack_records(
    1,
    2,
    [
        wire.Record(5, 7, [1, 2, 3], 4, FinishReason.ERROR, "message", 1, True),
        wire.Record(6, 8, [1], logprobs=[TOP], prompt_logprobs=(TOP, TokenLogprobs(-1.0, 7))),
    ],
    [
        LoadReport(1, 2, 3, 4, 5, 6, 1.0, 2.0, 7, 8, 9, 10, 3.0, 4.0, 5.0, 11, 12, 13),
        KvBatch(3, [1, 2], [3], True, 5, 6),
        SnapshotSlice(3, 0, 2, [1, 2, 3], 4, 5),
    ],
)
SAMPLE_HELLO = wire.pack_hello(1, 0, wire.Hello.of(LIMITS, KeyScheme("model", "float32", 16), 7))
SAMPLE_SUBMISSION = wire.pack_submission(
    wire.Submission("r", 1, [1, 2], SamplingParams(n=3), outputs=((3,), None, (4, 5)))
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    whole=st.sampled_from([SAMPLE_FRAME, SAMPLE_HELLO, SAMPLE_SUBMISSION, b"", bytes([wire.VERSION])]),
    edits=st.lists(EDITS, min_size=1, max_size=4),
)
def test_nothing_else_comes_of_damaged_messages(whole: bytes, edits: list[tuple[int, int, bytes]]) -> None:
    for place, gone, new in edits:
        place %= len(whole) + 1
        whole = whole[:place] + new + whole[place + gone :]
    for unpack in (wire.unpack_frame, wire.unpack_submission):
        with contextlib.suppress(wire.WireError, InvalidRequestError):
            unpack(whole)


@pytest.mark.parametrize(
    "head",
    [
        b"[" * 100_000,
        b"9" * 5000,
        b"null",
        b"[]",
        *(
            SAMPLE_SUBMISSION[9:-20].replace(b'"%b": ' % name, b'"%b": %b, "_": ' % (name, value))
            for name, value in [
                (b"attempt", b'"x"'),
                (b"priority", b'"x"'),
                (b"priority", b"1.5"),
                (b"generated_before", b"null"),
                (b"age_s", b'"x"'),
                (b"client", b"7"),
                (b"client", b"null"),
                (b"sender", b"7"),
                (b"namespace", b"null"),
                (b"namespace", b'{"other": 1}'),
                (b"outputs", b"[[]]"),
                (b"outputs", b"[-1]"),
                (b"outputs", b'["3I4"]'),
                (b"params", b'{"stop_token_ids": [], "other": 1}'),
            ]
        ),
        *(SAMPLE_SUBMISSION[9:-20].replace(b'"%b"' % name, b'"_"') for name in (b"attempt", b"age_s", b"n")),
    ],
)
def test_heads_that_are_no_submissions_are_refused(head: bytes) -> None:
    assert SAMPLE_SUBMISSION[9:-20].endswith(b"}")
    with pytest.raises(wire.WireError):
        wire.unpack_submission(struct.pack("<BII", wire.VERSION, len(head), 2) + head + SAMPLE_SUBMISSION[-20:])
    with pytest.raises(wire.WireError):
        wire.unpack_frame(struct.pack("<BBIIIH", wire.VERSION, wire.FrameKind.HELLO, 1, 0, len(head), 0) + head)


def test_a_hello_with_bytes_after_it_is_refused() -> None:
    with pytest.raises(wire.WireError, match="1 bytes too many"):
        wire.unpack_frame(SAMPLE_HELLO + b"\0")
