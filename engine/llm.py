"""Offline generation: many prompts in, their results out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, InvalidRequestError, shown
from engine.models.folders import local_folder
from engine.request import CacheNamespace, FinishReason, Request, TokenDelta, check, check_text
from engine.sampling_params import SamplingParams
from engine.template_errors import TEMPLATE_ERRORS
from engine.text import OutputText, TextDecoder
from engine.token_logprobs import TokenLogprobs
from engine.tokenizer import has_tokenizer, load_tokenizer, reading_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompts = str | Sequence[str] | Sequence[Sequence[int]]

logger = logging.getLogger(__name__)

_PREFAULT_S = 1.0  # at most, at start: where the system is slow to map pages, prompts would wait for it instead
_BAR_FROM = 8  # prompts; fewer are done before a bar helps


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """One of the sequences that a request made."""

    token_ids: list[int]  # generated; the last one is the stop token if one ended the sequence
    text: str | None  # without special tokens and the stop token; None if the model folder has no tokenizer
    finish_reason: FinishReason
    score: float | None  # what ranked it, higher is better; None unless beam search or best_of did
    logprobs: list[TokenLogprobs] | None = None  # of each token, if asked for


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The result of one request. Its tokens, text and finish reason are those of its first sequence: the best
    one if they are ranked.

    A request that failed has an ``error``; its sequences that had not ended have the finish reason ``ERROR``
    and what they generated before.
    """

    prompt_token_ids: list[int]
    cached_tokens: int  # prompt tokens that the prefix cache supplied
    sequences: list[SequenceResult]  # as many as ``n`` asked for, unless the request failed
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # from the prompt's second token on, if asked for

    @property
    def token_ids(self) -> list[int]:
        return self.sequences[0].token_ids

    @property
    def text(self) -> str | None:
        return self.sequences[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.sequences[0].finish_reason


@dataclass(slots=True)
class _Collected:
    """What has arrived of one request's sequences, by number."""

    request: Request
    text_of: Callable[[], OutputText] | None = None  # makes what looks for stop strings in a sequence
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    last: dict[int, TokenDelta] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs] | None = None
    _texts: dict[int, OutputText] = field(default_factory=dict)
    _shown: dict[int, str] = field(default_factory=dict)

    def add(self, delta: TokenDelta) -> bool:
        """The next delta; true if all sequences have ended, some by stop strings."""
        number = delta.sequence
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = list(delta.prompt_logprobs)
        if number in self.last and self.text_of is not None:  # a stop string has ended it
            return False
        self.token_ids.setdefault(number, []).extend(delta.token_ids)
        self.logprobs.setdefault(number, []).extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            self.last[number] = delta
        if self.text_of is None:
            return False
        self._look(delta, self.text_of)
        return len(self.last) == self.request.params.n

    def _look(self, delta: TokenDelta, text_of: Callable[[], OutputText]) -> None:
        """Look for stop strings in what a delta adds."""
        number = delta.sequence
        if number not in self._texts:
            self._texts[number] = text_of()
        output = self._texts[number]
        self._shown[number] = self._shown.get(number, "") + output.push(delta.token_ids, delta.finish_reason)
        if output.stopped:
            del self.token_ids[number][output.num_tokens :]
            del self.logprobs[number][output.num_tokens :]
            self.last[number] = replace(delta, finish_reason=FinishReason.STOP)

    def text(self, number: int) -> str | None:
        """A sequence's text up to a stop string, if there are any to look for."""
        return self._shown.get(number, "") if self.text_of is not None else None


