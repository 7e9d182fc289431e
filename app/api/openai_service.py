"""The work behind the HTTP routes: prompts to token ids, generated tokens to text, in OpenAI's format."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.api.answers import Answer
from app.api.authentication import Gate
from app.api.caller import Caller
from app.api.choices import GenerationJob, TextDelta, TokenGenerator, stream_choices
from app.api.errors import ApiFault, model_not_allowed, model_not_found
from app.api.key_limits import KeyLimits
from app.api.keys import KeyFile
from app.api.live_requests import LiveRequests, Permit
from app.api.messages.reply import MessagesReply
from app.api.openai_responses import Envelope, OpenAIReply
from app.api.openai_types import ChatRequest, CompletionRequest, GenerationOptions
from app.api.prompt_tokenizer import PromptTokenizer
from app.api.reply import Reply
from app.api.request_body import BodyReader
from app.api.request_record import RequestRecord
from app.api.responses.reply import ResponsesReply
from app.api.responses.request import ResponsesRequest
from app.api.sse import EventStream, WholeResponse
from app.api.tenant import sender_of
from app.api.tokenization import DetokenizeRequest, TokenizeRequest
from app.api.tools.families import ModelFamily
from app.config import IngressOptions
from app.dashboard.live_feed import LiveFeed
from app.fleet.cache_reset import CacheReset
from app.fleet.fleet_limits import FleetLimits
from app.fleet.generation import UnavailableError
from app.fleet.overload import OverloadControl
from app.metrics.exposition import CONTENT_TYPE
from app.metrics.fleet_figures import FleetFigures
from app.metrics.request_figures import RequestFigures
from app.metrics.samples import Process
from engine.errors import InvalidRequestError, shown

PROMPT_END_TOKENS = 16
"""Tokens at the end of a prompt that show whether it begins the model's reasoning."""

INLINE_TOKENS = 20_000
"""Prompts of up to this many tokens together are checked on the event loop, in about a millisecond."""

INLINE_DETAILS = 200
"""Tokens of a response that are described on the event loop: each takes 0.1 ms with 20 others beside it."""


class Engines(TokenGenerator, Protocol):
    """The part of ``EngineClient`` that the service uses."""

    def limits(self) -> FleetLimits | None: ...

    async def first_limits(self, timeout_s: float) -> FleetLimits | None: ...

    def status(self) -> dict[str, Any]: ...

    async def reset_prefix_cache(self) -> CacheReset: ...


