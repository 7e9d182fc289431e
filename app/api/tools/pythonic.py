"""Calls as Python writes them: the answer is ``[name(key=value, …), …]`` with literals as values."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from app.api.tools import json_grammar
from app.api.tools.answer_text import AnswerGrammar, AnswerText, MalformedError, Reads

START = "<|python_start|>"
END = "<|python_end|>"
MARKERS = (START, END)

_KEY = re.compile(r"[A-Za-z0-9_]*")
_WORDS = {"T": ("True", "true"), "F": ("False", "false"), "N": ("None", "null")}
_PLAIN = {'"': re.compile(r'[^"\\\n]*'), "'": re.compile(r"[^'\\\n]*")}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "b": "\b", "f": "\f", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def pythonic(names: Collection[str]) -> AnswerGrammar:
    """A list of calls at the beginning of the answer, or after ``<|python_start|>``."""

    def read(source: AnswerText) -> Reads[None]:
        yield from _calls(source, names)
        while (yield from source.until(START, source.content)):
            if not (yield from _calls(source, names)):
                source.content(START)

    return read


def _calls(source: AnswerText, names: Collection[str]) -> Reads[bool]:
    """Whether there are calls; if not, nothing has been read."""
    begin = source.at
    calls: list[tuple[str, str]] = []
    try:
        yield from source.space()
        yield from source.take(START)
        yield from source.expect("[")
        while True:
            yield from source.space()
            calls.append((yield from _call(source, names)))
            yield from source.space()
            if (yield from source.take("]")):
                break
            yield from source.expect(",")
    except MalformedError:
        source.at = begin
        return False
    for call in calls:
        source.call(*call)
    end = source.at
    yield from source.space()
    if not (yield from source.take(END)):
        source.at = end
    return True


def _call(source: AnswerText, names: Collection[str]) -> Reads[tuple[str, str]]:
    name = yield from source.one_of(names)
    yield from source.expect("(")
    yield from source.space()
    arguments: dict[str, str] = {}
    while not (yield from source.take(")")):
        if arguments:
            yield from source.expect(",")
            yield from source.space()
            if (yield from source.take(")")):
                break
        key = yield from source.run(_KEY)
        if not key:
            raise MalformedError
        yield from source.space()
        yield from source.expect("=")
        yield from source.space()
        arguments[key] = yield from _value(source, 1)
        yield from source.space()
    return name, _object({json.dumps(key): text for key, text in arguments.items()})


def _value(source: AnswerText, depth: int) -> Reads[str]:
    """A literal, as JSON text."""
    if depth > json_grammar.MAX_DEPTH:
        raise MalformedError
    char = yield from source.peek()
    if char in ("[", "("):
        items = yield from _items(source, char, depth)
        return f"[{', '.join(items)}]"
    if char == "{":
        return _object((yield from _dictionary(source, depth)))
    if char in ('"', "'"):
        return json.dumps((yield from _string(source)), ensure_ascii=False)
    if char in _WORDS:
        yield from source.expect(_WORDS[char][0])
        return _WORDS[char][1]
    if char in ("t", "f", "n"):
        return (yield from json_grammar.value(source))
    return (yield from json_grammar.number(source))


def _items(source: AnswerText, opening: str, depth: int) -> Reads[list[str]]:
    """Of a list or tuple."""
    closing = "]" if opening == "[" else ")"
    yield from source.expect(opening)
    items: list[str] = []
    while True:
        yield from source.space()
        if (yield from source.take(closing)):
            return items
        if items:
            yield from source.expect(",")
            yield from source.space()
            if (yield from source.take(closing)):
                return items
        items.append((yield from _value(source, depth + 1)))


def _dictionary(source: AnswerText, depth: int) -> Reads[dict[str, str]]:
    """JSON texts of the keys and values."""
    yield from source.expect("{")
    found: dict[str, str] = {}
    while True:
        yield from source.space()
        if (yield from source.take("}")):
            return found
        if found:
            yield from source.expect(",")
            yield from source.space()
            if (yield from source.take("}")):
                return found
        key = json.dumps((yield from _string(source)), ensure_ascii=False)
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        found[key] = yield from _value(source, depth + 1)


def _string(source: AnswerText) -> Reads[str]:
    """What a string literal means."""
    quote = yield from source.peek()
    if quote not in _PLAIN:
        raise MalformedError
    source.at += 1
    pieces: list[str] = []
    while True:
        pieces.append((yield from source.run(_PLAIN[quote])))
        char = yield from source.peek()
        if char == quote:
            source.at += 1
            text = "".join(pieces)
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise MalformedError from error
            return text
        if char != "\\":
            raise MalformedError
        source.at += 1
        pieces.append((yield from _escaped(source)))


def _escaped(source: AnswerText) -> Reads[str]:
    char = yield from source.peek()
    source.at += len(char)
    if char in _HEX_DIGITS:
        digits = ""
        for _ in range(_HEX_DIGITS[char]):
            digit = yield from source.peek()
            source.at += len(digit)
            digits += digit
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError) as error:
            raise MalformedError from error
    if char == "\n":  # the literal goes on in the next line
        return ""
    return _ESCAPES.get(char, f"\\{char}")


def _object(members: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {text}" for key, text in members.items()) + "}"
