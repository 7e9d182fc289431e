"""One trace for each request, from its arrival to its last token, whichever replicas it ran on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest
from engine_client_setting import until
from ingress_support import ingress_for, only_model
from kv_loopback import SCHEME
from loopback import STATS, LoopbackHandle, stepping
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app import config
from app.api.caller import Caller
from app.api.request_record import RequestRecord
from app.api.request_trace import RequestTracer
from app.api.routes import make_api
from app.channel.engine_channel import EngineChannel
from app.channel.wire import Record, unpack_frame
from app.fleet.engine_client import EngineClient
from app.fleet.generation import GenerateRequest
from app.ingress import IngressReplica
from app.logs import FIELDS
from app.option_groups import IngressOptions
from app.routing.cost import TERMS
from engine.errors import InvalidRequestError, QuireError

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True}

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .*__del__.* was never awaited")


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, one_tokenizer: None) -> None:
    monkeypatch.setattr("app.ingress_model.tokenizer_digest", lambda _: "tokenizer")
    # The replicas and their channels are on the test's loop.
    monkeypatch.setattr(
        "app.ingress_model.EngineClient", lambda *a, channel_thread, **options: EngineClient(*a, **options)
    )


class Traced:
    """An ingress over two replicas, all of whose traces are kept."""

    def __init__(self, ingress: IngressReplica, handle: LoopbackHandle) -> None:
        self.ingress, self.handle = ingress, handle
        self.exporter = InMemorySpanExporter()
        self.service = only_model(ingress).service
        self.tracer = self.service.tracer = RequestTracer(self.exporter, 1.0)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(make_api(lambda: ingress.server)), base_url="http://ingress"
        )

    def spans(self) -> dict[str, list[ReadableSpan]]:
        """By name, in the order of their starts."""
        self.tracer.close()
        found: dict[str, list[ReadableSpan]] = {}
        for span in sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0):
            found.setdefault(span.name, []).append(span)
        return found


def traced(test: Callable[[Traced], Awaitable[None]]) -> None:
    async def run() -> None:
        handle = LoopbackHandle(2)
        ingress = ingress_for(config.load({"instance": "test"}, {}), handle)
        try:
            await ingress.reconfigure({})
            await asyncio.wait_for(until(lambda: len(handle.fleet.ledger.routable()) == 2), 60)
            await asyncio.wait_for(test(Traced(ingress, handle)), 60)
        finally:
            await ingress.__del__()

    asyncio.run(run())


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [getattr(record, FIELDS) for record in caplog.records if record.message == "request ended"]


def seconds(span: ReadableSpan) -> float:
    return ((span.end_time or 0) - (span.start_time or 0)) / 1e9


def test_one_trace_joins_ingress_router_and_engine(caplog: pytest.LogCaptureFixture) -> None:
    async def test(here: Traced) -> None:
        async with stepping(here.handle):
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "r-1"}
            answer = await here.http.post("/v1/completions", json={**BODY, "max_tokens": 9}, headers=headers)
        assert answer.status_code == 200
        spans = here.spans()
        assert sorted(spans) == ["attempt", "completions", "decode", "prefill", "queue", "routing"]
        parts = [span for (span,) in spans.values()]
        assert {format(part.context.trace_id, "032x") for part in parts} == {TRACE}
        (root,), (attempt,) = spans["completions"], spans["attempt"]
        assert format(root.parent.span_id, "016x") == PARENT
        assert attempt.parent.span_id == root.context.span_id
        inner = [spans[name][0] for name in ("routing", "queue", "prefill", "decode")]
        assert {part.parent.span_id for part in inner} == {attempt.context.span_id}
        # What the engine said, to the nanosecond's rounding.
        queue, prefill = spans["queue"][0], spans["prefill"][0]
        assert (seconds(queue), seconds(prefill)) == pytest.approx((STATS.queue_s, STATS.prefill_s), abs=1e-6)
        assert queue.start_time == attempt.start_time  # the request's arrival
        assert queue.end_time == pytest.approx(prefill.start_time, abs=1000)
        (replica,) = [name for name, each in here.handle.replicas.items() if each.engine.submitted]
        assert attempt.attributes["quire.replica"] == replica
        assert spans["routing"][0].attributes["quire.reason"] == "balance"
        assert spans["decode"][0].attributes["quire.preemptions"] == 1
        # The line says the same, and so do the metrics.
        (line,) = lines(caplog)
        assert line["trace_id"] == TRACE
        said = {name: value for name, value in line.items() if name != "trace_id"}
        assert said == {
            name.removeprefix("quire."): value
            for name, value in root.attributes.items()
            if name.startswith("quire.")
        }
        assert (line["replica"], line["queue_ms"], line["prefill_ms"]) == (replica, 250.0, 500.0)
        assert (line["moves"], line["retries"], line["preemptions"], line["status"]) == (0, 0, 1, 200)
        assert 1000 * seconds(root) == pytest.approx(line["total_ms"], abs=0.06)
        figures = here.service.figures
        assert figures.whole.totals.sum == pytest.approx(seconds(root), abs=1e-6)
        assert 1000 * figures.first_token.totals.sum == pytest.approx(line["first_token_ms"], abs=0.06)
        assert figures.output_tokens.totals.sum == root.attributes["gen_ai.usage.output_tokens"] == 9
        assert root.attributes["gen_ai.request.model"] == "smollm2-135m-instruct"
        # The live page, too.
        (life,) = (await here.http.get("/dashboard/requests/cmpl-r-1")).json()["requests"]
        assert (life["state"], life["outcome"], life["trace_id"]) == ("ended", "ok", TRACE)
        assert (life["prompt_tokens"], life["output_tokens"]) == (3, 9)
        assert life["total_s"] == pytest.approx(seconds(root), abs=1e-3)
        (one,) = life["attempts"]
        assert (one["replica"], one["reason"], one["preemptions"]) == (replica, "balance", 1)
        assert one["first_step_s"] - one["queued_s"] == pytest.approx(STATS.queue_s, abs=2e-4)
        assert one["prefilled_s"] - one["first_step_s"] == pytest.approx(STATS.prefill_s, abs=2e-4)
        chosen, second = one["compared"]
        assert (chosen["replica"], {chosen["replica"], second["replica"]}) == (replica, {*here.handle.replicas})
        assert tuple(chosen["terms"]) == TERMS
        assert sum(chosen["terms"].values()) > 0

    with caplog.at_level(logging.INFO, logger="app.api.request_record"):
        traced(test)


@pytest.mark.parametrize("planned", [False, True])
def test_a_move_is_in_the_trace(caplog: pytest.LogCaptureFixture, planned: bool) -> None:
    """Whether the replica died, or was about to stop."""

    async def test(here: Traced) -> None:
        asking = asyncio.create_task(
            here.http.post(
                "/v1/completions", json={**BODY, "max_tokens": 12}, headers={"x-request-id": "moves"}
            )
        )
        replicas = here.handle.replicas.values()
        await until(lambda: any(replica.engine.live for replica in replicas))
        first, other = sorted(replicas, key=lambda replica: not replica.engine.live)
        for _ in range(3):
            here.handle.step()
        await until(lambda: here.service.figures.first_token.totals.sum > 0)
        (live,) = (await here.http.get("/dashboard/requests/moves")).json()["requests"]
        assert (live["state"], live["outcome"], len(live["attempts"])) == ("decode", None, 1)
        if planned:
            await here.ingress.cordon([first.name], 60.0, 0.0)
        else:
            first.kill()
        async with stepping(here.handle):
            answer = await asking
        assert answer.json()["usage"]["completion_tokens"] == 12
        spans = here.spans()
        assert [span.attributes["quire.replica"] for span in spans["attempt"]] == [first.name, other.name]
        (root,), (move,) = spans["completions"], spans["move"]
        assert move.parent.span_id == root.context.span_id
        assert (move.attributes["quire.from"], move.attributes["quire.to"]) == (first.name, other.name)
        assert move.attributes["quire.tokens_before"] > 0
        assert (move.attributes["quire.reason"] == "moved") is planned
        assert move.end_time == spans["decode"][1].start_time  # the client's next token
        assert [len(spans[name]) for name in ("routing", "queue", "prefill", "decode")] == [2, 2, 2, 2]
        (line,) = lines(caplog)
        assert line["replica"] == f"{first.name},{other.name}"
        assert (line["moves"], line["retries"]) == ((1, 0) if planned else (0, 1))
        (life,) = (await here.http.get("/dashboard/requests/moves")).json()["requests"]
        assert (life["moves"], life["retries"]) == (line["moves"], line["retries"])
        assert [one["replica"] for one in life["attempts"]] == [first.name, other.name]
        assert [bool(one["ended_early"]) for one in life["attempts"]] == [True, False]
        assert life["attempts"][1]["tokens_before"] == move.attributes["quire.tokens_before"]

    with caplog.at_level(logging.INFO, logger="app.api.request_record"):
        traced(test)


def test_the_page_tells_where_prompts_that_begin_alike_went() -> None:
    async def keys_of(request: GenerateRequest) -> list[int]:
        return SCHEME.keys(request.token_ids, request.namespace)

    async def test(here: Traced) -> None:
        # These replicas say nothing of their blocks.
        only_model(here.ingress).client._parts.attempts._block_keys = keys_of
        async with stepping(here.handle):
            for end in range(4):
                body = {**BODY, "prompt": [500] * 64 + [end] * 16, "max_tokens": 1}
                (await here.http.post("/v1/completions", json=body)).raise_for_status()
        one, rest = (await here.http.get("/dashboard/prefixes")).json()["prefixes"]
        assert (one["requests"], rest["requests"]) == (4, 0)
        assert one["words"] is None
        assert {to["replica"] for to in one["to"]} <= {*here.handle.replicas}
        assert sum(sum(to["reasons"].values()) for to in one["to"]) == 4
        options = here.ingress.server.options
        here.ingress.server.options = options.model_copy(update={"prefix_words": True})
        one, _ = (await here.http.get("/dashboard/prefixes")).json()["prefixes"]
        assert one["words"]

    traced(test)


def ended(
    sample: float, headers: tuple[str, str] = ("", ""), error: Exception | None = None
) -> list[ReadableSpan]:
    """The spans of a request that has run on no replica."""
    exporter = InMemorySpanExporter()
    tracer = RequestTracer(exporter, sample)
    record = RequestRecord(Caller("", "r", trace=headers), "chat", False, tracer=tracer)
    with contextlib.suppress(QuireError), record.running():
        if error is not None:
            raise error
    record.end()
    tracer.close()
    return list(exporter.get_finished_spans())


def test_a_request_that_fails_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="app.api.request_record"):
        (root,) = ended(1.0, error=InvalidRequestError("wrong", "prompt", "context_length_exceeded"))
    assert root.status.description == "context_length_exceeded"
    (line,) = lines(caplog)
    assert (line["outcome"], line["status"]) == ("context_length_exceeded", 400)
    assert "replica" not in line


@pytest.mark.parametrize(
    ("sample", "flags", "kept"), [(0.0, "", 0), (1.0, "00", 0), (0.0, "01", 1), (1.0, "", 1)]
)
def test_a_share_is_traced_unless_the_client_decides(sample: float, flags: str, kept: int) -> None:
    header = f"00-{TRACE}-{PARENT}-{flags}" if flags else ""
    assert len(ended(sample, (header, ""))) == kept


def test_a_forged_header_starts_a_trace_of_its_own() -> None:
    (root,) = ended(1.0, (f"00-{TRACE}-{'0' * 16}-01", "a" * 5000))
    assert root.parent is None


def test_stats_of_tokens_that_wait_together_are_the_last_ones() -> None:
    channel = EngineChannel("ingress", 1)
    channel.add(Record(1, 0, [5], stats=STATS))
    channel.add(Record(1, 1, [6]))
    (begun,) = unpack_frame(channel.take_frame(0)).records
    assert begun.stats == STATS
    channel.add(Record(1, 2, [7]))
    channel.add(Record(1, 3, [8], final=True, stats=STATS._replace(preemptions=2)))
    (ended,) = unpack_frame(channel.take_frame(1)).records
    assert ended.stats == STATS._replace(preemptions=2)


def test_without_a_collector_there_is_no_tracer() -> None:
    assert RequestTracer.configured(IngressOptions(), "ingress") is None


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("https://collector/", "https://collector/v1/traces"),
        ("http://collector:4318/otlp/traces", "http://collector:4318/otlp/traces"),
    ],
)
def test_the_collector_is_asked_at_its_usual_path(
    monkeypatch: pytest.MonkeyPatch, given: str, used: str
) -> None:
    asked: list[str] = []

    def exporter(endpoint: str) -> InMemorySpanExporter:
        asked.append(endpoint)
        return InMemorySpanExporter()

    monkeypatch.setattr("opentelemetry.exporter.otlp.proto.http.trace_exporter.OTLPSpanExporter", exporter)
    tracer = RequestTracer.configured(IngressOptions(tracing_endpoint=given), "ingress")
    assert tracer is not None
    tracer.close()
    assert asked == [used]


class SilentCollector(SpanExporter):
    """Takes no span until it is shut down."""

    def __init__(self) -> None:
        self.was_shut_down, self.ended = threading.Event(), threading.Event()
        self.given_up = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.given_up = self.was_shut_down.wait(60.0)
        self.ended.set()
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.was_shut_down.set()


def test_an_ingress_that_stops_does_not_wait_for_a_silent_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.api.request_trace.CLOSE_S", 0.0)
    collector = SilentCollector()
    tracer = RequestTracer(collector, 1.0)
    tracer._tracer.start_span("request").end()
    tracer.close()
    assert collector.was_shut_down.is_set()
    assert collector.ended.wait(60.0) is True
    assert collector.given_up
