"""Calls as Llama 3 writes them: the answer is ``{"name": …, "parameters": {…}}``, or several with ``;``."""

from __future__ import annotations

from collections.abc import Collection

from app.api.tools import json_grammar
from app.api.tools.answer_text import AnswerGrammar, AnswerText, MalformedError, Reads

TAG = "<|python_tag|>"


def llama3_json(names: Collection[str]) -> AnswerGrammar:
    """Calls at the beginning of the answer, or after ``<|python_tag|>``."""

    def read(source: AnswerText) -> Reads[None]:
        yield from _calls(source, names)
        while (yield from source.until(TAG, source.content)):
            if not (yield from _calls(source, names)):
                source.content(TAG)

    return read


def _calls(source: AnswerText, names: Collection[str]) -> Reads[bool]:
    """Whether there is a call at least. Leaves ``source`` behind the last."""
    found = False
    while True:
        begin = source.at
        try:
            if found:
                yield from source.space()
                yield from source.expect(";")
            yield from source.space()
            call = yield from json_grammar.call_object(source, names)
        except MalformedError:
            source.at = begin
            return found
        found = True
        source.call(*call)
