"""Traces of requests in OpenTelemetry's format, made from what the ingress knows when a request ends.

The engines' times come with the tokens, so one process exports a whole trace::

    completions           SERVER; child of the client's span, if its traceparent names one
      attempt             one for each replica that it ran on
        routing           until the router had booked a replica
        queue             from the request's arrival to its first step, as ``quire_queue_seconds``
        prefill           from there to the first token, as ``quire_prefill_seconds``
        decode            from the first token's arrival here to the attempt's end
      move                from the end of an attempt to the next token, as the client sees it
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from app.api.caller import Caller
from app.fleet.journal import AttemptNotes, Journal
from app.option_groups import IngressOptions

if TYPE_CHECKING:  # loaded only where there are traces
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

TRACES_PATH = "/v1/traces"
"""Of a collector, where its address names no other."""

_OPERATIONS = {"completions": "text_completion", "chat": "chat", "responses": "chat", "messages": "chat"}

logger = logging.getLogger(__name__)


CLOSE_S = 2.0
"""How long a stopping ingress waits for the collector."""


class RequestTracer:
    """Belongs to one ingress. Spans wait in a bounded queue; a thread sends them, and drops what is too much.

    ``sample`` is the share of requests that are traced, where the client's traceparent does not say.
    """

    def __init__(self, exporter: SpanExporter, sample: float, process: str = "") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        version = metadata.version("quire")
        named = {"service.name": "quire", "service.version": version, "service.instance.id": process}
        self._exporter = exporter
        # Not the global provider: that is Ray's.
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample)),
            resource=Resource.create(named),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire", version)
        self._context_of = TraceContextTextMapPropagator().extract

    @classmethod
    def configured(cls, options: IngressOptions, process: str) -> RequestTracer | None:
        """The tracer that the options ask for; ``None`` without a collector, and then nothing is loaded."""
        if options.tracing_endpoint is None:
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        endpoint = options.tracing_endpoint
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + TRACES_PATH
        return cls(OTLPSpanExporter(endpoint=endpoint), options.trace_sample, process)

    def export(
        self,
        fields: Mapping[str, Any],
        caller: Caller,
        journals: Sequence[Journal],
        started: float,
        ended: float,
    ) -> dict[str, str]:
        """Queue the spans of a request that has ended, if it is sampled; returns what to add to its line.

        ``fields`` are those of the line; ``started`` and ``ended`` are monotonic seconds.
        """
        from opentelemetry.trace import SpanKind, Status, StatusCode

        carrier = {
            name: value
            for name, value in zip(("traceparent", "tracestate"), caller.trace, strict=True)
            if value
        }
        epoch = time.time_ns() - time.monotonic_ns()
        attributes = {f"quire.{name}": value for name, value in fields.items()}
        route = str(fields["route"])
        if route in _OPERATIONS:
            attributes["gen_ai.operation.name"] = _OPERATIONS[route]
            attributes["gen_ai.request.model"] = fields["model"]
            attributes["gen_ai.usage.input_tokens"] = fields["prompt_tokens"]
            attributes["gen_ai.usage.output_tokens"] = fields["output_tokens"]
        root = self._tracer.start_span(
            route,
            self._context_of(carrier),
            SpanKind.SERVER,
            attributes,
            start_time=_ns(started, epoch),
        )
        if not root.is_recording():
            return {}
        if fields["outcome"] not in ("ok", "disconnected"):
            root.set_status(Status(StatusCode.ERROR, str(fields["outcome"])))
        for prompt, journal in enumerate(journals):
            self._of_prompt(journal, prompt, root, epoch, ended)
        root.end(_ns(ended, epoch))
        return {"trace_id": f"{root.get_span_context().trace_id:032x}"}

    def close(self) -> None:
        """Send what waits, and give up after ``CLOSE_S``; blocks."""
        # The provider alone would wait half a minute for a collector that does not answer.
        sender = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sender.start()
        sender.join(CLOSE_S)
        if sender.is_alive():
            self._exporter.shutdown()  # ends its retries

    def _of_prompt(self, journal: Journal, prompt: int, root: Span, epoch: int, ended: float) -> None:
        for number, attempt in enumerate(journal.attempts, 1):
            end = ended if attempt.ended is None else min(attempt.ended, ended)
            about = {"quire.prompt": prompt, "quire.attempt": number, "quire.replica": attempt.replica}
            if attempt.failure or attempt.planned:
                about["quire.ended_early"] = attempt.failure or "moved"
            began = journal.arrived if number == 1 else attempt.began
            span = self._span("attempt", root, began, end, epoch, about)
            if attempt.placed is not None:
                why = {"quire.reason": attempt.reason, "quire.predicted_tokens": attempt.predicted_tokens}
                self._span("routing", span, attempt.began, attempt.placed, epoch, why)
            self._of_engine(attempt, journal.arrived, span, end, epoch)
        for before, after in pairwise(journal.attempts):
            if before.ended is None:
                continue
            until = after.first_token or after.ended or ended
            about = {
                "quire.from": before.replica,
                "quire.to": after.replica,
                "quire.reason": before.failure or "moved",
                "quire.tokens_before": after.tokens_before,
            }
            self._span("move", root, before.ended, min(until, ended), epoch, about)

    def _of_engine(self, attempt: AttemptNotes, arrived: float, span: Span, end: float, epoch: int) -> None:
        # A request that has tokens waits from its arrival at this replica, as the engine counts it.
        first_step = attempt.began if attempt.tokens_before else arrived
        if attempt.queue_s is not None:
            queued, first_step = first_step, first_step + attempt.queue_s
            self._span("queue", span, queued, first_step, epoch)
        if attempt.prefill_s is not None:
            self._span("prefill", span, first_step, first_step + attempt.prefill_s, epoch)
        if attempt.first_token is not None:
            about = {"quire.preemptions": attempt.preemptions}
            self._span("decode", span, attempt.first_token, end, epoch, about)

    def _span(
        self,
        name: str,
        parent: Span,
        began: float,
        ended: float,
        epoch: int,
        attributes: Mapping[str, Any] | None = None,
    ) -> Span:
        from opentelemetry.trace import set_span_in_context

        span = self._tracer.start_span(
            name, set_span_in_context(parent), attributes=attributes, start_time=_ns(began, epoch)
        )
        span.end(_ns(max(ended, began), epoch))
        return span


def _ns(monotonic_s: float, epoch: int) -> int:
    """Nanoseconds since 1970."""
    return int(monotonic_s * 1e9) + epoch
