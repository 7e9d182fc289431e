"""Offline generation: many prompts in, their results out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, InvalidRequestError, shown
from engine.models.folders import local_folder
from engine.request import CacheNamespace, FinishReason, Request, TokenDelta, check
from engine.sampling_params import SamplingParams
from engine.tokenizer import has_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompts = str | Sequence[str] | Sequence[Sequence[int]]

logger = logging.getLogger(__name__)

_BAR_FROM = 8  # prompts; fewer are done before a bar helps


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """One of the sequences that a request made."""

    token_ids: list[int]  # generated; the last one is the stop token if one ended the sequence
    text: str | None  # without special tokens; None if the model folder has no tokenizer
    finish_reason: FinishReason
    score: float | None  # what ranked it, higher is better; None unless beam search or best_of did


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The whole of one request. What it says of tokens, text and finish is its first sequence's: the best one,
    where they are ranked.

    A request that failed has an ``error``; its sequences that had not ended have the finish reason ``ERROR``
    and what they generated before.
    """

    prompt_token_ids: list[int]
    cached_tokens: int  # prompt tokens that the prefix cache supplied
    sequences: list[SequenceResult]  # as many as ``n`` asked for, unless the request failed
    error: str | None = None

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
    """What has come of one request's sequences, by number."""

    request: Request
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    last: dict[int, TokenDelta] = field(default_factory=dict)

    def add(self, delta: TokenDelta) -> None:
        self.token_ids.setdefault(delta.sequence, []).extend(delta.token_ids)
        if delta.finish_reason is not None:
            self.last[delta.sequence] = delta


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
        namespace: CacheNamespace | None = None,
        progress: bool | None = None,
    ) -> list[RequestResult]:
        """Complete every prompt; results come in the order of ``prompts``.

        A request whose computation fails ends with an ``error`` in its result, and the others go on: look at
        ``error`` before using a result. A warning in the log says how many failed.

        Args:
            prompts: one text, texts, or lists or arrays of token ids. Texts are tokenized with special tokens,
                as the model's tokenizer adds them.
            params: for all prompts, or one for each.
            namespace: of the prefix cache.
            progress: show a bar; ``None`` shows one for more than eight prompts.

        Raises:
            InvalidRequestError: a prompt can never run; nothing has run then.
            Exception: the engine itself failed; it must not be used any more.
        """
        requests = self._requests(prompts, params, CacheNamespace() if namespace is None else namespace)
        collected = {request.request_id: _Collected(request) for request in requests}
        running = dict(collected)
        try:
            for request in requests:
                self.engine.add(request)
            self._run(running, len(requests) > _BAR_FROM if progress is None else progress)
        finally:
            for request_id in running:
                self.engine.abort(request_id)
        results = [self._result(each) for each in collected.values()]
        failed = [result.error for result in results if result.error is not None]
        if failed:
            logger.warning("%d of %d requests failed, the first: %s", len(failed), len(results), failed[0])
        return results

    def _run(self, running: dict[str, _Collected], progress: bool) -> None:
        """Step until each request has ended, which takes it out of ``running``."""
        made, started = 0, time.perf_counter()
        with tqdm(total=len(running), unit="request", disable=not progress) as bar:
            while running:
                for delta in self.engine.step():
                    made += len(delta.token_ids)
                    running[delta.request_id].add(delta)
                    if not delta.final:
                        continue
                    del running[delta.request_id]
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
            ids: list[int] = self.tokenizer.encode(prompt)
            return ids
        if hasattr(prompt, "tolist"):  # an array or a tensor
            prompt = prompt.tolist()
        if not isinstance(prompt, list | tuple | range):
            raise InvalidRequestError(
                f"prompts[{place}] is {shown(prompt)} but must be a text or a list of token ids; write "
                "[[5, 6, 7]] for one prompt of three tokens",
                "prompt",
            )
        # NumPy's integers become Python's; what is no integer stays, to be refused.
        return [int(t) if isinstance(t, Integral) and not isinstance(t, bool) else t for t in prompt]

    def _result(self, collected: _Collected) -> RequestResult:
        request, last = collected.request, collected.last
        decodes = self._tokenizer is not None or has_tokenizer(self.folder)
        sequences = []
        for number in sorted(last):
            made = collected.token_ids[number]
            text = self.tokenizer.decode(made, skip_special_tokens=True) if decodes else None
            reason = last[number].finish_reason
            assert reason is not None
            sequences.append(SequenceResult(made, text, reason, last[number].score))
        error = next((delta.error for delta in last.values() if delta.error is not None), None)
        return RequestResult(request.token_ids, last[min(last)].cached_tokens, sequences, error)


def _listed(prompts: object) -> list[object]:
    """The prompts one by one."""
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):  # an array or a tensor, of one prompt a row
        prompts = prompts.tolist()
    if isinstance(prompts, str | bytes | dict) or not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts is {shown(prompts)} but must be a text, a list of texts, or a list of token-id lists",
            "prompt",
        )
    return list(prompts)
