"""Requests of ``POST /tokenize`` and ``POST /detokenize``, in the format of vLLM's routes of those names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.api.chat_messages import ChatMessage, parse_messages
from app.api.errors import show
from app.api.json_fields import boolean, integers, text, wrong
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
    fields = _fields(body, {"model", "prompt", "messages", "add_special_tokens", "return_token_strs"})
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
    fields = _fields(body, {"model", "tokens"})
    if "tokens" not in fields:
        raise wrong("tokens", None, "a list of token ids")
    return DetokenizeRequest(_model(fields), integers(fields["tokens"], "tokens"))


def _fields(body: dict[str, Any], known: set[str]) -> dict[str, Any]:
    for name in body:
        if name not in known:
            raise InvalidRequestError(f"{show(name)} is not a known parameter", name[:64], "unknown_parameter")
    return {name: value for name, value in body.items() if value is not None}


def _model(fields: dict[str, Any]) -> str | None:
    return text(fields["model"], "model") if "model" in fields else None
