"""The work behind the HTTP routes: from prompts to token ids, and to a response in the route's format."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from app.api.admission_control import AdmissionControl, Admitted
from app.api.caller import Caller
from app.api.choices import GenerationJob, TokenGenerator
from app.api.fair_threads import InThread
from app.api.generated_response import ResponseMaker
from app.api.live_requests import LiveRequests
from app.api.logprobs import TokenReport
from app.api.messages.reply import MessagesReply
from app.api.openai_responses import Envelope, OpenAIReply
from app.api.openai_types import ChatRequest, CompletionRequest, GenerationOptions
from app.api.prompt_limits import kept_end, kept_tokens
from app.api.prompt_tokenizer import PromptTokenizer
from app.api.reply import Reply
from app.api.request_record import RequestRecord
from app.api.request_trace import RequestTracer
from app.api.responses.reply import REPEATS, ResponsesReply
from app.api.responses.request import ResponsesRequest
from app.api.server_state import ModelState
from app.api.tokenization import DetokenizeRequest, TokenizeRequest
from app.api.tools.families import ModelFamily
from app.dashboard.recent_requests import RecentRequests
from app.fleet.cache_reset import CacheReset
from app.fleet.fleet_limits import FleetLimits
from app.fleet.generation import UnavailableError
from app.fleet.overload import OverloadControl
from app.metrics.request_figures import RequestFigures
from app.option_groups import IngressOptions
from app.routing.prefix_flow import PrefixFlow, PrefixGroup
from engine.kv.block_groups import GroupBy
from engine.kv.block_map import BlockMap

PROMPT_END_TOKENS = 16
"""Tokens at the end of a prompt that show whether it begins the model's reasoning."""


class Engines(TokenGenerator, Protocol):
    """The part of ``EngineClient`` that the service uses."""

    def limits(self) -> FleetLimits | None: ...

    async def first_limits(self, timeout_s: float) -> FleetLimits | None: ...

    def status(self) -> dict[str, Any]: ...

    async def reset_prefix_cache(self) -> CacheReset: ...

    async def block_map(self, replica: str, by: GroupBy = ..., keys: Sequence[int] = ...) -> BlockMap: ...

    @property
    def flow(self) -> PrefixFlow: ...


