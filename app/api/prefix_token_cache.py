"""Token ids of beginnings that many chats share: a long system prompt is tokenized once."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

MIN_PREFIX_CHARS = 1000
"""Shorter first messages are not cached: tokenizing takes less than a quarter of a millisecond."""

MAX_PREFIXES = 128
MAX_CHARS = 4_000_000
"""Total length of the cached prefixes; their token ids take about 10 bytes per character."""


class PrefixTokenCache:
    """An LRU cache from the beginning of a chat to its token ids. Thread-safe.

    A text is split before the first special token that follows its first message. Tokenizers process the text
    between two special tokens independently, so the ids of the parts are those of the whole. Behind the token
    it would be otherwise: some put a space before the very first word. This is verified: a prefix is cached
    only if it holds for the text that brought it, so no model gets a wrong token. Owners do not share entries;
    otherwise the time that tokenizing takes would reveal what others have sent.

    Args:
        encode: from a text to its token ids, without added tokens.
        special: matches a special token in a rendered template.
    """

    def __init__(self, encode: Callable[[str], list[int]], special: re.Pattern[str] | None) -> None:
        self._encode = encode
        self._special = special
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, Hashable], tuple[int, ...] | None] = (
            OrderedDict()
        )  # None: must not be split
        self._chars = 0
        self.hits = 0

    def encode(self, text: str, first_message: str, owner: Hashable = None) -> list[int]:
        """Token ids of ``text``, a rendered chat that begins with ``first_message``."""
        end = self._end(text, first_message)
        if end is None:
            return self._encode(text)
        prefix, rest = text[:end], text[end:]
        key = prefix, owner
        with self._lock:
            known = key in self._known
            ids = self._known.get(key)
            if known:
                self._known.move_to_end(key)
                self.hits += 1
        if ids is not None:
            return [*ids, *self._encode(rest)]
        whole = self._encode(text)
        if not known:
            self._learn(key, rest, whole)
        return whole

    def _end(self, text: str, first_message: str) -> int | None:
        if self._special is None or len(first_message) < MIN_PREFIX_CHARS:
            return None
        begin = text.find(first_message)
        if begin < 0:  # the template has changed the message
            return None
        match = self._special.search(text, begin + len(first_message))
        return None if match is None else match.start()

    def _learn(self, key: tuple[str, Hashable], rest: str, whole: list[int]) -> None:
        prefix = key[0]
        ids = self._encode(prefix)
        holds = whole[: len(ids)] == ids and whole[len(ids) :] == self._encode(rest)
        with self._lock:
            if key in self._known or len(prefix) > MAX_CHARS:
                return
            self._known[key] = tuple(ids) if holds else None
            self._chars += len(prefix)
            while len(self._known) > MAX_PREFIXES or self._chars > MAX_CHARS:
                (oldest, _), _ = self._known.popitem(last=False)
                self._chars -= len(oldest)