class OpenAIService:
    """One per ingress replica; runs on its event loop.

    ``options`` may be replaced at any time; each request reads the current ones. Before any engine has
    answered, requests wait up to ``engine_wait_s`` seconds for one. ``overload`` may refuse requests before
    anything is done for them; by default it refuses none. ``instance`` names the server. ``gate`` knows the API
    keys; by default there are none. ``fleet_figures``, which the owner may replace, has what ``/metrics`` says.
    """

    def __init__(
        self,
        engines: Engines,
        tokenizer: PromptTokenizer,
        model: str,
        options: IngressOptions,
        *,
        engine_wait_s: float,
        overload: OverloadControl | None = None,
        instance: str = "",
        gate: Gate | None = None,
    ) -> None:
        self._engines = engines
        self._tokenizer = tokenizer
        self._model = model
        self._started = int(time.time())
        self.figures = RequestFigures()
        self.fleet_figures = FleetFigures(model, lambda: Process("", self.figures.samples()))
        self.live_feed = LiveFeed(
            lambda: self.fleet_figures.processes(), lambda: self._engines.status().get("channels", {})
        )
        self.options = options
        self.bodies = BodyReader(lambda request: sender_of(request, self.options.tenant_header))
        self._live = LiveRequests()
        self.engine_wait_s = engine_wait_s
        self.overload = overload or OverloadControl()
        self.instance = instance
        self.gate = gate or Gate(KeyFile(None, {}))

    def health(self) -> Response:
        """200 while a request would find an engine or wake one, even if it is refused for now; else 503."""
        status, body = self._health()
        return JSONResponse(body, status)

    def brief_health(self) -> Response:
        """:meth:`health` for those without a key: nothing of the fleet but whether it can answer."""
        status, body = self._health()
        fields = ("status", "instance", "routable", "asleep")
        return JSONResponse({name: value for name, value in body.items() if name in fields}, status)

    def ping(self) -> Response:
        """The status of :meth:`health` without its body."""
        return Response(status_code=self._health()[0])

    def _health(self) -> tuple[int, dict[str, Any]]:
        status = self._engines.status()
        ready = self._engines.limits() is not None and bool(status.get("routable"))
        asleep = bool(status.get("asleep"))
        working = "overloaded" if self.overload.refusing else "ok"
        state = working if ready else "asleep" if asleep else "unavailable"
        return 200 if ready or asleep else 503, {"status": state, "instance": self.instance, **status}

    def models(self, key: KeyLimits | None = None) -> Response:
        listed = [self._model_entry()] if key is None or key.may_use(self._model) else []
        return JSONResponse({"object": "list", "data": listed})

    def model(self, name: str, key: KeyLimits | None = None) -> Response:
        self._check_model(name, key)
        return JSONResponse(self._model_entry())

    async def completions(self, request: CompletionRequest, caller: Caller) -> ASGIApp:
        """Answer ``POST /v1/completions``.

        Raises:
            InvalidRequestError, ApiError, UnavailableError: before anything has been sent.
        """
        self._check_options(request.options, caller.limits)
        record = RequestRecord(caller, "completions", request.options.stream, self.figures)
        choices = len(request.prompts) * request.options.params.width
        with self._admit(record, choices) as (permit, held):
            limits = await self._limits()
            texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
            longest = limits.max_model_len
            encoded = iter(await self._tokenizer.encode_texts(texts, longest))
            prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in request.prompts]
            options = await self._with_bad_words(request.options)
            kept = [_kept(prompt, options, limits) for prompt in prompts]
            echoes: list[str] = []
            if options.output.echo:
                for given, prompt, end in zip(request.prompts, prompts, kept, strict=True):
                    limits.validate(end, options.params)  # before it is decoded
                    whole = isinstance(given, str) and len(end) == len(prompt)
                    echoes.append(str(given) if whole else await self._tokenizer.decode(end, longest))
            job = GenerationJob(options, kept, False, caller, echoes=tuple(echoes))
            permit.add_tokens(job.prompt_tokens, self.options)
            reply = OpenAIReply(job, self._envelope("cmpl", caller), self._tokenizer.decoder)
            response = await self._respond(job, limits, record, reply)
            return _Admitted(response, held.pop_all())

    async def chat(
        self,
        request: ChatRequest,
        caller: Caller,
        reply_to: Callable[[GenerationJob], Reply] | None = None,
        route: str = "chat",
    ) -> ASGIApp:
        """Answer a chat; without ``reply_to``, as ``POST /v1/chat/completions`` does.

        Raises as :meth:`completions` does.
        """
        self._check_options(request.options, caller.limits)
        record = RequestRecord(caller, route, request.options.stream, self.figures)
        with self._admit(record, request.options.params.width) as (permit, held):
            limits = await self._limits()
            owner = caller.tenant, request.options.cache_salt
            family = self._family()
            longest = limits.max_model_len
            prompt = await self._tokenizer.encode_chat(
                request.messages, longest, owner, request.tools, request.template
            )
            options = await self._with_bad_words(request.options)
            prompt = _kept(prompt, options, limits)
            end = self._tokenizer.text_of(prompt[-PROMPT_END_TOKENS:])
            free = options.params.structured_output is None
            parser_of = partial(family.parser, request.tools, end, free=free)
            job = GenerationJob(
                options,
                [prompt],
                True,
                caller,
                parser_of,
                family.markers,
                continues=request.template.continue_final_message,
            )
            permit.add_tokens(job.prompt_tokens, self.options)
            if reply_to is None:
                reply: Reply = OpenAIReply(job, self._envelope("chatcmpl", caller), self._tokenizer.decoder)
            else:
                reply = reply_to(job)
            response = await self._respond(job, limits, record, reply)
            return _Admitted(response, held.pop_all())

    async def responses(self, request: ResponsesRequest, caller: Caller) -> ASGIApp:
        """Answer ``POST /v1/responses``; raises as :meth:`completions` does."""
        reply = ResponsesReply(caller.request_id, self._model, request.echo)
        return await self.chat(request.chat, caller, lambda job: reply, "responses")

    async def messages(self, request: ChatRequest, caller: Caller) -> ASGIApp:
        """Answer ``POST /v1/messages``; raises as :meth:`completions` does."""
        reply = MessagesReply(caller.request_id, self._model)
        return await self.chat(request, caller, lambda job: reply, "messages")

    async def count_tokens(self, request: ChatRequest, caller: Caller) -> Response:
        """Answer ``POST /v1/messages/count_tokens``; raises as :meth:`completions` does."""
        self._check_model(request.options.model, caller.limits)
        record = RequestRecord(caller, "count_tokens", False, self.figures)
        with self._admit(record, 1), record.running():
            longest = (await self._limits()).max_model_len
            owner = caller.tenant, request.options.cache_salt
            tokens = await self._tokenizer.encode_chat(
                request.messages, longest, owner, request.tools, request.template
            )
        return JSONResponse({"input_tokens": len(tokens)})

    async def tokenize(self, request: TokenizeRequest, caller: Caller) -> Response:
        """Answer ``POST /tokenize``; raises as :meth:`completions` does."""
        self._check_model(request.model, caller.limits)
        record = RequestRecord(caller, "tokenize", False, self.figures)
        with self._admit(record, 1), record.running():
            longest = (await self._limits()).max_model_len
            if request.prompt is None:
                tokens = await self._tokenizer.encode_chat(request.messages, longest, (caller.tenant, ""))
            else:
                (tokens,) = await self._tokenizer.encode_texts(
                    [request.prompt], longest, request.add_special_tokens
                )
            strings = await self._tokenizer.names(tokens) if request.token_strings else None
        return JSONResponse(
            {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": strings}
        )

    async def detokenize(self, request: DetokenizeRequest, caller: Caller) -> Response:
        """Answer ``POST /detokenize``; raises as :meth:`completions` does."""
        self._check_model(request.model, caller.limits)
        record = RequestRecord(caller, "detokenize", False, self.figures)
        with self._admit(record, 1), record.running():
            longest = (await self._limits()).max_model_len
            text = await self._tokenizer.decode(request.tokens, longest)
        return JSONResponse({"prompt": text})

    async def metrics(self) -> Response:
        """Answer ``GET /metrics``: the whole fleet's figures, in Prometheus's format."""
        return Response(await self.fleet_figures.text(), media_type=CONTENT_TYPE)

    async def reset_prefix_cache(self) -> Response:
        """Answer ``POST /admin/reset_prefix_cache``; an error names each replica that failed.

        Raises:
            UnavailableError: no engine replica is routable.
        """
        reset = await self._engines.reset_prefix_cache()
        replicas, freed = len(reset.freed_blocks), sum(reset.freed_blocks.values())
        if reset.failures:
            causes = "; ".join(f"{replica}: {why}" for replica, why in reset.failures.items())
            message = f"{replicas} replicas freed {freed} blocks, {len(reset.failures)} failed: {causes}"
            return ApiFault(500, message, "server_error", code="reset_failed").to_response()
        return JSONResponse({"replicas": replicas, "freed_blocks": freed})

    @contextmanager
    def _admit(self, record: RequestRecord, choices: int) -> Iterator[tuple[Permit, ExitStack]]:
        """Take permits before the request waits for anything; they are released unless the stack is emptied."""
        caller = record.caller
        permit = self._live.admit(caller.client, choices, self.options, self.overload)
        with ExitStack() as held:
            held.callback(permit.release)
            if caller.limits is not None:
                caller.limits.admit(record.stream)
            held.callback(record.end)
            with record.failing():
                yield permit, held

    @property
    def num_live(self) -> int:
        """Choices that are live, each from its request's arrival to the end of the response."""
        return self._live.count

    def _check_options(self, options: GenerationOptions, key: KeyLimits | None) -> None:
        self._check_model(options.model, key)
        best = self.options.min_priority
        if key is not None and key.key.min_priority is not None:
            best = key.key.min_priority
        if options.priority < best:
            raise InvalidRequestError(
                f"priority is {options.priority} but must be at least {best}, which runs first here "
                "(min_priority)",
                "priority",
            )

    async def _with_bad_words(self, options: GenerationOptions) -> GenerationOptions:
        """With the tokens of its bad words."""
        words = options.output.bad_words
        if not words:
            return options
        tokens = await self._tokenizer.encode_words(words)
        return replace(options, params=replace(options.params, bad_words=tokens))

    async def _respond(
        self, job: GenerationJob, limits: FleetLimits, record: RequestRecord, reply: Reply
    ) -> ASGIApp:
        if job.caller.limits is not None:
            job = _within_context(job, job.caller.limits)
        if job.prompt_tokens <= INLINE_TOKENS:
            _check_prompts(job, limits)
        else:
            await self.bodies.in_thread(lambda: _check_prompts(job, limits))
        job = replace(job, checked=limits)
        if job.options.stream:
            return EventStream(self._events(job, reply, record), reply.error)
        return WholeResponse(self._whole(job, reply, record))

    async def _whole(self, job: GenerationJob, reply: Reply, record: RequestRecord) -> Response:
        answers = [Answer() for _ in range(job.num_choices)]
        with record.running():
            async with aclosing(self._text_deltas(job, record)) as arriving:
                async for delta in arriving:
                    answers[delta.index].add(delta)

        def content() -> bytes:
            # Half of a surrogate pair becomes its escape, which JSON may have.
            body = json.dumps(reply.body(answers, record.usage), ensure_ascii=False)
            return body.encode("utf-8", "backslashreplace")

        described = job.prompt_tokens + record.usage.completion_tokens if job.detailed else 0
        return Response(await self._written(described, content), media_type="application/json")

    async def _events(
        self, job: GenerationJob, reply: Reply, record: RequestRecord
    ) -> AsyncGenerator[bytes, None]:
        with record.running():
            async with aclosing(self._text_deltas(job, record)) as arriving:
                async for delta in arriving:
                    of_prompt = None if delta.details is None else delta.details.prompt_logprobs
                    if of_prompt is None:
                        yield reply.delta(delta, record.usage)
                    else:
                        write = partial(reply.delta, delta, record.usage)
                        yield await self._written(len(of_prompt), write)
        yield reply.end(record.usage)

    async def _written(self, described: int, write: Callable[[], bytes]) -> bytes:
        """What ``write`` returns; from a thread if it describes many tokens."""
        return write() if described <= INLINE_DETAILS else await self.bodies.in_thread(write)

    async def _text_deltas(self, job: GenerationJob, record: RequestRecord) -> AsyncGenerator[TextDelta, None]:
        """The deltas of all choices; ``record`` counts what they cost."""
        n = job.options.params.n
        generated = [0] * job.num_choices
        cached = [0] * len(job.prompts)
        usage = record.usage
        usage.prompt_tokens = job.prompt_tokens
        async with aclosing(stream_choices(job, self._engines, self._tokenizer.decoder)) as arriving:
            async for delta in arriving:
                prompt = delta.index // n
                new = delta.num_tokens - generated[delta.index]
                usage.completion_tokens += new
                if delta.reasoning:
                    usage.reasoning_tokens += new
                usage.cached_tokens += delta.cached_tokens - cached[prompt]
                generated[delta.index] = delta.num_tokens
                cached[prompt] = delta.cached_tokens
                record.token(delta.index, delta.num_tokens, delta.finish_reason)
                yield delta

    def _envelope(self, kind: str, caller: Caller) -> Envelope:
        return Envelope(f"{kind}-{caller.request_id}", int(time.time()), self._model)

    async def _limits(self) -> FleetLimits:
        limits = self._engines.limits() or await self._engines.first_limits(self.engine_wait_s)
        if limits is None:
            raise UnavailableError("no engine replica has started yet; try again in a moment")
        return limits

    def _family(self) -> ModelFamily:
        return ModelFamily.of(self._tokenizer.template, self.options.tool_parser, self.options.reasoning_parser)

    def _check_model(self, name: str | None, key: KeyLimits | None) -> None:
        if key is not None and not key.may_use(self._model):
            # One model is served: the key can use nothing here.
            raise model_not_allowed(self._model if name is None else name, key.key.id)
        if name is not None and name != self._model:
            raise model_not_found(name, self._model)

    def _model_entry(self) -> dict[str, Any]:
        limits = self._engines.limits()
        entry: dict[str, Any] = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "quire",
        }
        return entry if limits is None else {**entry, "max_model_len": limits.max_model_len}


