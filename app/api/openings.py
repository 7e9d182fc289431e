"""Tokens of the openings that many chats share: a long system prompt is tokenized once, not each time."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

LEAST_CHARS = 1000
"""Shorter first messages are tokenized each time: that takes less than a quarter of a millisecond."""

MAX_OPENINGS = 128
MAX_CHARS = 4_000_000
"""Of all openings kept; their tokens take some 10 bytes for each character."""


class Openings:
    """Least recently used openings with their token ids. Any thread may use it.

    A text is cut right behind the first special token after its first message. Tokenizers treat what lies
    between two special tokens apart, so the parts' ids joined are the whole's; that is not taken on trust: an
    opening is kept only if it held for the text that brought it, and a model for which it does not hold never
    gets a wrong token. Each owner has openings of its own: whoever could use another's would see by the time
    that it takes that the other has sent that text.

    Args:
        encode: from a text to its token ids, nothing added.
        special: finds a special token in a rendered template.
    """

    def __init__(self, encode: Callable[[str], list[int]], special: re.Pattern[str] | None) -> None:
        self._encode = encode
        self._special = special
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, Hashable], tuple[int, ...] | None] = (
            OrderedDict()
        )  # None: must not be cut
        self._chars = 0
        self.hits = 0

    def encode(self, text: str, first_message: str, owner: Hashable = None) -> list[int]:
        """Token ids of ``text``, a rendered chat that begins with ``first_message``."""
        end = self._end(text, first_message)
        if end is None:
            return self._encode(text)
        opening, rest = text[:end], text[end:]
        name = opening, owner
        with self._lock:
            known = name in self._known
            ids = self._known.get(name)
            if known:
                self._known.move_to_end(name)
                self.hits += 1
        if ids is not None:
            return [*ids, *self._encode(rest)]
        whole = self._encode(text)
        if not known:
            self._learn(name, rest, whole)
        return whole

    def _end(self, text: str, first_message: str) -> int | None:
        if self._special is None or len(first_message) < LEAST_CHARS:
            return None
        begin = text.find(first_message)
        if begin < 0:  # the template has changed it
            return None
        match = self._special.search(text, begin + len(first_message))
        return None if match is None else match.end()

    def _learn(self, name: tuple[str, Hashable], rest: str, whole: list[int]) -> None:
        opening = name[0]
        ids = self._encode(opening)
        holds = whole[: len(ids)] == ids and whole[len(ids) :] == self._encode(rest)
        with self._lock:
            if name in self._known or len(opening) > MAX_CHARS:
                return
            self._known[name] = tuple(ids) if holds else None
            self._chars += len(opening)
            while len(self._known) > MAX_OPENINGS or self._chars > MAX_CHARS:
                (oldest, _), _ = self._known.popitem(last=False)
                self._chars -= len(oldest)
