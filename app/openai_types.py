"""The requests of OpenAI's completions and chat routes, checked by hand so that each error names its field.

Fields that are ``null`` count as absent. What is not implemented is refused by name, unless its value
means "off"; an unknown field is refused too, since ignoring one would change what its sender gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.errors import show
from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_SALT_CHARS = 256
MAX_TOP_K = 2**31 - 1

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# fmt: off
_KNOWN = frozenset({
    "model", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "stream", "stream_options", "user", "cache_salt",
    # Hints that ask nothing of the answer:
    "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls",
    "reasoning_effort", "verbosity",
})
# fmt: on
_OFF: dict[str, Callable[[Any], bool]] = {
    "n": lambda v: v == 1 and v is not True,
    "best_of": lambda v: v == 1 and v is not True,
    "echo": lambda v: v is False,
    "suffix": lambda v: v == "",
    "logprobs": lambda v: v is False,
    "top_logprobs": lambda v: v == 0,
    "prompt_logprobs": lambda v: v is False,
    "logit_bias": lambda v: v == {},
    "presence_penalty": lambda v: v == 0,
    "frequency_penalty": lambda v: v == 0,
    "repetition_penalty": lambda v: v == 1,
    "length_penalty": lambda v: v == 1,
    "use_beam_search": lambda v: v is False,
    "tools": lambda v: v == [],
    "tool_choice": lambda v: v in ("none", "auto"),
    "functions": lambda v: v == [],
    "function_call": lambda v: v in ("none", "auto"),
    "response_format": lambda v: v == {"type": "text"},
    "modalities": lambda v: v == ["text"],
    "store": lambda v: v is False,
    "include_stop_str_in_output": lambda v: v is False,
    "skip_special_tokens": lambda v: v is True,
    "spaces_between_special_tokens": lambda v: v is True,
    "add_generation_prompt": lambda v: v is True,
    "continue_final_message": lambda v: v is False,
}


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What both routes share."""

    model: str | None
    params: SamplingParams
    stop: tuple[str, ...]
    cache_salt: str
    stream: bool
    include_usage: bool  # a last chunk with the usage
    continuous_usage: bool  # the usage so far in every chunk


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """``POST /v1/completions``; each prompt is text or token ids."""

    prompts: list[str | list[int]]
    options: GenerationOptions


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message; a list of text parts has been joined by newlines."""

    role: str  # system, user or assistant
    content: str


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    options: GenerationOptions


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Check ``body``; raises ``InvalidRequestError`` that names the field and what it must be."""
    fields = _known_fields(body, "prompt")
    return CompletionRequest(_prompts(fields.get("prompt")), _options(fields, COMPLETION_MAX_TOKENS))


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Check ``body``; raises ``InvalidRequestError`` that names the field and what it must be."""
    fields = _known_fields(body, "messages")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list of at least 1")
    return ChatRequest([_message(message, i) for i, message in enumerate(messages)], _options(fields, None))


def _known_fields(body: dict[str, Any], own: str) -> dict[str, Any]:
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name == own or name in _KNOWN:
            continue
        means_off = _OFF.get(name)
        if means_off is None:
            raise InvalidRequestError(f"{show(name)} is not a known parameter", name[:64], "unknown_parameter")
        if not means_off(value):
            raise InvalidRequestError(
                f"{name} is {show(value)} but is not supported; leave it out", name, "unsupported_parameter"
            )
    return fields


def _options(fields: dict[str, Any], default_max_tokens: int | None) -> GenerationOptions:
    max_tokens = default_max_tokens
    for name in ("max_tokens", "max_completion_tokens"):  # the newer name wins
        if name in fields:
            max_tokens = _integer(fields, name, 1)
    stream = _boolean(fields, "stream")
    stream_options = _stream_options(fields, stream)
    for name in ("model", "user", "cache_salt"):
        if name in fields:
            _text(fields[name], name)
    salt = fields.get("cache_salt", "")
    if len(salt) > MAX_SALT_CHARS:
        raise InvalidRequestError(
            f"cache_salt has {len(salt)} characters but at most {MAX_SALT_CHARS} are allowed", "cache_salt"
        )
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=_integer(fields, "min_tokens", 0) if "min_tokens" in fields else 0,
        temperature=_number(fields, "temperature", 1.0),
        top_k=min(_integer(fields, "top_k", 0), MAX_TOP_K) if "top_k" in fields else 0,
        top_p=_number(fields, "top_p", 1.0),
        min_p=_number(fields, "min_p", 0.0),
        seed=_integer(fields, "seed", None) if "seed" in fields else None,
        stop_token_ids=tuple(_integers(fields.get("stop_token_ids", []), "stop_token_ids")),
        ignore_eos=_boolean(fields, "ignore_eos"),
    )
    return GenerationOptions(
        model=fields.get("model"),
        params=params,
        stop=_stops(fields.get("stop", [])),
        cache_salt=salt,
        stream=stream,
        include_usage=stream_options.get("include_usage", False),
        continuous_usage=stream_options.get("continuous_usage_stats", False),
    )


def _stream_options(fields: dict[str, Any], stream: bool) -> dict[str, bool]:
    options = fields.get("stream_options", {})
    if not isinstance(options, dict):
        raise _wrong("stream_options", options, "an object")
    if options and not stream:
        raise InvalidRequestError("stream_options is only allowed with stream true", "stream_options")
    for name in options:
        if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            raise InvalidRequestError(
                f"{show(name)} is not a known stream option", "stream_options", "unknown_parameter"
            )
        options[name] = _boolean(options, name, "stream_options.")
    if options.get("include_obfuscation"):
        raise InvalidRequestError(
            "stream_options.include_obfuscation is not supported; leave it out",
            "stream_options.include_obfuscation",
            "unsupported_parameter",
        )
    return options


def _prompts(prompt: object) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [_prompt(prompt, "prompt")]
    if isinstance(prompt, list) and prompt:
        if type(prompt[0]) is int:
            return [_prompt(prompt, "prompt")]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequestError(
                f"prompt has {len(prompt)} entries but at most {MAX_PROMPTS} are allowed", "prompt"
            )
        return [_prompt(entry, f"prompt[{i}]") for i, entry in enumerate(prompt)]
    if prompt is None or prompt == []:
        raise InvalidRequestError(
            "prompt is missing or empty; at least 1 token is needed", "prompt", "empty_prompt"
        )
    raise InvalidRequestError(
        f"prompt is {show(prompt)} but must be a string, a list of strings, a list of token ids or a list of "
        "such lists",
        "prompt",
    )


def _prompt(entry: object, name: str) -> str | list[int]:
    if isinstance(entry, str | list) and not entry:
        raise InvalidRequestError(f"{name} is empty; at least 1 token is needed", "prompt", "empty_prompt")
    if isinstance(entry, str):
        return _text(entry, name, "prompt")
    if isinstance(entry, list):
        return _integers(entry, name, "prompt")
    raise _wrong(name, entry, "a string or a list of token ids", "prompt")


def _message(message: object, index: int) -> ChatMessage:
    name = f"messages[{index}]"
    if not isinstance(message, dict):
        raise _wrong(name, message, "an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{name}.role", role, f"one of {', '.join(ROLES)}")
    for key, value in message.items():
        if key not in ("role", "content", "name") and value not in (None, [], ""):
            raise InvalidRequestError(
                f"{name}.{key[:64]} is not supported", f"{name}.{key[:64]}", "unsupported_parameter"
            )
    if message.get("name") is not None:
        _text(message["name"], f"{name}.name")
    return ChatMessage(ROLES[role], _content(message.get("content"), f"{name}.content"))


def _content(content: object, name: str) -> str:
    if isinstance(content, str):
        return _text(content, name)
    if not isinstance(content, list) or not content:
        raise _wrong(name, content, "a string or a list of text parts")
    texts: list[str] = []
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequestError(
                f"{name}[{i}] is {show(kind)} but only parts of type 'text' are supported", name
            )
        texts.append(_text(part.get("text"), f"{name}[{i}].text"))
    return "\n".join(texts)


def _stops(stop: object) -> tuple[str, ...]:
    entries = [stop] if isinstance(stop, str) else stop
    if not isinstance(entries, list):
        raise _wrong("stop", stop, "a string or a list of strings")
    if len(entries) > MAX_STOPS:
        raise InvalidRequestError(
            f"stop has {len(entries)} entries but at most {MAX_STOPS} are allowed", "stop"
        )
    for i, entry in enumerate(entries):
        text = _text(entry, f"stop[{i}]", "stop")
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"stop[{i}] has {len(text)} characters but must have 1 to {MAX_STOP_CHARS}", "stop"
            )
    return tuple(dict.fromkeys(entries))


def _text(value: object, name: str, param: str | None = None) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a string", param)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} has half of a surrogate pair at character {error.start}, which is no text", param or name
        ) from error
    return value


def _integers(value: object, name: str, param: str | None = None) -> list[int]:
    if not isinstance(value, list):
        raise _wrong(name, value, "a list of token ids", param)
    if set(map(type, value)) - {int}:
        i = next(i for i, entry in enumerate(value) if type(entry) is not int)
        raise _wrong(f"{name}[{i}]", value[i], "a token id", param or name)
    return value


def _integer(fields: dict[str, Any], name: str, low: int | None) -> int:
    value = fields[name]
    if type(value) is not int or (low is not None and value < low):
        bound = "" if low is None else f", at least {low}"
        raise _wrong(name, value, f"an integer{bound}")
    return value


def _number(fields: dict[str, Any], name: str, default: float) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, value, "a number")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidRequestError(f"{name} is too large a number", name) from error


def _boolean(fields: dict[str, Any], name: str, prefix: str = "") -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(f"{prefix}{name}", value, "true or false")
    return bool(value)


def _wrong(name: str, value: object, must_be: str, param: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {show(value)} but must be {must_be}", param or name)
