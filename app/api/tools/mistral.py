"""Calls as Mistral's models write them: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or, the newer ones,
``[TOOL_CALLS]name[ARGS]{…}`` for each."""

from __future__ import annotations

import re
from collections.abc import Collection

from app.api.tools import json_grammar
from app.api.tools.answer_text import AnswerGrammar, AnswerText, MalformedError, Reads

OPEN = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"
MARKERS = (OPEN, ARGUMENTS, CALL_ID)

_ID = re.compile(r"[A-Za-z0-9]*")


def mistral(names: Collection[str]) -> AnswerGrammar:
    """Text with any number of calls, or lists of calls, in it."""

    def read(source: AnswerText) -> Reads[None]:
        while (yield from source.until(OPEN, source.content)):
            begin = source.at
            try:
                yield from source.space()
                if (yield from source.take("[")):
                    calls = yield from _list(source, names)
                else:
                    calls = [(yield from _named(source, names))]
            except MalformedError:
                source.content(OPEN)
                source.at = begin
            else:
                for call in calls:
                    source.call(*call)

    return read


def _list(source: AnswerText, names: Collection[str]) -> Reads[list[tuple[str, str]]]:
    calls: list[tuple[str, str]] = []
    while True:
        yield from source.space()
        calls.append((yield from json_grammar.call_object(source, names)))
        yield from source.space()
        if (yield from source.take("]")):
            return calls
        yield from source.expect(",")


def _named(source: AnswerText, names: Collection[str]) -> Reads[tuple[str, str]]:
    name = yield from source.one_of(names)
    if (yield from source.take(CALL_ID)):
        yield from source.run(_ID)
    yield from source.take(ARGUMENTS)
    yield from source.space()
    begin = source.at
    yield from json_grammar.members(source)
    return name, source.text[begin : source.at]
