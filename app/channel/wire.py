"""Packed messages between an ingress and an engine replica: little-endian, without pickling Quire's types.

A frame is a header, its records, and its sections (:mod:`app.channel.wire_sections`)::

    header  version u8, kind u8, epoch u32, sequence u32, count u32, sections u16
    record  attempt u64, sequence u32, index u32, cached u32, tokens u32, end u8, flags u8, message bytes u16;
            then the tokens, u32 each, the message, and what the flags name: log probabilities of the tokens,
            those of the prompt (:mod:`app.channel.wire_logprobs`), stats
    stats   queue f64, prefill f64, NaN where not known, preemptions u32, generated u32

A hello frame carries ``count`` bytes of JSON instead of records. A submission is a header, JSON and token ids:
the prompt's, then those of each unfinished output, whose lengths the JSON has.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import math
import operator
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.channel.address import Address
from app.channel.wire_logprobs import pack_logprobs, unpack_logprobs
from app.channel.wire_sections import Figures, KvSection, Section, pack_section, unpack_section
from app.routing.load import LoadReport
from app.routing.requirement import UNKNOWN_BUILD, Build, ReplicaProfile
from engine.errors import InvalidRequestError, QuireError
from engine.kv.block_keys import KeyScheme
from engine.models.identity import ModelIdentity
from engine.request import CacheNamespace, FinishReason, ModelLimits, RequestStats
from engine.sampling_params import SamplingParams
from engine.structured_output import StructuredOutput
from engine.token_logprobs import TokenLogprobs

VERSION = 20
"""Incremented with every change of a layout, of engines' metrics, or of the arguments of ``channel`` and
``beat``, so that a release rejects messages that it would misread."""

MAX_MESSAGE_BYTES = 2000

_HEADER = struct.Struct("<BBIIIH")
_RECORD = struct.Struct("<QIIIIBBH")
_STATS = struct.Struct("<ddII")
_SUBMISSION = struct.Struct("<BII")
_PARAMS = [(each.name, getattr(SamplingParams(), each.name)) for each in dataclasses.fields(SamplingParams)]

_END_CODES: dict[FinishReason | None, int] = {
    None: 0,
    FinishReason.STOP: 1,
    FinishReason.LENGTH: 2,
    FinishReason.ABORT: 3,
    FinishReason.ERROR: 4,
}
_FINAL, _HAS_LOGPROBS, _HAS_PROMPT_LOGPROBS, _HAS_STATS = 1, 2, 4, 8  # flags of a record

_END_REASONS = {code: reason for reason, code in _END_CODES.items()}


class WireError(QuireError):
    """A message that this process cannot read."""


class FrameKind(enum.IntEnum):
    """What follows the header of a frame."""

    HELLO = 0
    RECORDS = 1


@dataclass(slots=True)
class Record:
    """New tokens of one sequence of an attempt; ``index`` is the offset of the first in the sequence's output.

    ``end`` is set in the sequence's last record, ``final`` in the attempt's last.
    """

    attempt: int
    index: int
    token_ids: list[int]
    cached_tokens: int = 0
    end: FinishReason | None = None
    message: str = ""  # with FinishReason.ERROR, and with some of ABORT
    sequence: int = 0
    final: bool = False
    logprobs: list[TokenLogprobs] | None = None  # of each token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # in one record of an attempt, if asked for
    stats: RequestStats | None = None  # with the attempt's first token, and at each sequence's end


@dataclass(frozen=True, slots=True)
class Hello:
    """First frame of a channel: what the replica offers, and how its engine makes block keys.

    ``keys`` is ``None`` without prefix caching. ``window`` is the largest window if all layers slide.
    ``probe`` has the engine's keys for a fixed text: an ingress whose keys for it differ must not compare its
    keys with the engine's. ``resumed`` are the attempts of the previous channel that continue. ``address`` is
    where the replica waits for the channel's connection, if it does.
    """

    limits: ModelLimits
    keys: KeyScheme | None = None
    window: int | None = None
    probe: tuple[int, ...] = ()
    model: ModelIdentity = field(default_factory=ModelIdentity)
    build: Build = UNKNOWN_BUILD
    resumed: tuple[int, ...] = ()
    address: Address | None = None

    @classmethod
    def of(
        cls,
        limits: ModelLimits,
        keys: KeyScheme | None,
        window: int | None,
        model: ModelIdentity = ModelIdentity(),  # noqa: B008  (it is immutable)
        build: Build = UNKNOWN_BUILD,
    ) -> Hello:
        """A hello with this process's probe."""
        return cls(limits, keys, window, () if keys is None else tuple(keys.probe()), model, build)

    @property
    def profile(self) -> ReplicaProfile:
        """What the replica offers."""
        return ReplicaProfile(self.limits, self.model)

    @property
    def agrees(self) -> bool:
        """Whether this process makes the same keys as the engine; true without prefix caching."""
        return self.keys is None or self.probe == tuple(self.keys.probe())


