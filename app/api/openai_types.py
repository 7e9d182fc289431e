"""Requests of OpenAI's completions and chat routes, checked by hand so that each error names its field.

A field that is ``null`` counts as absent. Fields that are not implemented are refused by name unless their
value means "off". Unknown fields are refused, too: ignoring one would change what the client gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from app.api import output_options
from app.api.chat_messages import ChatMessage, parse_messages
from app.api.errors import show
from app.api.json_fields import (
    boolean,
    check_metadata,
    integer,
    integers,
    name_hint,
    number,
    text,
    unknown,
    wrong,
)
from app.api.output_form import FORM_FIELDS, output_form
from app.api.output_options import DEFAULT_OUTPUT, DEFAULT_TEMPLATE, OutputOptions, TemplateOptions
from app.api.tools.answer_form import answer_form
from app.api.tools.tool_use import NO_TOOLS, ToolUse, parse_tool_use
from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
MAX_PROMPTS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_SALT_CHARS = 256
MAX_TOP_K = 2**31 - 1
MAX_PRIORITY = 1000

CHAT_ONLY = ("messages", "tools", "tool_choice", *output_options.CHAT_FIELDS)
"""Fields of the chat route alone."""

# fmt: off
KNOWN = frozenset({
    "model", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "ignore_eos", "stream", "stream_options", "user", "cache_salt",
    "n", "best_of", "use_beam_search", "beam_width", "length_penalty", "early_stopping", "priority",
    *FORM_FIELDS, *output_options.FIELDS,
    # Hints without effect on the answer:
    "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls",
    "reasoning_effort", "verbosity", "prediction", "prompt_cache_options", "prompt_cache_retention",
    "store",  # nothing is stored
})
# fmt: on
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")
OFF: dict[str, Callable[[Any], bool]] = {
    "echo": lambda v: v is False,  # on the chat route
    "suffix": lambda v: v == "",
    "top_logprobs": lambda v: v == 0,  # on the completions route
    "tools": lambda v: v == [],
    "tool_choice": lambda v: v in ("none", "auto"),
    "functions": lambda v: v == [],
    "function_call": lambda v: v in ("none", "auto"),
    "modalities": lambda v: v == ["text"],
    "audio": lambda v: v == {},
    "moderation": lambda v: v == {},
    "web_search_options": lambda v: v is False,
    "spaces_between_special_tokens": lambda v: v is True,
    "add_generation_prompt": lambda v: v is True,
    "continue_final_message": lambda v: v is False,
}


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options of both routes."""

    model: str | None
    params: SamplingParams
    stop: tuple[str, ...]
    cache_salt: str
    user: str  # as the client names it; empty if it does not
    priority: int  # lower runs first
    stream: bool
    include_usage: bool  # a last chunk with the usage
    continuous_usage: bool  # the usage so far in every chunk
    output: OutputOptions = DEFAULT_OUTPUT


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """``POST /v1/completions``; each prompt is text or token ids."""

    prompts: list[str | list[int]]
    options: GenerationOptions


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    options: GenerationOptions
    tools: ToolUse = NO_TOOLS
    template: TemplateOptions = DEFAULT_TEMPLATE


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Check ``body``; raises ``InvalidRequestError`` that names the field and what it must be."""
    fields = _known_fields(body, "prompt", *output_options.COMPLETION_FIELDS)
    options = _options(fields, COMPLETION_MAX_TOKENS, chat=False)
    request = CompletionRequest(_prompts(fields.get("prompt")), options)
    _check_width(len(request.prompts), request.options.params)
    return request


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Check ``body``; raises ``InvalidRequestError`` that names the field and what it must be."""
    fields = _known_fields(body, *CHAT_ONLY)
    messages, options = parse_messages(fields.get("messages")), _options(fields, None, chat=True)
    template = output_options.parse_template(fields)
    return with_tools(ChatRequest(messages, options, template=template), parse_tool_use(fields))


def with_tools(request: ChatRequest, use: ToolUse) -> ChatRequest:
    """``request`` with ``use``; where the answer must be calls, nothing else can be generated.

    Raises:
        InvalidRequestError: the form that calls need, or another, cannot be had.
    """
    params = request.options.params
    form = answer_form(use)
    if form is not None:
        params = replace(params, structured_output=form)
    elif use.tools and params.structured_output is not None:
        raise InvalidRequestError(
            "response_format cannot be combined with optional tools, because calls have their own form; set "
            "tool_choice to 'none' or 'required', or leave response_format out",
            "response_format",
        )
    return replace(request, options=replace(request.options, params=params), tools=use)


def _known_fields(body: dict[str, Any], *own: str) -> dict[str, Any]:
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name in own or name in KNOWN:
            continue
        means_off = OFF.get(name)
        if means_off is None:
            raise unknown(name, (*own, *KNOWN))
        if not means_off(value):
            raise InvalidRequestError(
                f"{name} is {show(value)} but is not supported; leave it out", name, "unsupported_parameter"
            )
    return fields


