"""Requests of ``POST /tokenize`` and ``POST /detokenize``, in the format of vLLM's routes of those names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.api.chat_messages import ChatMessage, parse_messages
from app.api.json_fields import boolean, integers, known_fields, text, wrong
from engine.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """Either ``prompt`` or ``messages``; the latter go through the chat template."""

    model: str | None
    prompt: str | None
    messages: list[ChatMessage]
    add_special_tokens: bool  # of a prompt
    token_strings: bool  # return each token's text as well


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """Token ids, whose range the tokenizer checks."""

    model: str | None
    tokens: list[int]


def parse_tokenize(body: dict[str, Any]) -> TokenizeRequest:
    """Check ``body``; raises ``InvalidRequestError`` that names the field and what it must be."""
    fields = known_fields(body, {"model", "prompt", "messages", "add_special_tokens", "return_token_strs"})
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidRequestError("give either prompt or messages", "prompt")
    prompt = text(fields["prompt"], "prompt") if "prompt" in fields else None
    return TokenizeRequest(
        _model(fields),
        prompt,
        parse_messages(fields["messages"]) if prompt is None else [],
        boolean({"add_special_tokens": True, **fields}, "add_special_tokens"),
        boolean(fields, "return_token_strs"),
    )


def parse_detokenize(body: dict[str, Any]) -> DetokenizeRequest:
    """Check ``body``; raises ``InvalidRequestError`` that names the field and what it must be."""
    fields = known_fields(body, {"model", "tokens"})
    if "tokens" not in fields:
        raise wrong("tokens", None, "a list of token ids")
    return DetokenizeRequest(_model(fields), integers(fields["tokens"], "tokens"))


def _model(fields: dict[str, Any]) -> str | None:
    return text(fields["model"], "model") if "model" in fields else None
