"""Shared beginnings of chats are tokenized once, and never change a token."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from app.api.chat_messages import ChatMessage
from app.api.output_options import DEFAULT_TEMPLATE
from app.api.prefix_token_cache import MAX_CHARS, MAX_PREFIXES, MIN_PREFIX_CHARS, PrefixTokenCache
from app.api.prompt_tokenizer import PromptTokenizer, RenderLimits
from app.api.tokenizer_parts import TokenizerParts

SPECIAL = re.compile(r"<\|end\|>")


class Letters:
    """One token for each character, or, if ``context`` is set, one that depends on the text's length."""

    def __init__(self, context: bool = False) -> None:
        self.context = context
        self.chars = 0

    def __call__(self, text: str) -> list[int]:
        self.chars += len(text)
        return [ord(char) + len(text) * self.context for char in text]


def chat(first: str, second: str) -> str:
    return f"{first}<|end|>{second}<|end|>"


def test_an_opening_is_tokenized_once() -> None:
    encode = Letters()
    openings = PrefixTokenCache(encode, SPECIAL)
    first = "s" * MIN_PREFIX_CHARS
    for second in ("a", "b", "c"):
        text = chat(first, second)
        assert openings.encode(text, first) == list(map(ord, text))
    assert openings.hits == 2
    assert encode.chars == 3 * len(chat("", "a")) + 2 * MIN_PREFIX_CHARS + len(chat("", "a"))


def test_a_tokenizer_that_cannot_be_cut_is_not() -> None:
    openings = PrefixTokenCache(Letters(context=True), SPECIAL)
    first = "s" * MIN_PREFIX_CHARS
    for second in ("a", "bb", "ccc"):
        text = chat(first, second)
        assert openings.encode(text, first) == Letters(context=True)(text)


def test_a_tokenizer_that_puts_a_space_before_the_first_word_puts_none_behind_an_opening() -> None:
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate("\u2581helos")}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])

    def encode(text: str) -> list[int]:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        return ids

    openings = PrefixTokenCache(encode, SPECIAL)
    first = "s" * MIN_PREFIX_CHARS
    # Behind the opening of the first, nothing shows what it does to a word.
    for text in (f"{first}<|end|>", chat(first, "hello"), chat(first, " hello")):
        assert openings.encode(text, first) == encode(text)
    assert openings.hits == 2


@pytest.mark.parametrize("text", [chat("s" * MIN_PREFIX_CHARS, "x"), "no special token", ""])
def test_what_has_no_opening_is_encoded_whole(text: str) -> None:
    openings = PrefixTokenCache(Letters(), SPECIAL)
    for first in ("short", "t" * MIN_PREFIX_CHARS):
        assert openings.encode(text, first) == list(map(ord, text))
    assert openings.hits == 0


def test_one_owners_openings_save_another_nothing() -> None:
    encode = Letters()
    openings = PrefixTokenCache(encode, SPECIAL)
    first = "s" * MIN_PREFIX_CHARS
    cost = []
    for owner in (("one", ""), ("two", ""), ("one", "salt"), ("one", "")):
        before = encode.chars
        assert openings.encode(chat(first, "x"), first, owner) == list(map(ord, chat(first, "x")))
        cost.append(encode.chars - before)
    assert (openings.hits, cost[0] == cost[1] == cost[2] > cost[3]) == (1, True)


def test_memory_is_bounded() -> None:
    openings = PrefixTokenCache(Letters(), SPECIAL)
    for number in range(2 * MAX_PREFIXES):
        first = f"{number:05d}" * (MIN_PREFIX_CHARS // 5)
        openings.encode(chat(first, "x"), first, owner=number)
    assert len(openings._known) == MAX_PREFIXES
    first = "s" * (MAX_CHARS - 50)
    openings.encode(chat(first, "x"), first)
    assert openings._chars <= MAX_CHARS


def test_the_bundled_model_gets_the_same_tokens(bundled_model: Path) -> None:
    tokenizer = PromptTokenizer(TokenizerParts.read(bundled_model))
    rng = random.Random(0)
    words = ["shop", " élan", "\n\n", "  ", "123", "don't", "\t", "日本", "."]

    def check(system: str, user: str) -> None:
        messages = [ChatMessage("system", system), ChatMessage("user", user)]
        expected = tokenizer._encode(
            tokenizer._render(messages, [], DEFAULT_TEMPLATE, RenderLimits(1.0, False))[0]
        )
        assert asyncio.run(tokenizer.encode_chat(messages, 8192)) == expected

    for _ in range(20):
        system = "".join(rng.choices(words, k=600))
        for _ in range(4):
            check(system, "".join(rng.choices(words, k=20)))
    assert tokenizer.prefix_tokens.hits == 60
