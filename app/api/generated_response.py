"""Generated responses: the engines' tokens become text in the format of a reply."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from starlette.responses import Response
from starlette.types import ASGIApp

from app.api.answers import Answer
from app.api.choices import GenerationJob, TextDelta, TokenGenerator, stream_choices
from app.api.fair_threads import InThread
from app.api.prompt_limits import check_prompts, within_context, within_logprobs
from app.api.reply import Reply
from app.api.request_record import RequestRecord
from app.api.sse import EventStream, WholeResponse
from app.fleet.fleet_limits import FleetLimits
from engine.text import TextDecoder

INLINE_TOKENS = 20_000
"""Prompts of up to this many tokens together are checked on the event loop, in about a millisecond."""

INLINE_DETAILS = 200
"""Tokens of a response that are described on the event loop: each takes 0.1 ms with 20 others beside it."""

IDS_AS_ONE = 10
"""Ids of a prompt that count as one described token: each takes 0.1 us, in the first chunk of each choice."""


class ResponseMaker:
    """Makes the responses of one model at one ingress replica."""

    def __init__(self, engines: TokenGenerator, decoder: TextDecoder, in_thread: InThread) -> None:
        self._engines = engines
        self._decoder = decoder
        self._in_thread = in_thread

    async def checked(self, job: GenerationJob, limits: FleetLimits, most_logprobs: int) -> GenerationJob:
        """The job, checked against ``limits``, with its output cut to what its key and ``most_logprobs`` allow.

        ``most_logprobs`` is for the whole response.

        Raises:
            InvalidRequestError: the engines would refuse it.
        """
        if job.caller.limits is not None:
            job = within_context(job, job.caller.limits, limits)
        if job.prompt_tokens <= INLINE_TOKENS:
            check_prompts(job, limits)
        else:
            await self._in_thread(job.caller.sender, lambda: check_prompts(job, limits))
        return replace(within_logprobs(job, limits, most_logprobs), checked=limits)

    def response(self, job: GenerationJob, reply: Reply, record: RequestRecord) -> ASGIApp:
        """What generates and sends the response to a checked job; ``record`` counts what it costs."""
        record.journals, record.drawn = job.journals, job.drawn
        record.ranked = job.options.params.ranked
        if job.options.stream:
            costs = _Costs(job, record)
            take = _DirectSend(reply, record, costs)
            events = self._events(job, reply, record, costs, take)
            take.stream = EventStream(events, reply.error, record.begin)
            return take.stream
        return WholeResponse(self._whole(job, reply, record))

    async def _whole(self, job: GenerationJob, reply: Reply, record: RequestRecord) -> Response:
        answers = [Answer() for _ in range(job.num_choices)]
        costs = _Costs(job, record)
        with record.answering():
            async with aclosing(stream_choices(job, self._engines, self._decoder)) as arriving:
                async for delta in arriving:
                    costs.add(delta)
                    answers[delta.index].add(delta)
        described = job.prompt_tokens + record.usage.completion_tokens if job.detailed else 0
        return Response(
            await self._written(job, described, partial(reply.body, answers, record.usage)),
            media_type="application/json",
        )

    async def _events(
        self, job: GenerationJob, reply: Reply, record: RequestRecord, costs: _Costs, take: _DirectSend
    ) -> AsyncGenerator[bytes, None]:
        with record.answering():
            async with aclosing(stream_choices(job, self._engines, self._decoder, take)) as arriving:
                async for delta in arriving:
                    costs.add(delta)
                    if delta.details is None:
                        yield reply.delta(delta, record.usage)
                        continue
                    described = len(delta.details.logprobs) + len(delta.details.prompt_logprobs or ())
                    if delta.details.first and job.options.output.token_ids:
                        described += len(job.prompts[delta.index // job.options.params.n]) // IDS_AS_ONE
                    if job.repeats and delta.call is not None and delta.call.name:
                        described += delta.num_tokens  # the call ends the text before it
                    yield await self._written(job, described, partial(reply.delta, delta, record.usage))
        described = record.usage.completion_tokens if job.detailed and job.repeats else 0
        yield await self._written(job, described, partial(reply.end, record.usage))

    async def _written(self, job: GenerationJob, described: int, write: Callable[[], bytes]) -> bytes:
        """What ``write`` returns; from a thread if it describes many tokens."""
        return write() if described <= INLINE_DETAILS else await self._in_thread(job.caller.sender, write)


class _DirectSend:
    """The direct path from the text of a response to its client: the text becomes an event, which is sent.

    Its ``stream`` is set before its events begin.
    """

    __slots__ = ("_costs", "_record", "_reply", "stream")

    stream: EventStream

    def __init__(self, reply: Reply, record: RequestRecord, costs: _Costs) -> None:
        self._reply = reply
        self._record = record
        self._costs = costs

    def ready(self) -> bool:
        """Whether the client can take an event now."""
        return self.stream.ready()

    def __call__(self, delta: TextDelta) -> None:
        """Send the event of a delta without details."""
        self._costs.add(delta)
        self.stream.send_now(self._reply.delta(delta, self._record.usage))


class _Costs:
    """What the deltas of all choices of one response cost, for its record."""

    __slots__ = ("_cached", "_generated", "_n", "_record")

    def __init__(self, job: GenerationJob, record: RequestRecord) -> None:
        self._n = job.options.params.n
        self._generated = [0] * job.num_choices
        self._cached = [0] * len(job.prompts)
        self._record = record
        record.usage.prompt_tokens = job.prompt_tokens

    def add(self, delta: TextDelta) -> None:
        """The next delta of a choice."""
        index, record, usage = delta.index, self._record, self._record.usage
        prompt = index // self._n
        new = delta.num_tokens - self._generated[index]
        usage.completion_tokens += new
        if delta.reasoning:
            usage.reasoning_tokens += new
        usage.cached_tokens += delta.cached_tokens - self._cached[prompt]
        self._generated[index] = delta.num_tokens
        self._cached[prompt] = delta.cached_tokens
        record.token(index, delta.num_tokens, delta.finish_reason)