class OpenAIService:
    """One for each model of an ingress replica; runs on its event loop.

    ``options`` may be replaced at any time; each request reads the current ones. ``live`` counts the requests
    of all models, and ``in_thread`` runs work in a thread. Before any engine has answered, requests wait
    up to ``engine_wait_s`` seconds for one. ``overload`` may refuse requests before anything is done for them;
    by default it refuses none. ``tracer`` exports traces; by default there are none. ``recent`` has the recent
    requests of all models.
    """

    def __init__(
        self,
        engines: Engines,
        tokenizer: PromptTokenizer,
        model: str,
        options: IngressOptions,
        live: LiveRequests,
        in_thread: InThread,
        *,
        engine_wait_s: float,
        overload: OverloadControl | None = None,
        tracer: RequestTracer | None = None,
        recent: RecentRequests[RequestRecord] | None = None,
    ) -> None:
        self._engines = engines
        self._tokenizer = tokenizer
        self.model = model
        self.figures = RequestFigures()
        self.options = options
        self.engine_wait_s = engine_wait_s
        self.overload = overload or OverloadControl()
        self.tracer = tracer
        self.state = ModelState(
            engines, model, lambda: self.overload.refusing, lambda: tokenizer.takes_system_messages
        )
        self.admission = AdmissionControl(
            model, live, lambda: self.options, lambda: self.overload, recent or RecentRequests()
        )
        self._responses = ResponseMaker(engines, tokenizer.decoder, in_thread)

    def channel_states(self) -> dict[str, str]:
        """The state of the channel to each engine replica."""
        states: dict[str, str] = self._engines.status().get("channels", {})
        return states

    def has_replica(self, replica: str) -> bool:
        """Whether the fleet has a replica of this name, even if only other ingresses have channels to it."""
        return replica in self.channel_states() or replica in self._engines.status().get("elsewhere", ())

    def prefix_flow(self) -> list[PrefixGroup]:
        """Shared prefixes: where this ingress sent their prompts."""
        return self._engines.flow.groups(self._tokenizer.words_of)

    async def completions(self, request: CompletionRequest, caller: Caller) -> ASGIApp:
        """Answer ``POST /v1/completions``.

        Raises:
            InvalidRequestError, ApiError, UnavailableError: before anything has been sent.
        """
        self.admission.check_priority(request.options.priority, caller.limits)
        record = self._record(caller, "completions", request.options.stream)
        choices = len(request.prompts) * request.options.params.width
        with self.admission.admit(record, choices) as (permit, held):
            limits = await self._limits()
            texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
            keep = kept_tokens(request.options, limits, caller.limits)
            encoded = iter(
                await self._tokenizer.encode_texts(texts, limits.max_model_len, keep=keep, sender=caller.sender)
            )
            prompts = [next(encoded) if isinstance(prompt, str) else prompt for prompt in request.prompts]
            options = await self._with_bad_words(request.options, caller.sender)
            job = GenerationJob(options, [kept_end(prompt, keep) for prompt in prompts], False, caller)
            permit.add_tokens(job.prompt_tokens, self.options)
            job = await self._responses.checked(job, limits, self.options.max_response_logprobs)
            if options.output.echo:
                job = replace(job, echoes=await self._echoes(request, prompts, job))
            reply = OpenAIReply(job, self._envelope("cmpl", caller), self._tokenizer.decoder)
            return Admitted(self._responses.response(job, reply, record), held.pop_all())

    async def chat(
        self,
        request: ChatRequest,
        caller: Caller,
        reply_to: Callable[[GenerationJob], Reply] | None = None,
        route: str = "chat",
        repeats: int = 0,
    ) -> ASGIApp:
        """Answer a chat; without ``reply_to``, as ``POST /v1/chat/completions`` does.

        ``repeats``: see ``GenerationJob``.

        Raises as :meth:`completions` does.
        """
        self.admission.check_priority(request.options.priority, caller.limits)
        record = self._record(caller, route, request.options.stream)
        with self.admission.admit(record, request.options.params.width) as (permit, held):
            limits = await self._limits()
            family = self._family()
            keep = kept_tokens(request.options, limits, caller.limits)
            prompt = kept_end(await self._chat_tokens(request, caller, limits, keep), keep)
            options = await self._with_bad_words(request.options, caller.sender)
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
                repeats=repeats,
                continues=request.template.continue_final_message,
            )
            permit.add_tokens(job.prompt_tokens, self.options)
            job = await self._responses.checked(job, limits, self.options.max_response_logprobs)
            if reply_to is None:
                reply: Reply = OpenAIReply(job, self._envelope("chatcmpl", caller), self._tokenizer.decoder)
            else:
                reply = reply_to(job)
            return Admitted(self._responses.response(job, reply, record), held.pop_all())

    async def responses(self, request: ResponsesRequest, caller: Caller) -> ASGIApp:
        """Answer ``POST /v1/responses``; raises as :meth:`completions` does."""

        def reply_to(job: GenerationJob) -> Reply:
            report = TokenReport(job, self._tokenizer.decoder) if job.detailed else None
            return ResponsesReply(caller.request_id, self.model, request.echo, report)

        return await self.chat(request.chat, caller, reply_to, "responses", REPEATS)

    async def messages(self, request: ChatRequest, caller: Caller) -> ASGIApp:
        """Answer ``POST /v1/messages``; raises as :meth:`completions` does."""
        reply = MessagesReply(caller.request_id, self.model)
        return await self.chat(request, caller, lambda job: reply, "messages")

    async def count_tokens(self, request: ChatRequest, caller: Caller) -> Response:
        """Answer ``POST /v1/messages/count_tokens``; raises as :meth:`completions` does."""
        record = self._record(caller, "count_tokens", False)
        with self.admission.admit(record, 1), record.running():
            tokens = await self._chat_tokens(request, caller, await self._limits())
        return JSONResponse({"input_tokens": len(tokens)})

    async def tokenize(self, request: TokenizeRequest, caller: Caller) -> Response:
        """Answer ``POST /tokenize``; raises as :meth:`completions` does."""
        record = self._record(caller, "tokenize", False)
        with self.admission.admit(record, 1), record.running():
            longest, sender = (await self._limits()).max_model_len, caller.sender
            if request.prompt is None:
                tokens = await self._tokenizer.encode_chat(
                    request.messages, longest, (caller.tenant, ""), sender=sender
                )
            else:
                (tokens,) = await self._tokenizer.encode_texts(
                    [request.prompt], longest, request.add_special_tokens, sender=sender
                )
            strings = await self._tokenizer.names(tokens, sender=sender) if request.token_strings else None
        return JSONResponse(
            {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": strings}
        )

    async def detokenize(self, request: DetokenizeRequest, caller: Caller) -> Response:
        """Answer ``POST /detokenize``; raises as :meth:`completions` does."""
        record = self._record(caller, "detokenize", False)
        with self.admission.admit(record, 1), record.running():
            longest = (await self._limits()).max_model_len
            text = await self._tokenizer.decode(request.tokens, longest, sender=caller.sender)
        return JSONResponse({"prompt": text})

    async def reset_prefix_cache(self) -> CacheReset:
        """Empty the prefix cache of every routable replica.

        Raises:
            UnavailableError: there is none.
        """
        return await self._engines.reset_prefix_cache()

    async def block_map(self, replica: str, by: GroupBy, keys: Sequence[int]) -> BlockMap:
        """What each KV block of an engine replica holds; see ``EngineThread.block_map``.

        Raises:
            UnavailableError: it has no open channel, or does not answer.
        """
        return await self._engines.block_map(replica, by, keys)

    @property
    def num_live(self) -> int:
        """Live choices, each from its request's arrival to the end of the response."""
        return self.admission.live.count

    def _record(self, caller: Caller, route: str, stream: bool) -> RequestRecord:
        return RequestRecord(caller, route, stream, self.figures, self.tracer, self.model)

    async def _chat_tokens(
        self, request: ChatRequest, caller: Caller, limits: FleetLimits, keep: int | None = None
    ) -> list[int]:
        owner = caller.tenant, request.options.cache_salt
        return await self._tokenizer.encode_chat(
            request.messages,
            limits.max_model_len,
            owner,
            request.tools,
            request.template,
            keep,
            sender=caller.sender,
        )

    async def _echoes(
        self, request: CompletionRequest, prompts: list[list[int]], job: GenerationJob
    ) -> tuple[str, ...]:
        """The text of each prompt of the checked ``job``; as the client gave it, if no part was cut off."""
        echoes: list[str] = []
        for i, (given, prompt, kept) in enumerate(zip(request.prompts, prompts, job.prompts, strict=True)):
            if isinstance(given, str) and len(kept) == len(prompt):
                echoes.append(given)
                continue
            name = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
            cut = len(prompt) - len(kept)
            sender = job.caller.sender
            echoes.append(await self._tokenizer.decode(kept, len(kept), name, "prompt", cut, sender=sender))
        return tuple(echoes)

    async def _with_bad_words(self, options: GenerationOptions, sender: str) -> GenerationOptions:
        """With the tokens of its bad words."""
        words = options.output.bad_words
        if not words:
            return options
        tokens = await self._tokenizer.encode_words(words, sender=sender)
        return replace(options, params=replace(options.params, bad_words=tokens))

    def _envelope(self, kind: str, caller: Caller) -> Envelope:
        return Envelope(f"{kind}-{caller.request_id}", int(time.time()), self.model)

    async def _limits(self) -> FleetLimits:
        limits = self._engines.limits() or await self._engines.first_limits(self.engine_wait_s)
        if limits is None:
            raise UnavailableError(
                f"no engine replica of the model {self.model!r} became ready within {self.engine_wait_s:g} s; "
                "engines are still loading, or cannot start (the operator sees why with `serve status`)"
            )
        return limits

    def _family(self) -> ModelFamily:
        return ModelFamily.of(self._tokenizer.template, self.options.tool_parser, self.options.reasoning_parser)
