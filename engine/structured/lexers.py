"""The lexers of compiled forms, and a limit on the memory of all lexers and matchers of an engine together."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

from engine.sizes import format_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher

RESTART_S = 0.05
"""Time that a restart may take: compiling, as far as that is known before, and following the output."""

LIMIT = 2 << 30
"""Bytes that all lexers and matchers of an engine may take, if the machine has that much."""

LEAST = 256 << 20
"""... and the least: a lexer or a form by itself may take a fifth of it."""

MAX_STATE_BYTES = 48 << 20
"""Bytes of the states of a lexer; most take a fifth of that."""

LEXER_BYTES_PER_S = 512 << 20
"""Bytes that compiling a form, or adding states to its lexer, may take in a second of CPU time; at most 455 MiB
were measured once a lexer had more than 4 MiB."""

MATCHER_BYTES_PER_S = 32 << 20
"""Bytes that a matcher itself may add in a second of CPU time; at most 8 MiB were measured."""

LOOK_EVERY_S = 0.02
"""CPU time of compiling and following after which the memory is looked at again."""

RESTART_WORK = 1000
"""Tokens that are followed again in the time of compiling a usual form."""

_uses = itertools.count()


def lexer_memory(free: int) -> int:
    """Bytes that all lexers and matchers of an engine may take, of ``free`` bytes of RAM that it may use."""
    return min(LIMIT, max(free // 8, LEAST))


class LexerUser(Protocol):
    """A matcher, as its lexer knows it."""

    followed_s: float
    """CPU time of following the output."""

    @property
    def advanced(self) -> int:
        """Tokens of the output that it has followed."""

    def leave(self) -> None:
        """Give up what depends on the lexer, which has been dropped."""


class Lexer:
    """A form compiled once. Its matchers share the lexer's states, which only ever increase."""

    def __init__(self, start: LLMatcher, compile_s: float) -> None:
        self._start: LLMatcher | None = start
        self._compile_s = compile_s
        self.users: WeakSet[LexerUser] = WeakSet()
        """Sequences that follow it; the engine's thread alone knows."""
        self.used = next(_uses)
        """Increases with each use."""
        self.followed_s = 0.0
        """CPU time of following its matchers."""
        self.why_dropped = ""
        """For the errors of sequences that cannot restart."""

    def matcher(self) -> LLMatcher | None:
        """A matcher at the beginning of an output; ``None`` if the lexer has been dropped."""
        self.used, start = next(_uses), self._start
        return None if start is None else start.deep_copy()

    @property
    def dropped(self) -> bool:
        """Whether its memory has been given back."""
        return self._start is None

    @property
    def state_bytes(self) -> int:
        """What its states may take; the library does not tell their number."""
        return int(min(self.followed_s * LEXER_BYTES_PER_S, MAX_STATE_BYTES))

    @property
    def most_bytes(self) -> int:
        """What it and its matchers may take."""
        if self.dropped:
            return 0
        followed_s = sum(user.followed_s for user in list(self.users))
        return self.state_bytes + int(self._compile_s * LEXER_BYTES_PER_S + followed_s * MATCHER_BYTES_PER_S)

    def drop(self, reason: str) -> None:
        """Give its memory back; its sequences restart, or fail for ``reason``."""
        self._start, self.why_dropped = None, reason
        for user in list(self.users):
            user.leave()


