"""Calls as Hermes and Qwen write them: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

from collections.abc import Collection

from app.api.tools import json_grammar
from app.api.tools.answer_text import AnswerGrammar, AnswerText, MalformedError, Reads

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def hermes(names: Collection[str]) -> AnswerGrammar:
    """Text with any number of calls in it; the end of the answer may stand for the last ``</tool_call>``."""

    def read(source: AnswerText) -> Reads[None]:
        while (yield from source.until(OPEN, source.content)):
            begin = source.at
            try:
                yield from source.space()
                call = yield from json_grammar.call_object(source, names)
                yield from source.space()
                if (yield from source.more()):
                    yield from source.expect(CLOSE)
            except MalformedError:
                source.content(OPEN)
                source.at = begin
            else:
                source.call(*call)

    return read