@dataclass(slots=True)
class Frame:
    """One decoded frame; only the first has a ``hello``."""

    epoch: int
    sequence: int
    records: list[Record] = field(default_factory=list)
    hello: Hello | None = None
    kv: list[KvSection] = field(default_factory=list)
    load: LoadReport | None = None
    figures: Figures | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """One attempt: ``token_ids`` ends with the ``generated_before`` tokens of earlier attempts.

    If several sequences continue, ``token_ids`` is the prompt alone, and ``outputs`` has the tokens of each so
    far, or ``None`` if it has ended.
    """

    request_id: str
    attempt: int
    token_ids: list[int]
    params: SamplingParams
    namespace: CacheNamespace = field(default_factory=CacheNamespace)
    priority: int = 0
    generated_before: int = 0
    outputs: tuple[tuple[int, ...] | None, ...] = ()
    age_s: float = 0.0  # since the client's request arrived; keeps its place in the queue
    client: str = ""  # who gets a fair share of the engine
    sender: str = ""  # whose budget its structured output uses
    proof_tokens: int = 0  # of a request that may kill the engine, those that clear it


def pack_records(
    epoch: int, sequence: int, records: Iterable[Record], sections: Sequence[Section] = ()
) -> bytes:
    """One frame of records and sections; an empty frame is a sign of life."""
    parts = [b""]
    count = 0
    for record in records:
        count += 1
        message = record.message.encode("utf-8", "replace")[:MAX_MESSAGE_BYTES] if record.message else b""
        tokens = record.token_ids
        flags = int(record.final)
        if record.logprobs is not None:
            flags |= _HAS_LOGPROBS
        if record.prompt_logprobs is not None:
            flags |= _HAS_PROMPT_LOGPROBS
        if record.stats is not None:
            flags |= _HAS_STATS
        parts.append(
            _RECORD.pack(
                record.attempt,
                record.sequence,
                record.index,
                record.cached_tokens,
                len(tokens),
                _END_CODES[record.end],
                flags,
                len(message),
            )
        )
        parts.append(struct.pack(f"<{len(tokens)}I", *tokens))
        if message:
            parts.append(message)
        if flags > _FINAL:
            parts += [
                pack_logprobs(each) for each in (record.logprobs, record.prompt_logprobs) if each is not None
            ]
            if record.stats is not None:
                parts.append(_pack_stats(record.stats))
    parts += map(pack_section, sections)
    parts[0] = _HEADER.pack(VERSION, FrameKind.RECORDS, epoch, sequence, count, len(sections))
    return b"".join(parts)


def pack_hello(epoch: int, sequence: int, hello: Hello) -> bytes:
    """The first frame of a channel."""
    body = json.dumps(dataclasses.asdict(hello)).encode()
    return _HEADER.pack(VERSION, FrameKind.HELLO, epoch, sequence, len(body), 0) + body


