"""JSON as a grammar over text that arrives: what is no JSON is known at its first wrong character."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from app.api.tools.answer_text import AnswerText, MalformedError, Reads

MAX_DEPTH = 64
"""Lists and objects inside one another; deeper ones count as malformed."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]*')
_HEX = re.compile(r"[0-9a-fA-F]*")
_NUMBER_CHARS = re.compile(r"[-+0-9.eE]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


def value(source: AnswerText, depth: int = 0) -> Reads[str]:
    """The text of one value.

    Raises:
        MalformedError: there is none.
    """
    begin = source.at
    char = yield from source.peek()
    if char == "{":
        yield from members(source, depth)
    elif char == "[":
        yield from _list(source, depth + 1)
    elif char == '"':
        yield from string(source)
    elif char in ("t", "f", "n"):
        yield from source.expect({"t": "true", "f": "false", "n": "null"}[char])
    else:
        yield from number(source)
    return source.text[begin : source.at]


def number(source: AnswerText) -> Reads[str]:
    """The text of a number; raises as :func:`value` does."""
    found = yield from source.run(_NUMBER_CHARS)
    if _NUMBER.fullmatch(found) is None:
        raise MalformedError
    return found


def members(
    source: AnswerText, depth: int = 0, check: Callable[[str, str], object] | None = None
) -> Reads[dict[str, str]]:
    """The members of an object, each with the text of its value; raises as :func:`value` and ``check`` do."""
    found: dict[str, str] = {}
    if depth >= MAX_DEPTH:
        raise MalformedError
    yield from source.expect("{")
    yield from source.space()
    if (yield from source.take("}")):
        return found
    while True:
        key = yield from string(source)
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        name = json.loads(key)
        found[name] = yield from value(source, depth + 1)
        if check is not None:
            check(name, found[name])
        yield from source.space()
        if (yield from source.take("}")):
            return found
        yield from source.expect(",")
        yield from source.space()


def string(source: AnswerText) -> Reads[str]:
    """The text of a string, quotes included; raises as :func:`value` does."""
    begin = source.at
    yield from source.expect('"')
    while True:
        yield from source.run(_PLAIN)
        char = yield from source.peek()
        source.at += len(char)
        if char == '"':
            return source.text[begin : source.at]
        if char != "\\":
            source.at -= len(char)
            raise MalformedError
        escaped = yield from source.peek()
        if not escaped or escaped not in '"\\/bfnrtu':
            raise MalformedError
        source.at += 1
        if escaped == "u":
            for _ in range(4):
                if _HEX.fullmatch((yield from source.peek()) or "?") is None:
                    raise MalformedError
                source.at += 1


def call_object(source: AnswerText, names: Collection[str]) -> Reads[tuple[str, str]]:
    """Name and arguments of a call that is an object with these members.

    Raises:
        MalformedError: it is not, or names a tool that is not in ``names``.
    """

    def check(key: str, text: str) -> None:
        if key == "name":
            called_name(text, names)

    found = yield from members(source, check=check)
    return called_name(found.get("name"), names), call_arguments(found)


def called_name(text: str | None, names: Collection[str]) -> str:
    """The name that the JSON ``text`` gives; raises as :func:`call_object` does."""
    name = json.loads(text) if text is not None and text.startswith('"') else None
    if name not in names:
        raise MalformedError
    return str(name)


def call_arguments(found: dict[str, str]) -> str:
    """The arguments among the members of a call: an object, or a string with the text of one."""
    text = found.get("arguments", found.get("parameters", "{}"))
    if text.startswith('"'):
        text = json.loads(text).strip()
        if not is_object(text):
            raise MalformedError
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise MalformedError
    return text


def is_object(text: str) -> bool:
    """Whether ``text`` is one JSON object and nothing else."""
    source = AnswerText()
    source.text, source.ended = text, True
    try:
        for _ in members(source):
            raise AssertionError("it has all the text")
    except MalformedError:
        return False
    return source.at == len(text)


def _list(source: AnswerText, depth: int) -> Reads[None]:
    if depth > MAX_DEPTH:
        raise MalformedError
    yield from source.expect("[")
    yield from source.space()
    if (yield from source.take("]")):
        return
    while True:
        yield from value(source, depth)
        yield from source.space()
        if (yield from source.take("]")):
            return
        yield from source.expect(",")
        yield from source.space()
