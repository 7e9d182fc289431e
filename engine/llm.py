"""Offline generation: many prompts in, their results out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import InvalidRequestError, QuireError
from engine.models.folders import local_folder
from engine.request import CacheNamespace, FinishReason, Request, validate
from engine.sampling_params import SamplingParams
from engine.tokenizer import has_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompts = str | Sequence[str] | Sequence[Sequence[int]]

_BAR_FROM = 8  # prompts; fewer are done before a bar helps


@dataclass(frozen=True, slots=True)
class RequestResult:
    """The whole of one request."""

    prompt_token_ids: list[int]
    token_ids: list[int]  # generated; the last one is the stop token if one ended the request
    text: str | None  # without special tokens; None if the model folder has no tokenizer
    finish_reason: FinishReason
    cached_tokens: int  # prompt tokens that the prefix cache supplied


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

        Args:
            prompts: one text, texts, or lists of token ids. Texts are tokenized with special tokens, as
                the model's tokenizer adds them.
            params: for all prompts, or one for each.
            namespace: of the prefix cache.
            progress: show a bar; ``None`` shows one for more than eight prompts.

        Raises:
            InvalidRequestError: a prompt can never run; nothing has run then.
            QuireError: a request failed while it ran.
        """
        requests = self._requests(prompts, params, namespace or CacheNamespace())
        finished: dict[str, Request] = {}
        try:
            for request in requests:
                self.engine.add(request)
            self._run(requests, finished, len(requests) > _BAR_FROM if progress is None else progress)
        finally:
            for request in requests:
                if request.request_id not in finished:
                    self.engine.abort(request.request_id)
        return [self._result(request) for request in requests]

    def _run(self, requests: list[Request], finished: dict[str, Request], progress: bool) -> None:
        by_id = {request.request_id: request for request in requests}
        made, started = 0, time.perf_counter()
        with tqdm(total=len(requests), unit="request", disable=not progress) as bar:
            while len(finished) < len(requests):
                for delta in self.engine.step():
                    made += len(delta.token_ids)
                    if delta.finish_reason is None:
                        continue
                    finished[delta.request_id] = by_id[delta.request_id]
                    if delta.finish_reason is FinishReason.ERROR:
                        raise QuireError(delta.error or "a request failed")
                    rate = made / (time.perf_counter() - started)
                    bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                    bar.update()

    def _requests(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None,
        namespace: CacheNamespace,
    ) -> list[Request]:
        listed: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        each = [params or SamplingParams()] * len(listed) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(listed):
            raise InvalidRequestError(f"{len(listed)} prompts came with {len(each)} sampling params", "params")
        requests: list[Request] = []
        arrival = time.monotonic()
        for prompt, chosen in zip(listed, each, strict=True):
            token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            validate(token_ids, chosen, self.engine.limits)
            # zero-padded, since equal arrivals are ordered by id
            name = f"offline-{self._made + len(requests):09d}"
            requests.append(Request(name, token_ids, chosen, namespace, arrival=arrival))
        self._made += len(requests)
        return requests

    def _result(self, request: Request) -> RequestResult:
        prompt = request.token_ids[: request.num_prompt_tokens]
        made = request.token_ids[request.num_prompt_tokens :]
        text: str | None = None
        if self._tokenizer is not None or has_tokenizer(self.folder):
            text = self.tokenizer.decode(made, skip_special_tokens=True)
        assert request.finish_reason is not None
        return RequestResult(prompt, made, text, request.finish_reason, request.cached_tokens or 0)