def _options(fields: dict[str, Any], default_max_tokens: int | None, *, chat: bool) -> GenerationOptions:
    output, edits = output_options.parse_output(fields), output_options.parse_edits(fields, chat)
    max_tokens = default_max_tokens
    for name in ("max_tokens", "max_completion_tokens"):  # the newer name wins
        if name in fields:
            max_tokens = integer(fields, name, 1 if edits["prompt_logprobs"] is None else 0)
    check_metadata(fields)
    stream = boolean(fields, "stream")
    stream_options = _stream_options(fields, stream)
    for name in ("model", "user", "cache_salt"):
        if name in fields:
            text(fields[name], name)
    salt = fields.get("cache_salt", "")
    if len(salt) > MAX_SALT_CHARS:
        raise InvalidRequestError(
            f"cache_salt has {len(salt)} characters but at most {MAX_SALT_CHARS} are allowed", "cache_salt"
        )
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=integer(fields, "min_tokens", 0) if "min_tokens" in fields else 0,
        temperature=number(fields, "temperature", 1.0),
        top_k=min(integer(fields, "top_k", -1), MAX_TOP_K) if "top_k" in fields else 0,
        top_p=number(fields, "top_p", 1.0),
        min_p=number(fields, "min_p", 0.0),
        seed=integer(fields, "seed", None) if "seed" in fields else None,
        stop_token_ids=tuple(integers(fields.get("stop_token_ids", []), "stop_token_ids")),
        ignore_eos=boolean(fields, "ignore_eos"),
        structured_output=output_form(fields),
        **_sequences(fields),
        **edits,
    )
    stop = _stops(fields.get("stop", []))
    if params.ranked:
        _check_ranked(params, stop, stream)
    return GenerationOptions(
        model=fields.get("model"),
        params=params,
        stop=stop,
        cache_salt=salt,
        user=fields.get("user", ""),
        priority=_priority(fields),
        stream=stream,
        include_usage=stream_options.get("include_usage", False),
        continuous_usage=stream_options.get("continuous_usage_stats", False),
        output=output,
    )


def _sequences(fields: dict[str, Any]) -> dict[str, Any]:
    """How many sequences to make of one prompt, and by which search."""
    n = integer(fields, "n", 1) if "n" in fields else 1
    best_of = integer(fields, "best_of", 1) if "best_of" in fields else n
    beams = boolean(fields, "use_beam_search")
    length_penalty = number(fields, "length_penalty", 1.0)
    early_stopping = fields.get("early_stopping", False)
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise wrong("early_stopping", early_stopping, 'true, false or "never"')
    for name, given in (
        ("length_penalty", length_penalty != 1),
        ("early_stopping", early_stopping is not False),
    ):
        if given and not beams:
            raise InvalidRequestError(
                f"{name} is {show(fields[name])} but use_beam_search is not true; set it, or leave {name} out",
                name,
            )
    return {
        "n": n,
        "best_of": best_of if best_of != n else None,  # as if it had not been given
        "use_beam_search": beams,
        "beam_width": integer(fields, "beam_width", 1) if "beam_width" in fields else None,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
    }


def _check_ranked(params: SamplingParams, stop: tuple[str, ...], stream: bool) -> None:
    """Results that are ranked exist at the end only, and beams are ranked by tokens, not text."""
    if params.use_beam_search:
        name, asked = "use_beam_search", "use_beam_search is true"
    else:
        name, asked = "best_of", f"best_of is {params.best_of} with n {params.n}"
    if stream:
        raise InvalidRequestError(
            f"{asked}, so the results to return are known only at the end, but stream is true; "
            f"set stream to false or leave {name} out",
            name,
        )
    if stop and params.use_beam_search:
        raise InvalidRequestError(
            f"stop has {len(stop)} entries but {asked}: beams are compared as tokens, before there is text in "
            "which to find stop strings; use stop_token_ids",
            "stop",
        )


def _check_width(prompts: int, params: SamplingParams) -> None:
    if prompts * params.width > MAX_PROMPTS:
        name = "beam_width" if params.beam_width is not None else "n" if params.best_of is None else "best_of"
        raise InvalidRequestError(
            f"prompt has {prompts} entries and {name} is {params.width}, together {prompts * params.width} "
            f"sequences, but at most {MAX_PROMPTS} are allowed",
            name,
        )


def _priority(fields: dict[str, Any]) -> int:
    if "priority" not in fields:
        return 0
    value = fields["priority"]
    if type(value) is not int or abs(value) > MAX_PRIORITY:
        raise wrong(
            "priority", value, f"an integer between {-MAX_PRIORITY} (runs first) and {MAX_PRIORITY} (runs last)"
        )
    return value


def _stream_options(fields: dict[str, Any], stream: bool) -> dict[str, bool]:
    options = fields.get("stream_options", {})
    if not isinstance(options, dict):
        raise wrong("stream_options", options, "an object")
    if options and not stream:
        raise InvalidRequestError("stream_options is only allowed with stream true", "stream_options")
    for name in options:
        if name not in STREAM_OPTIONS:
            raise InvalidRequestError(
                f"{show(name)} is not a known stream option{name_hint(name, STREAM_OPTIONS)}",
                "stream_options",
                "unknown_parameter",
            )
        options[name] = boolean(options, name, "stream_options.")
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
        return text(entry, name, "prompt")
    if isinstance(entry, list):
        return integers(entry, name, "prompt")
    raise wrong(name, entry, "a string or a list of token ids", "prompt")


def _stops(stop: object) -> tuple[str, ...]:
    entries = [stop] if isinstance(stop, str) else stop
    if not isinstance(entries, list):
        raise wrong("stop", stop, "a string or a list of strings")
    if len(entries) > MAX_STOPS:
        raise InvalidRequestError(
            f"stop has {len(entries)} entries but at most {MAX_STOPS} are allowed", "stop"
        )
    for i, entry in enumerate(entries):
        found = text(entry, f"stop[{i}]", "stop")
        if len(found) > MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"stop[{i}] has {len(found)} characters but at most {MAX_STOP_CHARS} are allowed", "stop"
            )
    return tuple(dict.fromkeys(filter(None, entries)))  # an empty one stops nothing
