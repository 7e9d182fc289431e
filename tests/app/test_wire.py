"""Packed messages come back as they were, and nothing unreadable is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import wire
from engine.errors import InvalidRequestError
from engine.request import CacheNamespace, FinishReason, ModelLimits
from engine.sampling_params import SamplingParams

u32 = st.integers(0, 2**32 - 1)
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
    ),
    max_size=8,
)
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
    )
    assert wire.unpack_submission(wire.pack_submission(submission)) == submission


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_every_field_of_a_beam_search_arrives(early_stopping: bool | str) -> None:
    params = SamplingParams(
        n=2, use_beam_search=True, beam_width=4, length_penalty=-0.5, early_stopping=early_stopping
    )
    submission = wire.Submission("r", 1, [1, 2], params)
    assert wire.unpack_submission(wire.pack_submission(submission)).params == params


def test_bad_submissions() -> None:
    packed = wire.pack_submission(
        wire.Submission("r", 1, [1, 2], SamplingParams(), outputs=((3,), None, (4, 5)))
    )
    for cut in (0, 5, 30, len(packed) - 1):
        with pytest.raises(wire.WireError):
            wire.unpack_submission(packed[:cut])
    with pytest.raises(InvalidRequestError, match="temperature"):
        wire.unpack_submission(packed.replace(b'"temperature": 1.0', b'"temperature": 9.0'))
