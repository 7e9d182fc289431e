"""Forms of output as grammars of ``llguidance``, within limits that keep each step short."""

from __future__ import annotations

import copy
import json
import re
from functools import partial
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import InvalidRequestError
from engine.structured.budget import FollowBudget
from engine.structured.lexers import CompiledForm, LexerMemory
from engine.structured_output import StructuredOutput
from engine.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""The whitespace allowed between two JSON tokens; bounded, because some models would write nothing else."""

MAX_REASON = 300
"""Maximum number of characters of the library's message in an error."""

MAX_STATES = 50_000
"""States of a lexer. Outputs that differ share many of them: one with a string of up to 4,000 characters takes
about 20,000, and many take little more."""

_NOTHING = "no output can match it"


class Grammar:
    """A compiled grammar. Its matchers share it; only the engine's thread advances them.

    ``budget`` bounds the time of following them: that of the client whose requests it holds.
    """

    def __init__(self, form: CompiledForm, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self.form = form
        self.vocab_size = vocab_size
        self.mask_words = -(-tokenizer.vocab_size // 32)  # of 32 tokens each; the model may have fewer
        self.end_token_ids = frozenset(tokenizer.eos_tokens)
        self.budget = FollowBudget()

    def within(self, budget: FollowBudget) -> Grammar:
        """The same grammar for another client."""
        found = copy.copy(self)
        found.budget = budget
        return found


def load_llg_tokenizer(folder: str | Path, vocab_size: int, end_token_ids: list[int]) -> LLTokenizer:
    """The vocabulary of the model in ``folder`` as the library needs it: the bytes of each token.

    It is larger than the model's, ``vocab_size``, if the tokenizer has more tokens, such as one for padding.

    Raises:
        ConfigError: there is no tokenizer.
        ValueError: the library does not know this kind of tokenizer.
    """
    from llguidance import LLTokenizer

    file = Path(folder) / "tokenizer.json"
    source = str(file) if file.is_file() else load_tokenizer(folder).backend_tokenizer.to_str()
    try:
        return LLTokenizer(source, n_vocab=vocab_size, eos_token=end_token_ids)
    except ValueError:
        larger = LLTokenizer(source, eos_token=end_token_ids)
        if larger.vocab_size <= vocab_size:
            raise
        return larger


def lowered(form: StructuredOutput) -> str:
    """The grammar of ``form`` in the library's own notation.

    Raises:
        InvalidRequestError: it cannot be one.
    """
    from llguidance import LLMatcher, grammar_from

    match form.kind:
        case "json_object":
            return _of_schema('{"type": "object"}')
        case "json_schema":
            schema = json.loads(form.text)
            if schema is False:
                raise refused(form, _NOTHING)
            return _of_schema("{}" if schema is True else form.text)
        case "choice":
            # As one expression: as many lexemes as texts would be too much for a row of the parser.
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, json.loads(form.text))))
        case "regex":
            return LLMatcher.grammar_from_regex(form.text)
    try:
        return grammar_from("grammar", form.text)
    except ValueError as error:
        raise refused(form, str(error)) from error


def build_grammar(
    tokenizer: LLTokenizer,
    form: StructuredOutput,
    grammar: str,
    vocab_size: int | None = None,
    memory: LexerMemory | None = None,
) -> Grammar:
    """Compile ``grammar``, which is ``form`` lowered, work out what an output may begin with, and try a token.

    ``vocab_size`` is the model's, unless it has all tokens of the tokenizer. ``memory`` is the engine's.
    Takes no Python lock. The time that it may take has no bound: see :mod:`engine.structured.checker`.

    Raises:
        InvalidRequestError: it is wrong, too large, or matches no output.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,  # about 7 ms
        step_max_items=20_000,  # about 1 ms
        max_lexer_states=MAX_STATES,
        max_grammar_size=200_000,
        verbose_errors=False,
    )
    began = thread_time()
    compiled = partial(LLMatcher, tokenizer, grammar, log_level=0, limits=limits)
    matcher = compiled()
    compile_s = thread_time() - began
    if not matcher.is_error():
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    if matcher.is_error():
        raise refused(form, matcher.get_error())
    vocab_size = vocab_size or tokenizer.vocab_size
    tokens = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:vocab_size]).tolist()
    if not tokens:
        raise refused(form, _NOTHING)
    first = next((token for token in tokens if token not in tokenizer.eos_tokens), None)
    if first is not None:
        after = matcher.deep_copy()
        after.consume_tokens([first])
        if after.is_error():
            raise refused(form, after.get_error())
    return Grammar(CompiledForm(matcher, compiled, compile_s, memory or LexerMemory()), tokenizer, vocab_size)


def refused(form: StructuredOutput, reason: str) -> InvalidRequestError:
    """The error for a form that cannot be compiled."""
    text = plain(reason)
    if text.startswith("NoExtension"):
        text = _NOTHING
    text = text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"
    return InvalidRequestError(
        f"the {form.kind} of the structured output cannot be used: {text}",
        "structured_output",
        "invalid_grammar",
    )


def plain(reason: str) -> str:
    """The library's message on one line, without its markup."""
    return " ".join(reason.replace("<non-verbose/>", "").split())


def _of_schema(schema: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE})
