"""The outputs of one response as they come: tokens of several prompts and sequences, turned to text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, cast

from app.api.openai_types import GenerationOptions
from app.api.text import OutputText, TextDecoder
from app.fleet.generation import Delta, GenerateRequest, GenerationError
from engine.request import CacheNamespace


class TokenSource(Protocol):
    """Makes tokens; ``EngineClient`` does."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]: ...


@dataclass(frozen=True, slots=True)
class Job:
    """One response to make: ``options.params.n`` choices of each prompt, that continue a text or answer a chat.

    ``tenant`` divides the prefix cache; see ``app/api/tenant.py``.
    """

    options: GenerationOptions
    prompts: list[list[int]]
    chat: bool
    tenant: str = ""

    @property
    def num_choices(self) -> int:
        """Choices are numbered prompt by prompt."""
        return len(self.prompts) * self.options.params.n

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, whatever the number of its choices."""
        return sum(map(len, self.prompts))


@dataclass(frozen=True, slots=True)
class Piece:
    """What one delta adds to choice ``index``; the counts are that choice's so far, and its prompt's."""

    index: int
    text: str
    finish_reason: str | None
    num_tokens: int
    cached_tokens: int


def pieces(job: Job, name: str, source: TokenSource, decoder: TextDecoder) -> AsyncGenerator[Piece, None]:
    """The pieces of all choices as they come; ``name`` is for logs. Closing it aborts what still runs.

    Raises:
        GenerationError, UnavailableError, InvalidRequestError: of one prompt; the others end with it.
    """
    outputs = [_of_prompt(job, prompt, name, source, decoder) for prompt in range(len(job.prompts))]
    return outputs[0] if len(outputs) == 1 else _merge(outputs)


async def _of_prompt(
    job: Job, prompt: int, name: str, source: TokenSource, decoder: TextDecoder
) -> AsyncGenerator[Piece, None]:
    """The choices of one prompt; leaving early aborts them on the engine."""
    options = job.options
    n = options.params.n
    request = GenerateRequest(
        request_id=f"{name}-{prompt}",
        token_ids=job.prompts[prompt],
        params=options.params,
        namespace=CacheNamespace(tenant=job.tenant, salt=options.cache_salt),
        priority=options.priority,
    )
    texts = {
        sequence: OutputText(
            decoder.detokenizer(continues_text=not job.chat), options.stop, options.params.min_tokens
        )
        for sequence in range(n)
    }
    # EngineClient.generate is an async generator; closing it aborts the request.
    deltas = cast(AsyncGenerator[Delta, None], source.generate(request))
    async with aclosing(deltas):
        async for delta in deltas:
            output = texts.get(delta.sequence)
            if output is None:
                # A stop string has ended this sequence. The engine aborts requests, not single sequences: it
                # goes on with this one, unheard, until the others have ended, too.
                continue
            reason = delta.finish_reason
            if reason == "abort":
                raise GenerationError("the engine aborted this request; send it again")
            text = output.push(delta.token_ids, reason)
            if output.stopped:
                reason = "stop"
            yield Piece(prompt * n + delta.sequence, text, reason, output.num_tokens, delta.cached_tokens)
            if reason is not None:
                del texts[delta.sequence]
                if not texts:
                    return
    raise GenerationError("the engine ended this request without saying why")


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
