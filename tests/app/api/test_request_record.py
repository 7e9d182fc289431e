"""One line in the log for each request, with its end and its cost; its key is charged, however it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from local_server import COUNT, MODEL, LocalServer

from app.api import request_record, sse
from app.api.authentication import Gate
from app.api.caller import Caller
from app.api.choices import GenerationJob
from app.api.errors import ApiError
from app.api.generated_response import ResponseMaker
from app.api.key_limits import KeyLimits
from app.api.keys import ENVIRONMENT, ApiKey, KeyFile, digest_of
from app.api.openai_responses import Envelope, OpenAIReply
from app.api.openai_types import parse_completion
from app.api.request_record import RequestRecord
from app.fleet.generation import Delta, EngineDeathsError, GenerateRequest, GenerationError, UnavailableError
from app.fleet.journal import AttemptNotes
from app.logs import FIELDS
from app.metrics.samples import METRICS
from engine.errors import ClientLimitError, InvalidRequestError
from engine.histogram import Histogram
from engine.token_logprobs import TokenLogprobs


def ended(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines so far; not of the audit log, which another test may have begun."""
    lines = [record for record in caplog.records if record.name == "app.api.request_record"]
    return [getattr(record, FIELDS) for record in lines if record.message == "request ended"]


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="app.api.request_record"):
        yield caplog


@pytest.mark.parametrize("stream", [False, True])
def test_a_complete_request_is_logged_with_its_usage(
    http: httpx.Client, records: pytest.LogCaptureFixture, stream: bool
) -> None:
    http.post("/v1/completions", json={**COUNT, "stream": stream}, headers={"x-request-id": "trace-7"}).read()
    (fields,) = wait_for(records, 1)
    assert (fields["request_id"], fields["model"]) == ("trace-7", MODEL)
    assert (fields["route"], fields["stream"], fields["outcome"]) == ("completions", stream, "ok")
    assert (fields["output_tokens"], fields["finish"]) == (8, "length")
    assert 0 < fields["first_token_ms"] <= fields["total_ms"]
    assert "key" not in fields


def test_a_refused_request_and_one_whose_client_left_are_logged(
    server: LocalServer, http: httpx.Client, records: pytest.LogCaptureFixture
) -> None:
    assert http.post("/v1/completions", json={"prompt": [1] * 600}).status_code == 400
    (refused,) = wait_for(records, 1)
    assert (refused["outcome"], refused["output_tokens"]) == ("context_length_exceeded", 0)
    host, port = server.url.removeprefix("http://").split(":")
    with server.slow_steps(), socket.create_connection((host, int(port))) as connection:
        body = b'{"prompt": "one, two,", "max_tokens": 300, "ignore_eos": true, "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        connection.sendall(head + body)
        connection.recv(1000)
    left = wait_for(records, 2)[1]
    assert left["outcome"] == "disconnected"
    assert left["output_tokens"] < 300


def wait_for(records: pytest.LogCaptureFixture, count: int) -> list[dict[str, Any]]:
    """The lines, once there are ``count``; a line follows the end of the response."""
    deadline = time.monotonic() + 60
    while len(ended(records)) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return ended(records)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (asyncio.CancelledError(), "disconnected"),
        (GeneratorExit(), "disconnected"),
        (UnavailableError("none"), "unavailable"),
        (GenerationError("failed"), "generation_failed"),
        (EngineDeathsError("failed"), "engine_died"),
        (ClientLimitError("too long", 2), "client_limit_exceeded"),
        (ApiError(405, "no"), "405"),
        (InvalidRequestError("wrong", "prompt", "kv_pool_exceeded"), "kv_pool_exceeded"),
        (ApiError(429, "wait", code="overloaded"), "overloaded"),
        (ZeroDivisionError(), "internal"),
    ],
)
def test_the_outcome_tells_how_the_work_ended(error: BaseException | None, outcome: str) -> None:
    record = RequestRecord(Caller("", "r"), "chat", False)
    assert record.outcome == "disconnected"  # if nothing else comes of it
    expected = nullcontext() if error is None else pytest.raises(type(error))
    with expected, record.running():
        if error is not None:
            raise error
    assert record.outcome == outcome


