"""A model's chat template: messages to the text that the model was trained on.

The template comes with the model, so it is untrusted: it runs in Jinja's sandbox, which gives it no access to
Python's internals, with bounds of time and size. What it may call and how whitespace is trimmed is what
``transformers`` offers templates, so that both write the same text; without importing it, which takes seconds
and loads torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.utils import Namespace

from app.api.bounded_template import BoundedEnvironment, check_text_size
from engine.template_errors import TEMPLATE_ERRORS

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of what a message reasons before it answers; templates read the first or the second."""


_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Follows the last message where it is to be continued, to find its end in the text."""

RENDER_CPU_S = 1.0
"""Processor time for one rendering; the longest prompts take a tenth of it."""

OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


class ChatTemplate:
    """One model's template and the names of its special tokens, such as ``bos_token``.

    Used by any number of threads. It is compiled at its first use, so a model with a broken template can still
    complete text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        cpu_s: float = RENDER_CPU_S,
        gives_way: bool = False,
    ) -> str:
        """The text of a conversation, by default up to the beginning of the assistant's turn.

        ``messages`` and ``tools`` are plain JSON values; a message's keys whose value is ``None`` are left out.
        With ``continue_final_message`` the text ends with the content of the last message. ``variables`` are
        the template's own; none may have a name of ``OWN_VARIABLES`` or of a special token. With ``gives_way``
        it pauses now and then for other threads.

        Raises:
            TemplateTimeoutError: it has taken ``cpu_s`` of processor time; one of ``TEMPLATE_ERRORS``.
            TEMPLATE_ERRORS: the template is broken, refuses these messages, or does not expect such values.
        """
        turns = [_turn(message) for message in messages]
        if continue_final_message:
            turns[-1]["content"] = f"{turns[-1].get('content', '')}{_CONTINUED}"
        template = self._compiled
        self._environment.clock.start(cpu_s, gives_way)
        text = template.render(
            **self._special_tokens,
            **(variables or {}),
            messages=turns,
            tools=None if tools is None else list(tools),
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )
        return _before_mark(text) if continue_final_message else text

    def compile(self) -> None:
        """Compile now what the first message would wait for; a broken template fails then, not here."""
        with contextlib.suppress(*TEMPLATE_ERRORS):
            _ = self._compiled

    @cached_property
    def _compiled(self) -> Template:
        return self._environment.from_string(self.source)

    @cached_property
    def _environment(self) -> BoundedEnvironment:
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise, strftime_now=_now, dict=_Dictionary(), namespace=_Names
        )
        return environment


def _before_mark(text: str) -> str:
    """A text up to the mark in it; as ``transformers`` does, with the space that the template keeps there."""
    place = text.rfind(_CONTINUED.rstrip())
    if place < 0:
        raise TemplateError("its output does not contain the last message, so that cannot be continued")
    kept = text[place : place + len(_CONTINUED)] == _CONTINUED
    return text[:place] if kept else text[:place].rstrip()


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    turn = {key: value for key, value in message.items() if value is not None}
    reasoning = next((turn[name] for name in _REASONING if name in turn), None)
    return turn if reasoning is None else {"thinking": reasoning, **turn, "reasoning_content": reasoning}


class _Generation(Extension):
    """``{% generation %}``, by which templates mark what a model writes; the text inside is all that counts."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dictionary:
    """``dict`` in a template, without the attributes of a class."""

    def __call__(self, *values: Any, **more: Any) -> dict[Any, Any]:
        return dict(*values, **more)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        """See :meth:`dict.fromkeys`."""
        return dict.fromkeys(*values)


class _Names(Namespace):
    """``namespace`` in a template, without private attributes."""

    def __init__(*values: Any, **more: Any) -> None:
        self, *rest = values
        names = dict(*rest, **more)
        for name in names:
            _check(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not set {name!r}, which is private")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes characters of HTML, which models were not trained on."""
    check_text_size(value, indent)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
