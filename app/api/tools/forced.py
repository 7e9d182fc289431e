"""Calls that ``tool_choice`` forces: the whole answer is JSON that structured output holds to a schema."""

from __future__ import annotations

from collections.abc import Collection

from app.api.tools import json_grammar
from app.api.tools.answer_text import AnswerGrammar, AnswerText, MalformedError, Reads


def named(name: str) -> AnswerGrammar:
    """The answer is the arguments of the tool ``name``."""

    def read(source: AnswerText) -> Reads[None]:
        begin = source.at
        yield from source.space()
        if not (yield from source.take("{")):
            source.at = begin
            return
        source.at -= 1
        source.begin_call(name)
        yield from _arguments(source)
        yield from source.space()

    return read


def required(names: Collection[str]) -> AnswerGrammar:
    """The answer is a list of objects with ``name`` and then ``arguments``."""

    def read(source: AnswerText) -> Reads[None]:
        begin = source.at
        try:
            yield from source.space()
            yield from source.expect("[")
            while True:
                yield from _call(source, names)
                yield from source.space()
                if (yield from source.take("]")):
                    yield from source.space()
                    return
                yield from source.expect(",")
        except MalformedError:  # cut short
            if source.num_calls:  # before the next call's arguments: that is no content
                yield from source.rest(lambda _: None)
            else:
                source.at = begin

    return read


def _call(source: AnswerText, names: Collection[str]) -> Reads[None]:
    yield from source.space()
    yield from source.expect("{")
    yield from _key(source, "name")
    name = json_grammar.called_name((yield from json_grammar.value(source)), names)
    yield from source.space()
    yield from source.expect(",")
    yield from _key(source, "arguments")
    if (yield from source.peek()) != "{":
        raise MalformedError
    source.begin_call(name)
    yield from _arguments(source)
    yield from source.space()
    yield from source.expect("}")


def _key(source: AnswerText, name: str) -> Reads[None]:
    yield from source.space()
    yield from source.expect(f'"{name}"')
    yield from source.space()
    yield from source.expect(":")
    yield from source.space()


def _arguments(source: AnswerText) -> Reads[None]:
    """An object, given piece by piece; if it is cut short, as far as it goes."""
    given = source.at
    reading = json_grammar.members(source)
    while True:
        try:
            next(reading)
        except StopIteration:
            return
        except MalformedError:  # cut short within a word, such as "true"
            break
        finally:
            source.arguments(source.text[given : source.at])
            given = source.at
        yield
    yield from source.rest(source.arguments)