class LLM:
    """A model for offline use.

    ::

        llm = LLM("smollm2-135m-instruct", dtype="bfloat16")
        results = llm.generate(["Once upon a time"], SamplingParams(max_tokens=32, temperature=0))

    Args:
        model: a model folder, or a name that ``resolve`` knows.
        resolve: from a name to a folder; by default what is already on this machine (the bundled model
            after it was pulled, hub models in the Hugging Face cache).
        options: fields of :class:`EngineConfig`.

    Raises:
        ConfigError: the model cannot be loaded with these options.
    """

    def __init__(
        self, model: str | Path, *, resolve: Callable[[str], str | Path] = local_folder, **options: Any
    ) -> None:
        known = {option.name for option in fields(EngineConfig)} - {"model"}
        unknown = sorted(options.keys() - known)
        if unknown:
            raise ConfigError(
                f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}; options: "
                f"{', '.join(sorted(known))}"
            )
        self.folder = Path(resolve(str(model)))
        self.engine = Engine(EngineConfig(model=str(self.folder), **options), offline=True)
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._made = 0
        end = time.monotonic() + _PREFAULT_S
        while self.engine.prefault() and time.monotonic() < end:
            pass

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, loaded at first use."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.folder)
        return self._tokenizer

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        namespace: CacheNamespace | None = None,
        progress: bool | None = None,
    ) -> list[RequestResult]:
        """Complete every prompt; results come in the order of ``prompts``.

        A request whose computation fails ends with an ``error`` in its result, and the others continue: check
        ``error`` before using a result. A warning in the log says how many failed.

        Args:
            prompts: one text, texts, or lists or arrays of token ids. Texts are tokenized with special tokens,
                as the model's tokenizer adds them.
            params: for all prompts, or one for each.
            stop: texts that end a sequence. Its text ends before the stop text; its tokens include the one that
                completed it. With ``best_of``, the tokens up to it decide the rank. Not with beam search.
            namespace: of the prefix cache.
            progress: show a bar; ``None`` shows one for more than eight prompts.

        Raises:
            InvalidRequestError: a prompt can never run; nothing has run then.
            Exception: the engine itself failed; it must not be used any more.
        """
        return self._generate(prompts, params, stop, namespace, progress, continues_text=True)

    def _generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
        stop: str | Sequence[str],
        namespace: CacheNamespace | None,
        progress: bool | None,
        *,
        continues_text: bool,
    ) -> list[RequestResult]:
        """See :meth:`generate`. Where the output ``continues_text`` of its prompt, its first space is kept."""
        if not isinstance(stop, Iterable):
            raise InvalidRequestError(
                f"stop is {shown(stop)} but must be a string or a list of strings", "stop"
            )
        stops = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
        if wrong := [text for text in stops if not isinstance(text, str)]:
            raise InvalidRequestError(f"stop has {shown(wrong[0])} but its entries must be strings", "stop")
        requests = self._requests(prompts, params, CacheNamespace() if namespace is None else namespace)
        decodes = self._tokenizer is not None or has_tokenizer(self.folder)
        decoder = self._decoder if stops or (decodes and requests) else ""  # if it fails, nothing has run
        if not stops:
            collected = {request.request_id: _Collected(request) for request in requests}
        else:
            collected, wanted = {}, {request.request_id: request.params for request in requests}
            requests = [_ranked_later(request) for request in requests]
            if isinstance(decoder, str):
                raise ConfigError(decoder)
            for request in requests:
                text_of = partial(_output_text, decoder, continues_text, stops, request.params.min_tokens)
                collected[request.request_id] = _Collected(request, text_of)
        running = dict(collected)
        try:
            for request in requests:
                self.engine.add(request)
            self._run(running, len(requests) > _BAR_FROM if progress is None else progress)
        finally:
            for request_id in running:
                self.engine.abort(request_id)
        results = [self._result(each, continues_text, decodes) for each in collected.values()]
        if stops:
            results = [_ranked(result, wanted[name]) for name, result in zip(collected, results, strict=True)]
        failed = [result.error for result in results if result.error is not None]
        if failed:
            logger.warning("%d of %d requests failed, the first: %s", len(failed), len(results), failed[0])
        return results

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        namespace: CacheNamespace | None = None,
        progress: bool | None = None,
    ) -> list[RequestResult]:
        """Answer a conversation, or each of several, through the model's chat template.

        ``messages`` are dicts with ``role`` and ``content``. ``chat_template_kwargs`` are variables of the
        template, such as ``enable_thinking``. All else is as in :meth:`generate`.
        """
        if not isinstance(messages, list | tuple):
            raise InvalidRequestError(
                f"messages is {shown(messages)} but must be a list of messages or of conversations", "messages"
            )
        several = bool(messages) and not isinstance(messages[0], dict)
        prompts: list[list[int]] = []
        for place, chat in enumerate(messages if several else [messages]):
            try:
                rendered = self.tokenizer.apply_chat_template(
                    list(chat),
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt and not continue_final_message,
                    continue_final_message=continue_final_message,
                    **(chat_template_kwargs or {}),
                )
            except TEMPLATE_ERRORS as error:
                raise InvalidRequestError(
                    f"the chat template rejects messages[{place}]: {error}", "messages", "chat_template_error"
                ) from error
            text = str(rendered)
            check_text(f"messages[{place}]" if several else "messages", text, "messages")
            with reading_text("text"):
                prompts.append(self.tokenizer.encode(text, add_special_tokens=False))
        return self._generate(prompts, params, stop, namespace, progress, continues_text=continue_final_message)

    def _run(self, running: dict[str, _Collected], progress: bool) -> None:
        """Step until each request has ended, which takes it out of ``running``."""
        made, started = 0, time.perf_counter()
        bar = tqdm(total=len(running), unit="request", disable=not progress)
        with bar, self.engine.many_steps():
            while running:
                for delta in self.engine.step():
                    made += len(delta.token_ids)
                    if delta.request_id not in running:  # stop strings have ended it
                        continue
                    collected = running[delta.request_id]
                    stopped = collected.add(delta)
                    if not (delta.final or stopped):
                        if delta.finish_reason is None and delta.sequence in collected.last:
                            self.engine.end_sequence(delta.request_id, delta.sequence)
                        continue
                    del running[delta.request_id]
                    if not delta.final:
                        self.engine.abort(delta.request_id)
                    rate = made / (time.perf_counter() - started)
                    bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                    bar.update()

    def _requests(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
        namespace: CacheNamespace,
    ) -> list[Request]:
        listed = _listed(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(listed)
        elif isinstance(params, list | tuple):
            each = list(params)
        else:
            raise InvalidRequestError(
                f"params is {shown(params)} but must be SamplingParams, or a list of them", "params"
            )
        if len(each) != len(listed):
            raise InvalidRequestError(f"{len(listed)} prompts came with {len(each)} sampling params", "params")
        requests: list[Request] = []
        arrival = time.monotonic()
        for place, (prompt, chosen) in enumerate(zip(listed, each, strict=True)):
            # zero-padded, since equal arrivals are ordered by id
            name = f"offline-{self._made + place:09d}"
            requests.append(Request(name, self._token_ids(prompt, place), chosen, namespace, arrival=arrival))
            try:
                check(requests[-1], self.engine.limits)
                if chosen.structured_output is not None:
                    grammar = self.engine.grammars.compile(chosen.structured_output)
                    requests[-1] = replace(requests[-1], grammar=grammar)
            except InvalidRequestError as error:
                where = f"prompts[{place}]: " if len(listed) > 1 else ""
                raise InvalidRequestError(f"{where}{error.message}", error.param, error.code) from None
        self._made += len(requests)
        return requests

    def _token_ids(self, prompt: object, place: int) -> list[int]:
        """A prompt's token ids; whether the model has them is checked later."""
        if isinstance(prompt, str):
            check_text(f"prompts[{place}]", prompt, "prompt")
            with reading_text("text"):
                ids: list[int] = self.tokenizer.encode(prompt)
                return ids
        if hasattr(prompt, "tolist"):  # an array or a tensor
            prompt = prompt.tolist()
        if not isinstance(prompt, list | tuple | range):
            raise InvalidRequestError(
                f"prompts[{place}] is {shown(prompt)} but must be a string or a list of token ids; write "
                "[[5, 6, 7]] for one prompt of three tokens",
                "prompt",
            )
        # NumPy's integers become Python's; what is no integer stays, to be refused.
        return [int(t) if isinstance(t, Integral) and not isinstance(t, bool) else t for t in prompt]

    @cached_property
    def _decoder(self) -> TextDecoder | str:
        """What makes text token by token, or why there is none for tokenizers of this kind."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return f"the tokenizer in {self.folder} has no fast form, which stop strings need"
        try:
            return TextDecoder(backend)
        except ConfigError as error:
            return str(error)

    def _text(self, made: list[int], reason: FinishReason, continues_text: bool) -> str:
        """A sequence's text, the same as if there were stop strings to look for."""
        decoder = self._decoder
        if isinstance(decoder, str):
            shown = made[:-1] if reason is FinishReason.STOP else made
            with reading_text("tokens"):
                return str(self.tokenizer.decode(shown, skip_special_tokens=True))
        return _output_text(decoder, continues_text, (), 0).push(made, reason)

    def _result(self, collected: _Collected, continues_text: bool, decodes: bool) -> RequestResult:
        request, last = collected.request, collected.last
        sequences = []
        for number in sorted(last):
            made = collected.token_ids[number]
            reason = last[number].finish_reason
            assert reason is not None
            text = collected.text(number)
            if text is None and decodes:
                text = self._text(made, reason, continues_text)
            logprobs = collected.logprobs.get(number) if request.params.logprobs is not None else None
            sequences.append(SequenceResult(made, text, reason, last[number].score, logprobs))
        error = next((delta.error for delta in last.values() if delta.error is not None), None)
        return RequestResult(
            request.token_ids, last[min(last)].cached_tokens, sequences, error, collected.prompt_logprobs
        )


def _output_text(
    decoder: TextDecoder, continues_text: bool, stops: Sequence[str], min_tokens: int
) -> OutputText:
    return OutputText(decoder.detokenizer(continues_text=continues_text), stops, min_tokens)


def _ranked_later(request: Request) -> Request:
    """The request with all ``best_of`` sequences returned: where stop strings cut them decides their rank."""
    params = request.params
    if params.use_beam_search:
        raise InvalidRequestError("stop is given but use_beam_search is true; use stop_token_ids", "stop")
    if not params.ranked:
        return request
    every = replace(params, n=params.width, best_of=None, logprobs=params.logprobs or 0)
    return replace(request, params=every)


def _ranked(result: RequestResult, params: SamplingParams) -> RequestResult:
    """The best ``n`` sequences, as ``params`` asked for them, by the mean log probability of their tokens."""
    if not params.ranked or result.error is not None:
        return result
    scored = []
    for sequence in result.sequences:
        values = [score.logprob for score in sequence.logprobs or ()]
        known = sequence.logprobs if params.logprobs is not None else None
        scored.append(replace(sequence, score=sum(values) / max(len(values), 1), logprobs=known))
    scored.sort(key=lambda sequence: -(sequence.score or 0.0))
    return replace(result, sequences=scored[: params.n])


def _listed(prompts: object) -> list[object]:
    """The prompts one by one."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):  # an array or a tensor, of one prompt a row
        prompts = prompts.tolist()
    if isinstance(prompts, str | bytes | dict) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts is {shown(prompts)} but must be a string, a list of strings, or a list of token-id lists",
            "prompt",
        )
    return list(prompts)
