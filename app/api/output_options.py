"""What a request asks of its output's form, and of its tokens: log probabilities, ids, bias and penalties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.api.errors import show
from app.api.json_fields import boolean, integer, integers, number, text, wrong
from engine.errors import InvalidRequestError
from engine.sampling_params import MAX_BIAS_ENTRIES, MAX_LOGPROBS

MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64
MAX_TEMPLATE_OPTIONS = 32
MAX_TEMPLATE_OPTION_CHARS = 1024

FIELDS = frozenset(
    {
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
        *("allowed_token_ids", "logprobs", "prompt_logprobs", "include_stop_str_in_output"),
        *("skip_special_tokens", "return_token_ids", "truncate_prompt_tokens"),
    }
)
"""Fields of both routes that are read here."""

COMPLETION_FIELDS = ("echo",)
CHAT_FIELDS = ("top_logprobs", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How the output is shown, and what is returned with it."""

    bad_words: tuple[str, ...] = ()  # the tokenizer makes tokens of them
    echo: bool = False  # the text begins with the prompt
    prompt_logprobs: int | None = None  # of the response's field of this name
    include_stop: bool = False  # the text ends with what stopped it
    skip_special_tokens: bool = True
    token_ids: bool = False  # of prompt and output
    keep_last: int | None = None  # tokens of the prompt; -1: as many as fit


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How messages become a prompt; ``variables`` are the template's own."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: tuple[tuple[str, str | int | float | bool | None], ...] = ()


DEFAULT_OUTPUT = OutputOptions()
DEFAULT_TEMPLATE = TemplateOptions()


def parse_output(fields: dict[str, Any]) -> OutputOptions:
    """The options among ``fields``; raises ``InvalidRequestError`` that names the field and what it must be."""
    keep_last = None
    if "truncate_prompt_tokens" in fields:
        keep_last = integer(fields, "truncate_prompt_tokens", -1)
        if keep_last == 0:
            raise wrong("truncate_prompt_tokens", 0, "an integer of at least 1, or -1 for as many as fit")
    asked = _count(fields, "prompt_logprobs")
    if asked is not None and fields.get("stream"):
        raise InvalidRequestError(
            "prompt_logprobs is given but stream is true; only whole responses have them", "prompt_logprobs"
        )
    return OutputOptions(
        bad_words=_bad_words(fields.get("bad_words", [])),
        echo=boolean(fields, "echo"),
        prompt_logprobs=asked,
        include_stop=boolean(fields, "include_stop_str_in_output"),
        skip_special_tokens=boolean({"skip_special_tokens": True, **fields}, "skip_special_tokens"),
        token_ids=boolean(fields, "return_token_ids"),
        keep_last=keep_last,
    )


def parse_edits(fields: dict[str, Any], chat: bool) -> dict[str, Any]:
    """Parse the options that are ``SamplingParams``, except ``bad_words``; raises like :func:`parse_output`."""
    logprobs = _chat_logprobs(fields) if chat else _count(fields, "logprobs")
    of_prompt = [count for count in (_count(fields, "prompt_logprobs"),) if count is not None]
    none_wanted = 0 in (fields.get("max_tokens"), fields.get("max_completion_tokens"))
    if boolean(fields, "echo") and (logprobs is not None or none_wanted):
        of_prompt.append(logprobs or 0)
    allowed = fields.get("allowed_token_ids")
    return {
        "presence_penalty": number(fields, "presence_penalty", 0.0),
        "frequency_penalty": number(fields, "frequency_penalty", 0.0),
        "repetition_penalty": number(fields, "repetition_penalty", 1.0),
        "logit_bias": _bias(fields.get("logit_bias", {})),
        "allowed_token_ids": None if allowed is None else tuple(integers(allowed, "allowed_token_ids")),
        "logprobs": logprobs,
        "prompt_logprobs": max(of_prompt, default=None),
    }


def parse_template(fields: dict[str, Any]) -> TemplateOptions:
    """The options of the chat template; raises as :func:`parse_output`."""
    continues = boolean(fields, "continue_final_message")
    begins = boolean({"add_generation_prompt": not continues, **fields}, "add_generation_prompt")
    if continues and begins:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt are both true, but an answer can only do one: "
            "continue the last message, or begin a new one",
            "continue_final_message",
        )
    return TemplateOptions(begins, continues, _variables(fields.get("chat_template_kwargs", {})))


def _count(fields: dict[str, Any], name: str) -> int | None:
    """How many likely tokens to return at each place; ``false`` is off."""
    value = fields.get(name)
    if value is None or value is False:
        return None
    if type(value) is not int or not 0 <= value <= MAX_LOGPROBS:
        raise wrong(name, value, f"an integer between 0 and {MAX_LOGPROBS}")
    return value


def _chat_logprobs(fields: dict[str, Any]) -> int | None:
    asked = fields.get("logprobs", False)
    if asked != 0 and asked is not True:  # 0 is what some clients send for "off"
        raise wrong("logprobs", asked, "true or false; top_logprobs says how many")
    top = _count(fields, "top_logprobs")
    if asked is True:
        return top or 0
    if top:
        raise InvalidRequestError(
            f"top_logprobs is {top} but logprobs is not true; set it, or leave top_logprobs out", "top_logprobs"
        )
    return None


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise wrong("logit_bias", value, "an object of token ids and numbers")
    if len(value) > MAX_BIAS_ENTRIES:
        raise InvalidRequestError(
            f"logit_bias has {len(value)} entries but at most {MAX_BIAS_ENTRIES} are allowed", "logit_bias"
        )
    found = {}
    for token in value:
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise InvalidRequestError(
                f"logit_bias has the key {show(token)} but keys must be token ids", "logit_bias"
            )
        found[int(token)] = number({"logit_bias": value[token]}, "logit_bias", 0.0)
    return found


def _bad_words(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise wrong("bad_words", value, "a list of strings")
    if len(value) > MAX_BAD_WORDS:
        raise InvalidRequestError(
            f"bad_words has {len(value)} entries but at most {MAX_BAD_WORDS} are allowed", "bad_words"
        )
    for i, word in enumerate(value):
        if not 1 <= len(text(word, f"bad_words[{i}]", "bad_words")) <= MAX_BAD_WORD_CHARS:
            raise InvalidRequestError(
                f"bad_words[{i}] has {len(word)} characters but must have 1 to {MAX_BAD_WORD_CHARS}",
                "bad_words",
            )
    return tuple(dict.fromkeys(value))


def _variables(value: object) -> tuple[tuple[str, str | int | float | bool | None], ...]:
    name = "chat_template_kwargs"
    if not isinstance(value, dict):
        raise wrong(name, value, "an object")
    if len(value) > MAX_TEMPLATE_OPTIONS:
        raise InvalidRequestError(
            f"{name} has {len(value)} entries but at most {MAX_TEMPLATE_OPTIONS} are allowed", name
        )
    for key, entry in value.items():
        if not key.isidentifier() or len(key) > MAX_TEMPLATE_OPTION_CHARS:
            raise InvalidRequestError(f"{name} has {show(key)}, which is not a variable name", name)
        if not isinstance(entry, str | int | float | None):
            raise wrong(f"{name}.{key[:64]}", entry, "a string, a number, true, false, or null", name)
        if isinstance(entry, str) and len(text(entry, f"{name}.{key[:64]}", name)) > MAX_TEMPLATE_OPTION_CHARS:
            raise InvalidRequestError(
                f"{name}.{key[:64]} has {len(entry)} characters but at most {MAX_TEMPLATE_OPTION_CHARS} are "
                "allowed",
                name,
            )
    return tuple(value.items())
