"""Bodies and stream chunks of OpenAI's completions and chat routes.

There is a chunk for every token, so the constant part of a response's chunks is encoded once.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii as encode_text
from typing import Any


@dataclass(slots=True)
class Usage:
    """Tokens of one response, in all choices; a prompt counts once, however many choices it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that the prefix cache supplied

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Output:
    """One finished output."""

    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that all bodies and chunks of one response share. ``created`` is in Unix seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str = ""

    def of(self, fingerprints: Collection[str]) -> Envelope:
        """With the fingerprint of the model that answers; of several prompts, different ones may."""
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


def completion_body(envelope: Envelope, outputs: list[Output], usage: Usage) -> dict[str, Any]:
    """Answer to ``POST /v1/completions``; choices in the order of the prompts, those of one prompt together."""
    choices = [
        {"index": i, "text": output.text, "logprobs": None, "finish_reason": output.finish_reason}
        for i, output in enumerate(outputs)
    ]
    return envelope.body("text_completion", choices, usage)


def chat_body(envelope: Envelope, outputs: list[Output], usage: Usage) -> dict[str, Any]:
    """Answer to ``POST /v1/chat/completions``."""
    choices = [
        {
            "index": i,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": None,
            "finish_reason": output.finish_reason,
        }
        for i, output in enumerate(outputs)
    ]
    return envelope.body("chat.completion", choices, usage)


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

    def role(self, index: int = 0) -> bytes:
        """The first chunk of a chat's choice ``index``."""
        delta = '{"role":"assistant","content":""}'
        choice = f'{{"index":{index},"delta":{delta},"logprobs":null,"finish_reason":null}}'
        return f"{self._head}{choice}]{self._null_usage}".encode()

    def text(self, index: int, text: str, finish_reason: str | None, usage: Usage) -> bytes:
        """The chunk for one delta of choice ``index``; ``usage`` is the usage so far."""
        quoted = encode_text(text)
        reason = "null" if finish_reason is None else f'"{finish_reason}"'
        if not self._chat:
            content = f'"text":{quoted}'
        elif text or finish_reason is None:
            content = f'"delta":{{"content":{quoted}}}'
        else:
            content = '"delta":{}'
        choice = f'{{"index":{index},{content},"logprobs":null,"finish_reason":{reason}}}]'
        tail = self._usage_tail(usage) if self._continuous_usage else self._null_usage
        return f"{self._head}{choice}{tail}".encode()

    def usage(self, usage: Usage) -> bytes:
        """The last chunk; empty without ``include_usage``."""
        return f"{self._head}]{self._usage_tail(usage)}".encode() if self._include_usage else b""

    def _usage_tail(self, usage: Usage) -> str:
        return f',"usage":{json.dumps(usage.to_dict(), separators=(",", ":"))}}}\n\n'
