"""Log probabilities and token ids of a response, in OpenAI's and vLLM's formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.api.choices import GenerationJob, TokenDetails
from engine.text import TextDecoder
from engine.token_logprobs import TokenLogprobs

LEAST = -9999.0
"""Stands for minus infinity, which JSON has not."""


class TokenReport:
    """What one response says of its tokens; keeps the place in each choice's text."""

    def __init__(self, job: GenerationJob, decoder: TextDecoder) -> None:
        self._job = job
        self._decoder = decoder
        self._lengths = [0] * job.num_choices  # characters of each choice's text so far
        self._offsets = [decoder.detokenizer(continues_text=True) for _ in range(job.num_choices)]

    def of_completion(self, index: int, details: TokenDetails) -> dict[str, Any]:
        """Fields of a choice of the completions route; its deltas in their order, or all of them as one."""
        output, params = self._job.options.output, self._job.options.params
        fields: dict[str, Any] = {"logprobs": None}
        prompt = self._job.prompts[index // params.n]
        of_prompt = details.prompt_logprobs
        if params.logprobs is not None:
            tokens, scores = list(details.token_ids), list(details.logprobs)
            known: list[TokenLogprobs | None] = [*scores]
            if output.echo and of_prompt is not None:
                tokens, known = prompt + tokens, [None, *of_prompt, *scores]
            fields["logprobs"] = self._legacy(index, tokens, known, params.logprobs)
        if output.prompt_logprobs is not None and of_prompt is not None:
            fields["prompt_logprobs"] = self.of_prompt(index // params.n, of_prompt)
        if output.token_ids:
            fields["token_ids"] = details.token_ids
            if details.first:
                fields["prompt_token_ids"] = prompt
        return fields

    def of_chat(self, details: TokenDetails) -> dict[str, Any]:
        """Fields of a choice of the chat route."""
        options = self._job.options
        fields: dict[str, Any] = {"logprobs": None}
        if options.params.logprobs is not None:
            fields["logprobs"] = {"content": self.of_tokens(details), "refusal": None}
        if options.output.token_ids:
            fields["token_ids"] = details.token_ids
        return fields

    def of_tokens(self, details: TokenDetails) -> list[dict[str, Any]]:
        """An entry for each token of a chat's answer."""
        return [
            {
                **self._token(token, score.logprob),
                "top_logprobs": [
                    self._token(other, value)
                    for other, value in zip(score.top_ids, score.top_logprobs, strict=True)
                ],
            }
            for token, score in zip(details.token_ids, details.logprobs, strict=True)
        ]

    def of_prompt(self, prompt: int, scores: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
        """vLLM's ``prompt_logprobs``: by token id, the prompt's own token and the likeliest ones."""
        most = self._job.options.output.prompt_logprobs or 0
        found: list[dict[str, Any] | None] = [None]
        for token, score in zip(self._job.prompts[prompt][1:], scores, strict=True):
            entries = {token: (score.logprob, score.rank)}
            tops = zip(score.top_ids[:most], score.top_logprobs, strict=False)
            for rank, (other, value) in enumerate(tops, 1):
                entries.setdefault(other, (value, rank))
            found.append(
                {
                    str(other): {
                        "logprob": max(value, LEAST),
                        "rank": rank,
                        "decoded_token": self._text(other),
                    }
                    for other, (value, rank) in entries.items()
                }
            )
        return found

    def _legacy(
        self, index: int, tokens: Sequence[int], scores: Sequence[TokenLogprobs | None], most: int
    ) -> dict[str, Any]:
        """The completions route's own format: four lists, one entry for each token."""
        names = [self._name(token) for token in tokens]
        tops: list[dict[str, float] | None] = []
        for name, score in zip(names, scores, strict=True):
            if score is None:
                tops.append(None)
                continue
            top = zip(score.top_ids[:most], score.top_logprobs, strict=False)
            tops.append({self._name(other): max(value, LEAST) for other, value in top})
            tops[-1][name] = max(score.logprob, LEAST)  # type: ignore[index]
        offsets, detokenizer = [], self._offsets[index]
        for token in tokens:
            offsets.append(self._lengths[index])
            self._lengths[index] += len(detokenizer.push(token))
        return {
            "tokens": names,
            "token_logprobs": [None if score is None else max(score.logprob, LEAST) for score in scores],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._decoder.bytes_of(token)
        name = piece.decode("utf-8", "backslashreplace")
        return {"token": name, "logprob": max(logprob, LEAST), "bytes": list(piece)}

    def _name(self, token: int) -> str:
        """A token's text; of one that has a part of a character only, its bytes, as OpenAI writes them."""
        piece = self._decoder.bytes_of(token)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def _text(self, token: int) -> str:
        return self._decoder.bytes_of(token).decode("utf-8", "replace")
