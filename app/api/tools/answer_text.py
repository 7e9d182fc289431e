"""A model's text while it arrives, read by grammars that are written as if all of it were there.

A grammar is a generator: it yields where it needs more text and goes on when there is more, so it reads every
character once, however the text is split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeAlias, TypeVar

from app.api.tools.parts import CallDelta, Part, new_call_id

T = TypeVar("T")
Reads: TypeAlias = Generator[None, None, T]
"""Reads from an :class:`AnswerText` and returns a ``T``; yields where it needs more text."""

_SPACE = re.compile(r"\s*")


class MalformedError(Exception):
    """The text is not what the grammar expects; ``AnswerText.at`` is where."""


class AnswerText:
    """The text of one answer, and the parts that a grammar has made of it.

    White space before and after calls belongs to nothing: what ends the content is held back until more content
    follows, and dropped if a call does.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0  # what precedes has been read
        self.ended = False
        self.parts: list[Part] = []
        self.num_calls = 0
        self._space = ""  # held back

    def more(self) -> Reads[bool]:
        """Whether there is a character at ``at``."""
        while self.at >= len(self.text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Reads[str]:
        """The character at ``at``; empty at the end."""
        found = yield from self.more()
        return self.text[self.at] if found else ""

    def run(self, pattern: re.Pattern[str]) -> Reads[str]:
        """The longest run of characters that ``pattern`` matches; it must match any part of such a run."""
        begin = self.at
        while (yield from self.more()):
            match = pattern.match(self.text, self.at)
            if match is None or match.end() == self.at:
                break
            self.at = match.end()
            if self.at < len(self.text):
                break
        return self.text[begin : self.at]

    def space(self) -> Reads[None]:
        """Read over white space."""
        yield from self.run(_SPACE)

    def expect(self, literal: str) -> Reads[None]:
        """Read ``literal``.

        Raises:
            MalformedError: something else is there.
        """
        if not (yield from self.take(literal)):
            raise MalformedError

    def take(self, literal: str) -> Reads[bool]:
        """Read ``literal`` if it is there."""
        while not self.text.startswith(literal, self.at):
            if self.ended or not literal.startswith(self.text[self.at :]):
                return False
            yield
        self.at += len(literal)
        return True

    def one_of(self, names: Collection[str]) -> Reads[str]:
        """Read the longest of ``names`` that is there.

        Raises:
            MalformedError: none is.
        """
        while not self.ended and any(
            name.startswith(self.text[self.at :]) and len(name) > len(self.text) - self.at for name in names
        ):
            yield
        found = max((name for name in names if self.text.startswith(name, self.at)), key=len, default="")
        if not found:
            raise MalformedError
        self.at += len(found)
        return found

    def until(self, marker: str, give: Callable[[str], None]) -> Reads[bool]:
        """``give`` the text before ``marker`` and read over both; at the end, all, and return ``False``."""
        while True:
            found = self.text.find(marker, self.at)
            keep = len(self.text) if self.ended else _beginning(self.text, marker, self.at)
            end = found if found >= 0 else keep
            if end > self.at:
                give(self.text[self.at : end])
            self.at = end
            self._forget()
            if found >= 0:
                self.at += len(marker)
                return True
            if self.ended:
                return False
            yield

    def rest(self, give: Callable[[str], None]) -> Reads[None]:
        """``give`` all the text that is left."""
        while (yield from self.more()):
            give(self.text[self.at :])
            self.at = len(self.text)
            self._forget()

    def content(self, text: str) -> None:
        """``text`` is content."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self.parts.append(Part(content=kept))

    def reasoning(self, text: str) -> None:
        """``text`` is reasoning."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self.parts.append(Part(reasoning=kept))

    def drop_space(self) -> None:
        """What has been held back belongs to nothing."""
        self._space = ""

    def begin_call(self, name: str) -> None:
        """A call of the tool ``name`` begins."""
        self.drop_space()
        self.parts.append(Part(call=CallDelta(self.num_calls, new_call_id(), name)))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """``text`` continues the arguments of the last call."""
        if text:
            self.parts.append(Part(call=CallDelta(self.num_calls - 1, arguments=text)))

    def call(self, name: str, arguments: str) -> None:
        """A whole call."""
        self.begin_call(name)
        self.arguments(arguments)

    def end_content(self) -> None:
        """The answer has ended: the space after it is content unless it follows a call."""
        if self._space and not self.num_calls:
            self.parts.append(Part(content=self._space))
        self._space = ""

    def _forget(self) -> None:
        """Drop what has been read."""
        self.text = self.text[self.at :]
        self.at = 0


AnswerGrammar: TypeAlias = Callable[[AnswerText], Reads[None]]


class AnswerParser:
    """Parts of one answer as its text arrives: joined, they are the same however the text is split.

    With ``one_call`` the answer ends with its first call.
    """

    def __init__(self, grammars: Sequence[AnswerGrammar], *, one_call: bool = False) -> None:
        self._text = AnswerText()
        self._reading: Reads[None] | None = self._read(grammars)
        self._one_call = one_call
        self.num_calls = 0

    @property
    def complete(self) -> bool:
        """Whether the answer has ended before its text."""
        return self._one_call and self.num_calls > 0

    def push(self, text: str, *, ended: bool) -> list[Part]:
        """What ``text`` adds; ``ended`` says that no more will come."""
        self._text.text += text
        self._text.ended = ended
        if self.complete:
            return []
        if self._reading is not None:
            try:
                next(self._reading)
            except StopIteration:
                self._reading = None
        parts, self._text.parts = self._text.parts, []
        self.num_calls = self._text.num_calls
        if self._one_call and self.num_calls:
            self._reading = None
            ends = (i for i, part in enumerate(parts, 1) if part.call is not None and part.call.arguments)
            return parts[: next(ends, len(parts))]
        return parts

    def _read(self, grammars: Sequence[AnswerGrammar]) -> Reads[None]:
        for grammar in grammars:
            yield from grammar(self._text)
        yield from self._text.rest(self._text.content)
        self._text.end_content()


def _beginning(text: str, marker: str, at: int) -> int:
    """Where the longest beginning of ``marker`` at the end of ``text`` begins, not before ``at``."""
    for length in range(min(len(marker) - 1, len(text) - at), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)
