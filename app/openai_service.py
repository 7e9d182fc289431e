"""What the HTTP routes do: prompts to token ids, tokens of the engine to text, all in OpenAI's words."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Protocol, cast

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.chat import PromptTokenizer
from app.errors import model_not_found
from app.openai_responses import ChunkWriter, Envelope, Output, Usage, chat_body, completion_body
from app.openai_types import GenerationOptions, parse_chat, parse_completion
from app.relay import Delta, GenerateRequest, GenerationError, UnavailableError
from app.sse import DONE, EventStream, WholeResponse
from app.text import OutputText
from engine.errors import InvalidRequestError
from engine.request import CacheNamespace, ModelLimits, validate

LIMITS_POLL_S = 0.05


class EngineSource(Protocol):
    """The part of ``EngineClient`` that this needs."""

    def limits(self) -> ModelLimits | None: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]: ...

    def status(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One response to make: its sequences, and whether they continue a text or answer a chat."""

    options: GenerationOptions
    prompts: list[list[int]]
    chat: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """What one delta adds to output ``index``; the counts are that output's so far."""

    index: int
    text: str
    finish_reason: str | None
    num_tokens: int
    cached_tokens: int


class OpenAIService:
    """One per ingress replica; runs on its event loop.

    ``fingerprint`` changes whenever answers may. More than ``max_live_requests`` prompts at a time are refused,
    waiting ones included; requests that come before any engine has answered wait ``unavailable_after_s``
    seconds for one. ``num_live`` counts the prompts from a request's arrival to its response's end.
    """

    def __init__(
        self,
        source: EngineSource,
        tokenizer: PromptTokenizer,
        model: str,
        fingerprint: str,
        *,
        max_live_requests: int = 4096,
        unavailable_after_s: float = 60.0,
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._model = model
        self._fingerprint = fingerprint
        self._started = int(time.time())
        self.max_live_requests = max_live_requests
        self.num_live = 0
        self.unavailable_after_s = unavailable_after_s

    def health(self) -> Response:
        """200 while a request would find an engine, else 503."""
        status = self._source.status()
        ready = self._source.limits() is not None and bool(status.get("routable"))
        body = {"status": "ok" if ready else "unavailable", **status}
        return JSONResponse(body, 200 if ready else 503)

    def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_entry()]})

    def model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._model_entry())

    async def completions(self, body: dict[str, Any]) -> ASGIApp:
        """Answer ``POST /v1/completions``.

        Raises:
            InvalidRequestError, ApiError, UnavailableError: before anything has been sent.
        """
        request = parse_completion(body)
        self._check_model(request.options.model)
        with self._admit(len(request.prompts)) as slots:
            limits = await self._limits()
            texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
            encoded = iter(await self._tokenizer.encode_texts(texts, limits.max_model_len))
            prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in request.prompts]
            response = self._respond(Job(request.options, prompts, chat=False), limits)
            return _Admitted(response, slots.pop_all())

    async def chat(self, body: dict[str, Any]) -> ASGIApp:
        """Answer ``POST /v1/chat/completions``; raises as :meth:`completions` does."""
        request = parse_chat(body)
        self._check_model(request.options.model)
        with self._admit(1) as slots:
            limits = await self._limits()
            prompt = await self._tokenizer.encode_chat(request.messages, limits.max_model_len)
            response = self._respond(Job(request.options, [prompt], chat=True), limits)
            return _Admitted(response, slots.pop_all())

    def _admit(self, prompts: int) -> ExitStack:
        """Take ``prompts`` slots before anything waits for the request; closing the result gives them back."""
        if self.num_live + prompts > self.max_live_requests:
            raise UnavailableError(
                f"{self.num_live} requests are live and at most {self.max_live_requests} are allowed "
                "(max_live_requests); try again later"
            )
        self.num_live += prompts
        slots = ExitStack()
        slots.callback(self._release, prompts)
        return slots

    def _release(self, prompts: int) -> None:
        self.num_live -= prompts

    def _respond(self, job: Job, limits: ModelLimits) -> ASGIApp:
        for prompt in job.prompts:
            _check_prompt(prompt, job, limits)
        prefix = "chatcmpl" if job.chat else "cmpl"
        envelope = Envelope(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), self._model, self._fingerprint)
        return (
            EventStream(self._events(job, envelope))
            if job.options.stream
            else WholeResponse(self._whole(job, envelope))
        )

    async def _whole(self, job: Job, envelope: Envelope) -> Response:
        outputs = [_Collected() for _ in job.prompts]
        async with aclosing(self._pieces(job, envelope)) as pieces:
            async for piece in pieces:
                outputs[piece.index].add(piece)
        usage = Usage(
            sum(map(len, job.prompts)),
            sum(output.num_tokens for output in outputs),
            sum(output.cached_tokens for output in outputs),
        )
        results = [Output("".join(output.texts), output.finish_reason) for output in outputs]
        body = chat_body(envelope, results[0], usage) if job.chat else completion_body(envelope, results, usage)
        return Response(json.dumps(body, ensure_ascii=False), media_type="application/json")

    async def _events(self, job: Job, envelope: Envelope) -> AsyncGenerator[bytes, None]:
        options = job.options
        writer = ChunkWriter(
            envelope,
            chat=job.chat,
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage,
        )
        made = [0] * len(job.prompts)
        cached = [0] * len(job.prompts)
        usage = Usage(sum(map(len, job.prompts)))
        opening = writer.role() if job.chat else b""
        async with aclosing(self._pieces(job, envelope)) as pieces:
            async for piece in pieces:
                usage.completion_tokens += piece.num_tokens - made[piece.index]
                usage.cached_tokens += piece.cached_tokens - cached[piece.index]
                made[piece.index] = piece.num_tokens
                cached[piece.index] = piece.cached_tokens
                yield opening + writer.text(piece.index, piece.text, piece.finish_reason, usage)
                opening = b""
        yield writer.usage(usage) + DONE

    def _pieces(self, job: Job, envelope: Envelope) -> AsyncGenerator[Piece, None]:
        if len(job.prompts) == 1:
            return self._one(job, envelope, 0)
        return _merge([self._one(job, envelope, index) for index in range(len(job.prompts))])

    async def _one(self, job: Job, envelope: Envelope, index: int) -> AsyncGenerator[Piece, None]:
        """The output of one prompt; leaving early aborts it on the engine."""
        options = job.options
        request = GenerateRequest(
            request_id=f"{envelope.id}-{index}",
            token_ids=job.prompts[index],
            params=options.params,
            namespace=CacheNamespace(salt=options.cache_salt),
        )
        detokenizer = self._tokenizer.decoder.detokenizer(continues_text=not job.chat)
        output = OutputText(detokenizer, options.stop, options.params.min_tokens)
        # EngineClient.generate is an async generator; closing it aborts the request.
        deltas = cast(AsyncGenerator[Delta, None], self._source.generate(request))
        async with aclosing(deltas):
            async for delta in deltas:
                reason = delta.finish_reason
                if reason == "abort":
                    raise GenerationError("the engine aborted this request; send it again")
                text = output.push(delta.token_ids, reason)
                if output.stopped:
                    reason = "stop"
                yield Piece(index, text, reason, output.num_tokens, delta.cached_tokens)
                if reason is not None:
                    return
        raise GenerationError("the engine ended this request without saying why")

    async def _limits(self) -> ModelLimits:
        deadline = time.monotonic() + self.unavailable_after_s
        while (limits := self._source.limits()) is None:
            if time.monotonic() >= deadline:
                raise UnavailableError("no engine replica has started yet; try again in a moment")
            await asyncio.sleep(LIMITS_POLL_S)
        return limits

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model:
            raise model_not_found(name, self._model)

    def _model_entry(self) -> dict[str, Any]:
        limits = self._source.limits()
        entry: dict[str, Any] = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "quire",
        }
        return entry if limits is None else {**entry, "max_model_len": limits.max_model_len}


