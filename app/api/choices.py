"""The choices of one response: tokens of all prompts and sequences become text as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol, cast

from app.api.caller import Caller
from app.api.openai_types import GenerationOptions
from app.api.text import OutputText, TextDecoder
from app.api.tools.answer_text import AnswerParser
from app.api.tools.parts import CallDelta, Part
from app.fleet.fleet_limits import FleetLimits
from app.fleet.generation import Delta, GenerateRequest, GenerationError
from engine.request import CacheNamespace


class TokenGenerator(Protocol):
    """The part of ``EngineClient`` that this uses."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]: ...


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A response to ``caller``: ``options.params.n`` choices for each prompt, continuations or chat answers."""

    options: GenerationOptions
    prompts: list[list[int]]
    chat: bool
    caller: Caller
    answer_parser: Callable[[], AnswerParser | None] = lambda: None
    """Makes what reads the text of one choice; ``None``: all of it is content."""
    markers: tuple[str, ...] = ()
    """Special tokens that count as text."""
    checked: FleetLimits | None = None
    """By which it has been found valid."""

    def engine_request_id(self, prompt: int) -> str:
        """The request's ID; with several prompts, also which of them it is."""
        name = self.caller.request_id
        return name if len(self.prompts) == 1 else f"{name}-{prompt}"

    @property
    def num_choices(self) -> int:
        """Choices are numbered prompt by prompt."""
        return len(self.prompts) * self.options.params.n

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(map(len, self.prompts))


@dataclass(slots=True)
class TextDelta:
    """New text of choice ``index``, and totals so far: tokens of the choice, cached tokens of its prompt.

    Where answers are parsed, ``text`` is content, and only one of it, ``reasoning``, and ``call`` is there.
    ``fingerprint`` is that of the model that generates the choice. Nothing changes it;
    ``frozen`` would make a new one dear.
    """

    index: int
    text: str
    finish_reason: str | None
    num_tokens: int
    cached_tokens: int
    fingerprint: str = ""
    reasoning: str = ""
    call: CallDelta | None = None
    stop: str | None = None
    """The stop string that ended the choice."""


def stream_choices(
    job: GenerationJob, source: TokenGenerator, decoder: TextDecoder
) -> AsyncGenerator[TextDelta, None]:
    """The text of all choices as it arrives. Closing the generator aborts the rest.

    Raises:
        GenerationError, UnavailableError, InvalidRequestError: of one prompt; it ends the others, too.
    """
    outputs = [_of_prompt(job, prompt, source, decoder) for prompt in range(len(job.prompts))]
    return outputs[0] if len(outputs) == 1 else _merge(outputs)


async def _of_prompt(
    job: GenerationJob, prompt: int, source: TokenGenerator, decoder: TextDecoder
) -> AsyncGenerator[TextDelta, None]:
    """The choices of one prompt; closing the generator aborts them on the engine."""
    options = job.options
    n = options.params.n
    request = GenerateRequest(
        request_id=job.engine_request_id(prompt),
        token_ids=job.prompts[prompt],
        params=options.params,
        namespace=CacheNamespace(tenant=job.caller.tenant, salt=options.cache_salt),
        priority=options.priority,
        client=job.caller.client,
        checked=job.checked,
    )
    texts = {
        sequence: OutputText(
            decoder.detokenizer(continues_text=not job.chat, shown=job.markers),
            options.stop,
            options.params.min_tokens,
        )
        for sequence in range(n)
    }
    parsers = [job.answer_parser() for _ in range(n)]
    ended_tokens = 0
    # EngineClient.generate is an async generator; closing it aborts the request.
    deltas = cast(AsyncGenerator[Delta, None], source.generate(request))
    async with aclosing(deltas):
        async for delta in deltas:
            output = texts.get(delta.sequence)
            if output is None:
                # A stop string has ended this sequence. The engine aborts whole requests only, so it computes
                # this one until the others have ended, too.
                continue
            reason = delta.finish_reason
            if reason == "abort":
                raise GenerationError("the engine aborted this request; send it again")
            text = output.push(delta.token_ids, reason)
            if output.stopped:
                reason = "stop"
            whole = TextDelta(
                prompt * n + delta.sequence,
                text,
                reason,
                output.num_tokens,
                delta.cached_tokens,
                delta.fingerprint,
                stop=output.stop,
            )
            parser = parsers[delta.sequence]
            for part in [whole] if parser is None else _parts(whole, parser):
                yield part
                reason = part.finish_reason
            if reason is not None:
                ended_tokens += output.num_tokens
                del texts[delta.sequence]
                if not texts:
                    request.text_end.tokens = ended_tokens
                    return
    raise GenerationError("the engine ended this request without a reason")


def _parts(delta: TextDelta, parser: AnswerParser) -> list[TextDelta]:
    """``delta`` in parts, one at least; the last has the finish reason."""
    reason = delta.finish_reason
    parts = parser.push(delta.text, ended=reason is not None) or [Part()]
    if parser.complete or (reason == "stop" and parser.num_calls):
        reason = "tool_calls"
    deltas = [
        replace(delta, text=part.content, reasoning=part.reasoning, call=part.call, finish_reason=None)
        for part in parts
    ]
    deltas[-1] = replace(deltas[-1], finish_reason=reason)
    return deltas


async def _merge(sources: Sequence[AsyncGenerator[TextDelta, None]]) -> AsyncGenerator[TextDelta, None]:
    """The text deltas of all ``sources`` as they arrive; an error in one ends all."""
    queue: asyncio.Queue[TextDelta | Exception | None] = asyncio.Queue()

    async def drain(source: AsyncGenerator[TextDelta, None]) -> None:
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
