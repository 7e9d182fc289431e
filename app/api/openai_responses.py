"""Bodies and stream chunks of OpenAI's completions and chat routes.

There is a chunk for every token, so the constant part of a response's chunks is encoded once.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii as encode_text
from typing import Any

from app.api.answers import Answer
from app.api.choices import GenerationJob, TextDelta, TokenDetails
from app.api.errors import ApiFault
from app.api.logprobs import TokenReport
from app.api.reply import encoded
from app.api.sse import DONE, error_event
from app.api.tools.parts import CallDelta
from app.api.usage import Usage
from engine.text import TextDecoder


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that all bodies and chunks of one response share. ``created`` is in Unix seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str = ""

    def of(self, fingerprints: Collection[str]) -> Envelope:
        """This envelope with the fingerprint of the model that answers; several prompts may have several."""
        return replace(self, system_fingerprint="+".join(sorted(fingerprints)))

    def body(self, kind: str, choices: list[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }
        if usage is not None:
            fields["usage"] = usage.to_dict()
        return fields


def completion_body(envelope: Envelope, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
    """Answer to ``POST /v1/completions``; choices in the order of the prompts, those of one prompt together."""
    choices = [
        {"index": i, "text": answer.text, "logprobs": None, "finish_reason": answer.finish_reason}
        for i, answer in enumerate(answers)
    ]
    return envelope.body("text_completion", choices, usage)


def chat_body(envelope: Envelope, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
    """Answer to ``POST /v1/chat/completions``."""
    choices = [
        {
            "index": i,
            "message": _message(answer),
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }
        for i, answer in enumerate(answers)
    ]
    return envelope.body("chat.completion", choices, usage)


def _message(answer: Answer) -> dict[str, Any]:
    content = answer.text
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content if content or not answer.calls else None,
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for call in answer.calls
        ]
    return message


class OpenAIReply:
    """Writes a response of the completions or the chat route."""

    def __init__(self, job: GenerationJob, envelope: Envelope, decoder: TextDecoder) -> None:
        self._job = job
        self._report = TokenReport(job, decoder) if job.detailed else None
        self._envelope = envelope
        self._writers: dict[str, ChunkWriter] = {}  # one, unless prompts are answered by different models
        self._begun = not job.chat

    def body(self, answers: Sequence[Answer], usage: Usage) -> bytes:
        envelope = self._envelope.of({answer.fingerprint for answer in answers})
        body = (chat_body if self._job.chat else completion_body)(envelope, answers, usage)
        if self._report is None:
            return encoded(body)
        for choice, answer in zip(body["choices"], answers, strict=True):
            choice.update(self._of_choice(choice["index"], answer.details))
        of_prompt = answers[0].details.prompt_logprobs
        if self._job.chat and self._job.options.output.prompt_logprobs is not None and of_prompt is not None:
            body["prompt_logprobs"] = self._report.of_prompt(0, of_prompt)
        # One by one: another thread can run after each, but not while one is encoded.
        choices = b", ".join([encoded(choice) for choice in body.pop("choices")])
        rest = encoded(body | self._of_prompt())
        return b"".join((rest.removesuffix(b"}"), b', "choices": [', choices, b"]}"))

    def _of_choice(self, index: int, details: TokenDetails) -> dict[str, Any]:
        assert self._report is not None
        return self._report.of_chat(details) if self._job.chat else self._report.of_completion(index, details)

    def _of_prompt(self) -> dict[str, Any]:
        """What a chat's response says of its prompt's tokens."""
        if not (self._job.chat and self._job.options.output.token_ids):
            return {}
        return {"prompt_token_ids": self._job.prompts[0]}

    def delta(self, delta: TextDelta, usage: Usage) -> bytes:
        writer = self._writers.get(delta.fingerprint)
        if writer is None:
            writer = self._writers[delta.fingerprint] = self._writer({delta.fingerprint})
        opening = b""
        if not self._begun:
            self._begun = True
            roles = range(self._job.options.params.n)
            opening = writer.role(0, self._of_prompt()) + b"".join(map(writer.role, roles[1:]))
        fields = None if delta.details is None else self._of_choice(delta.index, delta.details)
        return opening + writer.delta(delta, usage, fields)

    def end(self, usage: Usage) -> bytes:
        return self._writer(self._writers).usage(usage) + DONE

    def error(self, fault: ApiFault) -> bytes:
        return error_event(fault)

    def _writer(self, fingerprints: Collection[str]) -> ChunkWriter:
        return ChunkWriter(
            self._envelope.of(fingerprints),
            chat=self._job.chat,
            include_usage=self._job.options.include_usage,
            continuous_usage=self._job.options.continuous_usage,
        )


class ChunkWriter:
    """Server-sent events of one streamed response, as bytes.

    ``include_usage`` puts ``"usage": null`` in each chunk and a last chunk with the usage and no choices;
    ``continuous_usage`` puts the usage so far in each chunk.
    """

    def __init__(self, envelope: Envelope, *, chat: bool, include_usage: bool, continuous_usage: bool) -> None:
        self._chat = chat
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = json.dumps(envelope.body(kind, []), separators=(",", ":"))
        self._head = "data: " + head.removesuffix("]}")
        self._null_usage = ',"usage":null}\n\n' if include_usage else "}\n\n"
        self._rest = f',"logprobs":null,"finish_reason":null}}]{self._null_usage}'  # of nearly every chunk

    def role(self, index: int = 0, fields: dict[str, Any] | None = None) -> bytes:
        """The first chunk of a chat's choice ``index``, with more ``fields`` beside the choices."""
        delta = '{"role":"assistant","content":""}'
        choice = f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null}}'
        more = "".join(f",{_dumped({name: value})[1:-1]}" for name, value in (fields or {}).items())
        return f"{self._head}{choice}]{more}{self._null_usage}".encode()

    def delta(self, delta: TextDelta, usage: Usage, fields: dict[str, Any] | None = None) -> bytes:
        """The chunk for one delta; ``usage`` is the usage so far, ``fields`` what is known of its tokens."""
        content = f'"delta":{_chat_delta(delta)}' if self._chat else f'"text":{encode_text(delta.text)}'
        if fields is None and delta.finish_reason is None and not self._continuous_usage:
            return f'{self._head}{{"index":{delta.index},{content}{self._rest}'.encode()
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        known = '"logprobs":null' if fields is None else _dumped(fields)[1:-1]
        choice = f'{{"index":{delta.index},{content},{known},"finish_reason":{reason}}}]'
        tail = self._usage_tail(usage) if self._continuous_usage else self._null_usage
        return f"{self._head}{choice}{tail}".encode()

    def usage(self, usage: Usage) -> bytes:
        """The last chunk; empty without ``include_usage``."""
        return f"{self._head}]{self._usage_tail(usage)}".encode() if self._include_usage else b""

    def _usage_tail(self, usage: Usage) -> str:
        return f',"usage":{json.dumps(usage.to_dict(), separators=(",", ":"))}}}\n\n'


def _dumped(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _chat_delta(delta: TextDelta) -> str:
    """What a chunk of a chat adds to its message, as JSON."""
    if delta.call is not None:
        return f'{{"tool_calls":[{_call(delta.call)}]}}'
    if delta.reasoning:
        return f'{{"reasoning_content":{encode_text(delta.reasoning)}}}'
    if delta.text or delta.finish_reason is None:
        return f'{{"content":{encode_text(delta.text)}}}'
    return "{}"


def _call(call: CallDelta) -> str:
    arguments = encode_text(call.arguments)
    if not call.name:
        return f'{{"index":{call.index},"function":{{"arguments":{arguments}}}}}'
    function = f'{{"name":{encode_text(call.name)},"arguments":{arguments}}}'
    return f'{{"index":{call.index},"id":{encode_text(call.id)},"type":"function","function":{function}}}'