class _Admitted:
    """A response that gives its slots back when it has ended, whatever the way."""

    def __init__(self, response: ASGIApp, slots: ExitStack) -> None:
        self._response = response
        self._slots = slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._slots:
            await self._response(scope, receive, send)


class _Collected:
    """One output as it gathers."""

    __slots__ = ("cached_tokens", "finish_reason", "num_tokens", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.finish_reason = ""
        self.num_tokens = 0
        self.cached_tokens = 0

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.num_tokens = piece.num_tokens
        self.cached_tokens = piece.cached_tokens
        self.finish_reason = piece.finish_reason or ""


def _check_prompt(prompt: list[int], job: Job, limits: ModelLimits) -> None:
    """What the engine would refuse is refused before a stream has begun."""
    param = "messages" if job.chat else "prompt"
    if len(prompt) > limits.max_model_len:  # before the tokens themselves are looked at
        raise InvalidRequestError(
            f"{param} of {len(prompt)} tokens exceeds the context length of {limits.max_model_len} tokens",
            param,
            "context_length_exceeded",
        )
    params = job.options.params
    try:
        longest = validate(prompt, params, limits)
    except InvalidRequestError as error:
        if job.chat and error.param == "prompt":
            raise InvalidRequestError(error.message, param, error.code) from error
        raise
    if params.min_tokens > longest - len(prompt):
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens} but after a prompt of {len(prompt)} tokens at most "
            f"{longest - len(prompt)} more can be made",
            "min_tokens",
            "context_length_exceeded",
        )


async def _merge(sources: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """The pieces of all ``sources`` as they come; an error of one ends all."""
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()

    async def drain(source: AsyncGenerator[Piece, None]) -> None:
        try:
            async with aclosing(source):
                async for piece in source:
                    queue.put_nowait(piece)
            queue.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised again by the reader
            queue.put_nowait(error)

    tasks = [asyncio.create_task(drain(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