def test_the_status_of_a_stream_that_fails_is_the_one_that_was_sent(
    server: LocalServer,
    http: httpx.Client,
    records: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The headers go out after a second without a token, too."""
    answered = threading.Event()

    async def fails(request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        await asyncio.to_thread(answered.wait, 60)
        raise UnavailableError("none")
        yield  # makes it a generator

    monkeypatch.setattr(server.client, "generate", fails)
    body = {**COUNT, "stream": True}
    monkeypatch.setattr(sse, "HEADERS_WITHIN_S", 0.01)
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        answered.set()
        assert b'"code": "unavailable"' in answer.read()
    monkeypatch.setattr(sse, "HEADERS_WITHIN_S", 60.0)
    assert http.post("/v1/completions", json=body).status_code == 503
    ends = [(fields["outcome"], fields["status"]) for fields in wait_for(records, 2)]
    assert ends == [("unavailable", 200), ("unavailable", 503)]


def test_an_error_between_the_first_token_and_the_headers_has_its_own_status() -> None:
    record = RequestRecord(Caller("", "r"), "chat", True)
    record.token(0, 1, None)
    with pytest.raises(ZeroDivisionError), record.running():
        raise ZeroDivisionError
    assert (record.outcome, record.status) == ("internal", 500)


def test_tokens_that_arrive_together_share_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(request_record, "time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    record = RequestRecord(Caller("", "r"), "chat", True, started=0.0)
    for now, choice, tokens in (  # noqa: B007 - the clock reads it
        (2.0, 0, 1),
        (3.0, 1, 1),
        (2.5, 0, 5),  # four in 0.5 s
        (2.75, 0, 6),
        (4.0, 1, 3),  # two in 1 s
    ):
        record.token(choice, tokens, None)
    expected = Histogram(METRICS["inter_token_seconds"].bounds)
    expected.add(0.125, 4)
    expected.add(0.25)
    expected.add(0.5, 2)
    assert record.figures.inter_token.totals == expected.totals
    assert record.figures.first_token.totals.sum == 2.0


def test_the_key_is_charged_for_prompt_and_output() -> None:
    limits = KeyLimits(ApiKey(id="a", sha256="0" * 64, tokens_per_minute=100))
    record = RequestRecord(Caller("", "r", limits), "chat", False)
    limits.admit()
    record.usage.prompt_tokens, record.usage.completion_tokens = 30, 12
    record.end()
    assert limits.live == 0
    assert dict(limits.headers())[b"x-ratelimit-remaining-tokens"] == b"58"


def test_keys_guard_the_service_and_divide_its_cache(
    server: LocalServer, http: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two keys with the same prompt share nothing; limits hold; /health tells strangers little."""
    path = tmp_path / "keys.yaml"
    path.write_text(
        f"keys:\n  - {{id: a, sha256: {digest_of('key-a')}, requests_per_minute: 2}}\n"
        f"  - {{id: b, sha256: {digest_of('key-b')}}}\n"
    )
    monkeypatch.setattr(server.api, "gate", Gate(KeyFile(str(path), {ENVIRONMENT: ""})))
    body = {"model": MODEL, "prompt": list(range(1000, 1100)), "max_tokens": 1}

    def ask(key: str) -> httpx.Response:
        return http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    assert http.post("/v1/completions", json=body).status_code == 401
    usages = [ask(key).json()["usage"] for key in ("key-a", "key-a", "key-b")]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert (cached[0], cached[2]) == (0, 0)
    assert cached[1] > 0
    limited = ask("key-a")
    assert limited.status_code == 429
    assert limited.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(limited.headers["retry-after"]) >= 1
    assert limited.headers["x-ratelimit-limit-requests"] == "2"
    assert ask("key-b").status_code == 200
    assert set(http.get("/health").json()) <= {"status", "instance", "routable", "asleep"}
    assert "live_requests" in http.get("/health", headers={"x-api-key": "key-b"}).json()


@pytest.mark.parametrize("stop", ["zzzz", None])
def test_the_time_between_tokens_that_come_at_the_end_is_unknown(stop: str | None) -> None:
    """Of results that are the best of more, whoever ranks them; all that has been drawn is paid for."""
    body = {"prompt": [1], "best_of": 2, "max_tokens": 4, **({} if stop is None else {"stop": stop})}
    job = GenerationJob(parse_completion(body).options, [[1]], False, Caller("", "r"))

    class Engines:
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
            if stop is None:
                request.journal.attempts.append(AttemptNotes(generated=7))  # the engines report it
                yield Delta((5,) * 4, "length", 0, 0, 0, final=True)
                return
            for i in range(4):
                for sequence in (0, 1):
                    reason = "length" if i == 3 else None
                    scores = (TokenLogprobs(-1.0, 1),)
                    yield Delta((5,), reason, 0, i, sequence, reason is not None and sequence == 1, "", scores)

    class Decoder:
        special_names = ()

        def detokenizer(self, **_: Any) -> Any:
            return SimpleNamespace(push=lambda tokens: "x", flush=lambda: "")

    record = RequestRecord(Caller("", "r"), "completions", False)

    async def answer() -> None:
        decoder: Any = Decoder()
        maker = ResponseMaker(Engines(), decoder, asyncio.to_thread)
        reply = OpenAIReply(job, Envelope("i", 0, "m"), decoder)
        receive, send = asyncio.Event().wait, AsyncMock()
        await maker.response(job, reply, record)({"type": "http", "path": ""}, receive, send)  # type: ignore[arg-type]

    asyncio.run(answer())
    record.end()
    figures = record.figures
    assert (record.outcome, record.usage.completion_tokens, record.generated_tokens) == (
        "ok",
        4,
        7 if stop is None else 8,
    )
    assert [sum(each.totals.counts) for each in (figures.inter_token, figures.per_output_token)] == [0, 0]
    assert [sum(each.totals.counts) for each in (figures.first_token, figures.whole)] == [1, 1]
