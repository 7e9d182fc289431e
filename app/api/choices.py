"""The choices of one response: tokens of all prompts and sequences become text as they arrive."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from app.api.caller import Caller
from app.api.openai_types import GenerationOptions
from app.api.tools.answer_text import AnswerParser
from app.api.tools.parts import CallDelta, Part
from app.fleet.fleet_limits import FleetLimits
from app.fleet.generation import Delta, GenerateRequest, GenerationError
from app.fleet.journal import Journal
from engine.request import CacheNamespace
from engine.text import OutputText, TextDecoder
from engine.token_logprobs import TokenLogprobs


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
    """Makes the parser of one choice's text; with ``None``, all text is content."""
    markers: tuple[str, ...] = ()
    """Special tokens that count as text."""
    checked: FleetLimits | None = None
    """The limits by which it has been found valid."""
    echoes: tuple[str, ...] = ()
    """The text of each prompt, if the choices begin with it."""
    journals: list[Journal] = field(default_factory=list)
    """What happens to each prompt, from the moment that its choices are requested."""
    drawn: Counter[int] = field(default_factory=Counter)
    """Tokens of each sequence so far, by its number, where more are drawn than are choices and the text decides
    which of them become choices."""
    repeats: int = 0
    """How many times the last events of a stream contain its whole output again."""
    continues: bool = False
    """Whether the output continues the prompt's text: its first space is kept."""

    def engine_request_id(self, prompt: int) -> str:
        """The request's ID; with several prompts, also which of them it is."""
        name = self.caller.request_id
        return name if len(self.prompts) == 1 else f"{name}-{prompt}"

    @property
    def num_choices(self) -> int:
        """Choices are numbered prompt by prompt."""
        return len(self.prompts) * self.options.params.n

    @property
    def detailed(self) -> bool:
        """Whether the response has details of single tokens."""
        params, output = self.options.params, self.options.output
        return params.logprobs is not None or params.prompt_logprobs is not None or output.token_ids

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(map(len, self.prompts))


class DirectSend(Protocol):
    """The direct path of text to the client."""

    def ready(self) -> bool:
        """Whether it can be called now."""

    def __call__(self, delta: TextDelta) -> None:
        """Send this delta."""


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """The tokens of one delta, and what is known of each if it was asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of the prompt from its second token on
    first: bool = False  # of its choice; only the first one has those of the prompt


@dataclass(slots=True)
class TextDelta:
    """New text of choice ``index``, and totals so far: tokens of the choice, cached tokens of its prompt.

    If answers are parsed, ``text`` is content, and only one of ``text``, ``reasoning``, and ``call`` is set.
    ``fingerprint`` is that of the model that generates the choice. Nothing changes it;
    ``frozen`` would make construction expensive.
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
    details: TokenDetails | None = None
    """If the job is ``detailed``."""


def stream_choices(
    job: GenerationJob, source: TokenGenerator, decoder: TextDecoder, take: DirectSend | None = None
) -> AsyncGenerator[TextDelta, None]:
    """The text of all choices as it arrives. Closing the generator aborts the rest.

    While the reader waits, ``take`` may take deltas in the middle of a choice, which are then not yielded; its
    errors end the generator.

    Raises:
        GenerationError, UnavailableError, InvalidRequestError: of one prompt; it ends the others, too.
    """
    params = job.options.params
    # The engine ranks by tokens; if stop strings may cut them, the text decides which tokens count.
    make = _best_of_prompt if job.options.stop and params.best_of is not None else _of_prompt
    # The deltas of several prompts wait to be merged; a direct one would overtake them.
    if len(job.prompts) == 1 and make is _of_prompt:
        return _of_prompt(job, 0, source, decoder, take)
    outputs = [make(job, prompt, source, decoder) for prompt in range(len(job.prompts))]
    return outputs[0] if len(outputs) == 1 else _merge(outputs)