class CompiledForm:
    """What all clients share of a form: the ``lexer`` of new sequences, and what compiles another."""

    def __init__(
        self, start: LLMatcher, compiled: Callable[[], LLMatcher], compile_s: float, memory: LexerMemory
    ) -> None:
        self.compiled = compiled
        self.compile_s = compile_s
        """CPU time that compiling it took."""
        self.memory = memory
        self.lexers: WeakSet[Lexer] = WeakSet()
        """All that are alive; the memory's lock guards it."""
        self.spare: Lexer | None = None
        """Compiled ahead, for a form that takes too long to be compiled between two steps."""
        self.lexer = self._added(start)
        memory.add(self)

    @property
    def compiled_bytes(self) -> int:
        """What a lexer of it without states may take."""
        return int(self.compile_s * LEXER_BYTES_PER_S)

    @property
    def quick(self) -> bool:
        """Whether it may be compiled between two steps."""
        return self.compile_s <= RESTART_S

    def another(self) -> Lexer | None:
        """A lexer without states; ``None`` if none is ready and compiling takes too long."""
        spare, self.spare = self.spare, None
        if spare is not None and not spare.dropped:
            return spare
        return self._added(self.compiled()) if self.quick else None

    def prepare(self) -> None:
        """Compile a spare lexer, in any thread."""
        self.spare = self._added(self.compiled())

    def _added(self, start: LLMatcher) -> Lexer:
        lexer = Lexer(start, self.compile_s)
        with self.memory.lock:
            self.lexers.add(lexer)
        self.memory.worked_s += self.compile_s
        return lexer


class LexerMemory:
    """Bounds the memory of all lexers and matchers of an engine.

    Forms that no sequence follows give way first, the least recently used ones before others; then those that
    free the most for the tokens that their sequences have to follow again. Sequences that cannot restart fail.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self.limit = limit
        self.worked_s = 0.0
        """CPU time of all compiling and following."""
        self.lock = threading.Lock()
        self._forms: WeakSet[CompiledForm] = WeakSet()
        self._looked_s = 0.0

    def add(self, form: CompiledForm) -> None:
        """Count the lexers of ``form`` while they live."""
        with self.lock:
            self._forms.add(form)

    @property
    def most_bytes(self) -> int:
        """What all of them may take."""
        return sum(lexer.most_bytes for _, lexer in self._live())

    def bound(self) -> list[CompiledForm]:
        """Keep to the limit, on the engine's thread; returns the forms whose spare lexer should be compiled."""
        if self.worked_s - self._looked_s < LOOK_EVERY_S:
            return []
        self._looked_s = self.worked_s
        live = self._live()
        sizes = {lexer: lexer.most_bytes for _, lexer in live}
        excess = sum(sizes.values()) - self.limit
        reason = (
            f"all structured outputs together need more than {format_bytes(self.limit)} of memory, and "
            "this one cannot restart in time; simplify it, or send fewer at once"
        )
        for followed in (False, True):  # spare lexers first: without them other sequences cannot restart
            some = [pair for pair in live if bool(pair[1].users) is followed]
            for form, lexer in sorted(some, key=lambda pair: self._order(pair[0], pair[1], sizes[pair[1]])):
                if excess <= 0:
                    break
                excess -= sizes[lexer]
                if lexer is form.spare:
                    form.spare = None
                lexer.drop(reason)
        room = self.limit - sum(size for lexer, size in sizes.items() if lexer.users and not lexer.dropped)
        return [form for form, lexer in live if self._fills(form, lexer) and form.compiled_bytes <= room]

    def _live(self) -> list[tuple[CompiledForm, Lexer]]:
        with self.lock:
            return [(form, lexer) for form in self._forms for lexer in form.lexers if not lexer.dropped]

    @staticmethod
    def _fills(form: CompiledForm, lexer: Lexer) -> bool:
        """Whether the sequences that follow ``lexer`` may soon need another that is not compiled yet."""
        needed = not form.quick and form.spare is None and bool(lexer.users)
        return needed and lexer.state_bytes > MAX_STATE_BYTES // 2

    @staticmethod
    def _order(form: CompiledForm, lexer: Lexer, size: int) -> tuple[int, float]:
        """Lower for what is given up first."""
        if not lexer.users:
            return (1 if lexer is form.spare else 0), lexer.used
        work = RESTART_WORK + sum(user.advanced for user in lexer.users)
        return (2 if form.quick or form.spare else 3), -size / work