def unpack_frame(data: bytes) -> Frame:
    """Decode one frame.

    Raises:
        WireError: another version, or a truncated or over-long frame.
    """
    try:
        if data:
            check_version(data[0])
        _, kind, epoch, sequence, count, sections = _HEADER.unpack_from(data)
        if kind == FrameKind.HELLO:
            end = _HEADER.size + count
            frame = Frame(epoch, sequence, hello=_unpack_hello(data[_HEADER.size : end]))
        else:
            records, end = _unpack_records(data, _HEADER.size, count)
            frame = Frame(epoch, sequence, records)
        for _ in range(sections):
            section, end = unpack_section(data, end)
            if isinstance(section, LoadReport):
                frame.load = section
            elif isinstance(section, Figures):
                frame.figures = section
            else:
                frame.kv.append(section)
    except (struct.error, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise WireError(f"unreadable frame of {len(data)} bytes: {error}") from error
    if end != len(data):
        raise WireError(f"frame of {len(data)} bytes has {len(data) - end} bytes too many")
    return frame


def _unpack_hello(data: bytes) -> Hello:
    body = json.loads(data)
    keys = None if body["keys"] is None else KeyScheme(**body["keys"])
    limits, model = ModelLimits(**body["limits"]), ModelIdentity(**body["model"])
    build, resumed = Build(**body["build"]), tuple(map(operator.index, body["resumed"]))
    address = None if body["address"] is None else Address(**body["address"])
    return Hello(limits, keys, body["window"], tuple(body["probe"]), model, build, resumed, address)


def _unpack_records(data: bytes, offset: int, count: int) -> tuple[list[Record], int]:
    records = []
    for _ in range(count):
        attempt, sequence, index, cached, num_tokens, code, flags, length = _RECORD.unpack_from(data, offset)
        offset += _RECORD.size
        tokens = list(struct.unpack_from(f"<{num_tokens}I", data, offset))
        offset += 4 * num_tokens
        if offset + length > len(data):
            raise ValueError("a message runs past the end")
        message = data[offset : offset + length].decode("utf-8", "replace") if length else ""
        offset += length
        end = _END_REASONS[code]
        record = Record(attempt, index, tokens, cached, end, message, sequence, bool(flags & _FINAL))
        if flags > _FINAL:
            if flags & _HAS_LOGPROBS:
                record.logprobs, offset = unpack_logprobs(data, offset)
            if flags & _HAS_PROMPT_LOGPROBS:
                of_prompt, offset = unpack_logprobs(data, offset)
                record.prompt_logprobs = tuple(of_prompt)
            if flags & _HAS_STATS:
                record.stats, offset = _unpack_stats(data, offset)
        records.append(record)
    return records, offset


def _pack_stats(stats: RequestStats) -> bytes:
    queue_s, prefill_s = (math.nan if each is None else each for each in (stats.queue_s, stats.prefill_s))
    return _STATS.pack(queue_s, prefill_s, stats.preemptions, stats.generated)


def _unpack_stats(data: bytes, offset: int) -> tuple[RequestStats, int]:
    *seconds, preemptions, generated = _STATS.unpack_from(data, offset)
    queue_s, prefill_s = (each if math.isfinite(each) else None for each in seconds)
    return RequestStats(queue_s, prefill_s, preemptions, generated), offset + _STATS.size


def pack_submission(submission: Submission) -> bytes:
    """Encode one attempt; about 4 bytes a token."""
    # Not asdict of them all, which copies lists entry by entry; what is not sent has its default.
    params: dict[str, Any] = {
        name: value for name, default in _PARAMS if (value := getattr(submission.params, name)) != default
    }
    if submission.params.structured_output is not None:
        params["structured_output"] = dataclasses.asdict(submission.params.structured_output)
    head = json.dumps(
        {
            "request_id": submission.request_id,
            "attempt": submission.attempt,
            "params": params,
            "namespace": dataclasses.asdict(submission.namespace),
            "outputs": [None if output is None else len(output) for output in submission.outputs],
            "priority": submission.priority,
            "generated_before": submission.generated_before,
            "age_s": submission.age_s,
            "client": submission.client,
            "sender": submission.sender,
            "proof_tokens": submission.proof_tokens,
        }
    ).encode()
    tokens = [*submission.token_ids, *itertools.chain.from_iterable(filter(None, submission.outputs))]
    header = _SUBMISSION.pack(VERSION, len(head), len(submission.token_ids))
    return header + head + struct.pack(f"<{len(tokens)}I", *tokens)


def unpack_submission(data: bytes) -> Submission:
    """Decode one attempt.

    Raises:
        WireError: another version, or an unreadable message.
        InvalidRequestError: sampling parameters out of range.
    """
    try:
        if data:
            check_version(data[0])
        _, length, num_tokens = _SUBMISSION.unpack_from(data)
        offset = _SUBMISSION.size + length
        head = json.loads(data[_SUBMISSION.size : offset])
        tokens = list(struct.unpack_from(f"<{num_tokens}I", data, offset))
        outputs, end = _unpack_outputs(head["outputs"], data, offset + 4 * num_tokens)
        params = head["params"]
        if "structured_output" in params:
            params["structured_output"] = StructuredOutput(**params["structured_output"])
        submission = Submission(
            request_id=head["request_id"],
            attempt=operator.index(head["attempt"]),
            token_ids=tokens,
            params=SamplingParams(**params),
            namespace=CacheNamespace(**head["namespace"]),
            priority=operator.index(head["priority"]),
            generated_before=operator.index(head["generated_before"]),
            outputs=outputs,
            age_s=float(head["age_s"]),
            client=_text(head["client"]),
            sender=_text(head["sender"]),
            proof_tokens=operator.index(head["proof_tokens"]),
        )
    except InvalidRequestError:
        raise
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"unreadable submission of {len(data)} bytes: {error}") from error
    if end != len(data):
        raise WireError(f"submission of {len(data)} bytes has {len(data) - end} bytes too many")
    return submission


def _unpack_outputs(
    lengths: list[int | None], data: bytes, offset: int
) -> tuple[tuple[tuple[int, ...] | None, ...], int]:
    outputs: list[tuple[int, ...] | None] = []
    for length in lengths:
        outputs.append(None if length is None else struct.unpack_from(f"<{length}I", data, offset))
        offset += 4 * (length or 0)
    return tuple(outputs), offset


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def check_version(version: int) -> None:
    """Refuse messages of another version.

    Raises:
        WireError: it is one.
    """
    if version != VERSION:
        raise WireError(
            f"message of wire version {version}, but this process uses {VERSION}; run one release everywhere"
        )