async def _of_prompt(
    job: GenerationJob,
    prompt: int,
    source: TokenGenerator,
    decoder: TextDecoder,
    take: DirectSend | None = None,
) -> AsyncGenerator[TextDelta, None]:
    """The choices of one prompt; closing the generator aborts them on the engine."""
    options = job.options
    n = options.params.n
    parsers = [job.answer_parser() for _ in range(n)]

    def take_middle(delta: Delta) -> bool:
        """What the loop below does with a delta that neither begins nor ends anything."""
        output = texts.get(delta.sequence)
        if take is None or output is None or delta.finish_reason is not None or not take.ready():
            return False
        text = output.push(delta.token_ids, None)
        index, tokens = prompt * n + delta.sequence, output.num_tokens
        take(TextDelta(index, text, None, tokens, delta.cached_tokens, delta.fingerprint))
        return True

    # Text that a stop string or a parser may end, and what is known of tokens, goes the long way.
    plain = not (options.stop or job.echoes or job.detailed or any(parser is not None for parser in parsers))
    request = GenerateRequest(
        request_id=job.engine_request_id(prompt),
        token_ids=job.prompts[prompt],
        params=options.params,
        namespace=CacheNamespace(tenant=job.caller.tenant, salt=options.cache_salt),
        priority=options.priority,
        client=job.caller.client,
        sender=job.caller.sender,
        checked=job.checked,
        take=take_middle if plain and take is not None else None,
    )
    job.journals.append(request.journal)
    shown = job.markers if options.output.skip_special_tokens else decoder.special_names
    texts = {
        sequence: OutputText(
            decoder.detokenizer(continues_text=job.continues or not job.chat, shown=shown),
            options.stop,
            options.params.min_tokens,
            options.output.include_stop,
        )
        for sequence in range(n)
    }
    echo = job.echoes[prompt] if job.echoes else ""
    unbegun = set(texts) if echo or job.detailed else set()
    detailed = job.detailed
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    ended_tokens = 0
    # EngineClient.generate is an async generator; closing it aborts the request.
    deltas = cast(AsyncGenerator[Delta, None], source.generate(request))
    async with aclosing(deltas):
        async for delta in deltas:
            output = texts.get(delta.sequence)
            if output is None:
                continue  # a stop string has ended this sequence, which the engine may not know yet
            reason = delta.finish_reason
            if reason == "abort":
                raise GenerationError("the engine aborted this request; send it again")
            before = output.num_tokens
            text = output.push(delta.token_ids, reason)
            stop = output.stop
            if stop is not None:
                reason = "stop"
            details = None
            first = delta.sequence in unbegun
            if first:
                unbegun.remove(delta.sequence)
                text = echo + text
            if detailed:
                if delta.prompt_logprobs is not None:
                    prompt_logprobs = delta.prompt_logprobs
                count = output.num_tokens - before
                details = TokenDetails(
                    delta.token_ids[:count],
                    (delta.logprobs or ())[:count],
                    prompt_logprobs if first else None,
                    first,
                )
            whole = TextDelta(
                prompt * n + delta.sequence,
                text,
                reason,
                output.num_tokens,
                delta.cached_tokens,
                delta.fingerprint,
                "",
                None,
                stop,
                details,
            )
            parser = parsers[delta.sequence]
            if parser is None:
                yield whole
            else:
                for part in _parts(whole, parser):
                    yield part
                    reason = part.finish_reason
            if reason is not None:
                ended_tokens += output.num_tokens
                del texts[delta.sequence]
                if texts:
                    if delta.finish_reason is None:
                        request.text_end.on_sequence_end(delta.sequence)
                else:
                    request.text_end.tokens = ended_tokens
                    return
    raise GenerationError("the engine ended this request without a reason")


async def _best_of_prompt(
    job: GenerationJob, prompt: int, source: TokenGenerator, decoder: TextDecoder
) -> AsyncGenerator[TextDelta, None]:
    """The best choices of one prompt, at the end: by the mean log probability of tokens to a stop string."""
    params = job.options.params
    wide = replace(params, n=params.width, best_of=None, logprobs=params.logprobs or 0)
    every = replace(job, options=replace(job.options, params=wide))
    made: list[list[TextDelta]] = [[] for _ in range(wide.n)]
    async with aclosing(_of_prompt(every, prompt, source, decoder)) as arriving:
        async for delta in arriving:
            made[delta.index - prompt * wide.n].append(delta)
            job.drawn[delta.index] = delta.num_tokens
    for rank, deltas in enumerate(sorted(made, key=_mean_logprob, reverse=True)[: params.n]):
        for delta in deltas:
            details = delta.details if job.detailed else None
            yield replace(delta, index=prompt * params.n + rank, details=details)


def _mean_logprob(deltas: Sequence[TextDelta]) -> float:
    scores = [score.logprob for delta in deltas if delta.details for score in delta.details.logprobs]
    return sum(scores) / max(len(scores), 1)


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
    if delta.details is not None:
        deltas[1:] = [replace(part, details=None) for part in deltas[1:]]
    deltas[-1] = replace(deltas[-1], finish_reason=reason)
    return deltas


async def _merge(sources: Sequence[AsyncGenerator[TextDelta, None]]) -> AsyncGenerator[TextDelta, None]:
    """The text deltas of all ``sources`` as they arrive; an error in one ends all.

    Of each source one waits here at most, on average; the rest waits where tokens are joined.
    """
    queue: asyncio.Queue[TextDelta | Exception | None] = asyncio.Queue(len(sources))

    async def drain(source: AsyncGenerator[TextDelta, None]) -> None:
        try:
            async with aclosing(source):
                async for piece in source:
                    await queue.put(piece)
            await queue.put(None)
        except Exception as error:  # noqa: BLE001 - raised again by the reader
            await queue.put(error)

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