class _Admitted:
    """A response that releases its permits when it ends, however it ends."""

    def __init__(self, response: ASGIApp, permits: ExitStack) -> None:
        self._response = response
        self._permits = permits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._permits:
            await self._response(scope, receive, send)


def _within_context(job: GenerationJob, key: KeyLimits) -> GenerationJob:
    """The job with no more output than the key's longest context allows.

    Raises:
        InvalidRequestError: it asks for more.
    """
    params = job.options.params
    most = key.context(max(map(len, job.prompts)), params.max_tokens)
    if most == params.max_tokens:
        return job
    return replace(job, options=replace(job.options, params=replace(params, max_tokens=most)))


def _kept(prompt: list[int], options: GenerationOptions, limits: FleetLimits) -> list[int]:
    """The end of ``prompt`` that ``truncate_prompt_tokens`` keeps."""
    keep = options.output.keep_last
    if keep is None:
        return prompt
    if keep < 0:
        wanted = options.params.max_tokens
        keep = max(limits.max_tokens - (1 if wanted is None else wanted), 1)
    return prompt[-keep:]


def _check_prompts(job: GenerationJob, limits: FleetLimits) -> None:
    """Refuse what the engine would refuse, while the response can still have an error status."""
    for prompt in job.prompts:
        _check_prompt(prompt, job, limits)


def _check_prompt(prompt: list[int], job: GenerationJob, limits: FleetLimits) -> None:
    param = "messages" if job.chat else "prompt"
    if len(prompt) > limits.max_model_len:  # before the tokens themselves are looked at
        raise InvalidRequestError(
            f"{param} of {len(prompt)} tokens exceeds the context length of {limits.max_model_len} tokens",
            param,
            "context_length_exceeded",
        )
    params = job.options.params
    try:
        longest = limits.validate(prompt, params)
    except InvalidRequestError as error:
        if job.chat and error.param == "prompt":
            raise InvalidRequestError(error.message, param, error.code) from error
        raise
    if params.min_tokens > longest - len(prompt):
        raise InvalidRequestError(
            f"min_tokens is {shown(params.min_tokens)} but after a prompt of {len(prompt)} tokens at most "
            f"{longest - len(prompt)} more can be generated",
            "min_tokens",
            "context_length_exceeded",
        )
