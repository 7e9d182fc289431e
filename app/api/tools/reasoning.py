"""Reasoning before an answer: what stands between two markers at its beginning."""

from __future__ import annotations

from app.api.tools.answer_text import AnswerGrammar, AnswerText, Reads

MARKERS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
"""Beginning and end, by parser."""


def reasoning(parser: str, *, opened: bool) -> AnswerGrammar:
    """Reads the reasoning, if there is any; ``opened`` says that the prompt ends with its beginning."""
    begin, end = MARKERS[parser]

    def read(source: AnswerText) -> Reads[None]:
        start = source.at
        yield from source.space()
        if not (yield from source.take(begin)) and not opened:
            source.at = start
            return
        yield from source.space()
        yield from source.until(end, source.reasoning)
        source.drop_space()
        yield from source.space()

    return read
