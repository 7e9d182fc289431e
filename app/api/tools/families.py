"""Chooses the parsers that suit a model by the text of its chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache

from app.api.tools import mistral as mistral_calls
from app.api.tools import pythonic as pythonic_calls
from app.api.tools.answer_text import AnswerGrammar, AnswerParser
from app.api.tools.forced import named, required
from app.api.tools.hermes import hermes
from app.api.tools.llama3_json import TAG, llama3_json
from app.api.tools.reasoning import MARKERS as REASONING
from app.api.tools.reasoning import reasoning
from app.api.tools.tool_use import ToolUse

TOOL_PARSERS: dict[str, Callable[[Collection[str]], AnswerGrammar]] = {
    "hermes": hermes,
    "llama3_json": llama3_json,
    "mistral": mistral_calls.mistral,
    "pythonic": pythonic_calls.pythonic,
}

_TOOL_SIGNS = (
    ("mistral", mistral_calls.OPEN),
    ("pythonic", pythonic_calls.START),
    ("pythonic", "[func_name1("),
    ("hermes", "<tool_call>"),
    ("llama3_json", TAG),
    ("llama3_json", '{"name": function name, "parameters":'),
)
"""What a template says of calls; the first that it has counts."""

_MARKERS = {"mistral": mistral_calls.MARKERS, "llama3_json": (TAG,), "pythonic": pythonic_calls.MARKERS}
"""What may be special tokens in the vocabulary, which are no text otherwise."""

_ONE_CALL = "only supports single tool-calls"
"""What Llama 3's template says when it gets a message with several calls."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How one model writes calls and reasoning; ``none`` means that nothing is looked for."""

    tool_parser: str
    reasoning_parser: str
    template_knows_tools: bool
    one_call: bool  # the template takes one call a message

    @staticmethod
    @cache
    def of(template: str, tool_parser: str = "auto", reasoning_parser: str = "auto") -> ModelFamily:
        """The family of a chat template by its text, or as the options say."""
        knows = re.search(r"\btools\b", template) is not None
        if tool_parser == "auto":
            found = (parser for parser, sign in _TOOL_SIGNS if sign in template)
            tool_parser = next(found, "hermes") if knows else "hermes"
        if reasoning_parser == "auto":
            # `</think>` alone: many templates drop the reasoning of earlier turns by it.
            found = (parser for parser, (_, end) in REASONING.items() if end in template)
            reasoning_parser = next(found, "none")
        return ModelFamily(tool_parser, reasoning_parser, knows, _ONE_CALL in template)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that count even where they are special tokens."""
        return _MARKERS.get(self.tool_parser, ()) + REASONING.get(self.reasoning_parser, ())

    def parser(self, use: ToolUse, prompt_end: str, *, free: bool = True) -> AnswerParser | None:
        """A parser for an answer to a prompt that ends with ``prompt_end``; ``None`` if all is content.

        An answer that is not ``free``, but held to some form, has neither reasoning nor calls.
        """
        names = frozenset(tool.name for tool in use.tools)
        one = not use.parallel or self.one_call
        if use.choice == "named":
            return AnswerParser([named(use.named)])
        if use.choice == "required":
            return AnswerParser([required(names)])
        if not free:
            return None
        grammars: list[AnswerGrammar] = []
        if self.reasoning_parser != "none":
            begin = REASONING[self.reasoning_parser][0]
            grammars.append(reasoning(self.reasoning_parser, opened=prompt_end.rstrip().endswith(begin)))
        if use.choice == "auto" and self.tool_parser != "none":
            grammars.append(TOOL_PARSERS[self.tool_parser](names))
        return AnswerParser(grammars, one_call=one and bool(names)) if grammars else None
