"""Compiles the grammars of requests, away from the engine's thread, and keeps the last ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from engine.errors import ConfigError, EngineDeadError, InvalidRequestError
from engine.structured.checker import GrammarChecker
from engine.structured.grammar import Grammar, build, load_llg_tokenizer, lowered
from engine.structured_output import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLTokenizer

WORKERS = 2
"""Grammars that are compiled at once."""

KEPT = 64
"""Grammars and refusals that are kept."""


class GrammarCompiler:
    """For one model. Any thread may use it.

    Args:
        checked: try each new grammar in a process of its own first, since a stranger may have written it.
    """

    def __init__(
        self, folder: str | Path, vocab_size: int, end_token_ids: tuple[int, ...], *, checked: bool
    ) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._lock = threading.Lock()  # guards what is kept
        self._kept: OrderedDict[StructuredOutput, Grammar | InvalidRequestError] = OrderedDict()
        self._loading = threading.Lock()  # guards the tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._workers: ThreadPoolExecutor | None = None
        self._checkers: list[GrammarChecker] = []
        self._idle: SimpleQueue[GrammarChecker] = SimpleQueue()
        if checked:
            self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="quire-grammar")
            for _ in range(WORKERS):
                self._checkers.append(GrammarChecker(folder, vocab_size, self._end_token_ids))
                self._idle.put(self._checkers[-1])

    def submit(self, form: StructuredOutput) -> Future[Grammar]:
        """Compile in a thread of its own; the result raises as :meth:`compile` does.

        Raises:
            EngineDeadError: the compiler is closed.
        """
        kept = self._found(form)
        if kept is None and self._workers is not None:
            try:
                return self._workers.submit(self.compile, form)
            except RuntimeError as error:
                raise EngineDeadError("the engine has stopped") from error
        done: Future[Grammar] = Future()
        try:
            done.set_result(self.compile(form))
        except InvalidRequestError as error:
            done.set_exception(error)
        return done

    def compile(self, form: StructuredOutput) -> Grammar:
        """The grammar of ``form``; may take seconds.

        Raises:
            InvalidRequestError: it cannot be compiled, is too large, or the model cannot be held to any form.
            EngineDeadError: the compiler is closed.
        """
        kept = self._found(form)
        if kept is None:
            try:
                kept = self._compiled(form)
            except InvalidRequestError as error:
                kept = error
            with self._lock:
                self._kept[form] = kept
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        if isinstance(kept, InvalidRequestError):
            raise InvalidRequestError(kept.message, kept.param, kept.code)
        return kept

    def forget(self, form: StructuredOutput) -> None:
        """Compile ``form`` anew when it is next asked for: what a grammar has learned from outputs is full."""
        with self._lock:
            self._kept.pop(form, None)

    def close(self) -> None:
        """End the processes. What is being compiled or waits for it fails at once, as do later calls."""
        for checker in self._checkers:
            checker.close()
        if self._workers is not None:
            self._workers.shutdown(wait=False)

    def _found(self, form: StructuredOutput) -> Grammar | InvalidRequestError | None:
        with self._lock:
            if form in self._kept:
                self._kept.move_to_end(form)
            return self._kept.get(form)

    def _compiled(self, form: StructuredOutput) -> Grammar:
        tokenizer = self._loaded()
        if self._workers is None:
            return build(tokenizer, form, lowered(form))
        checker = self._idle.get()
        try:
            grammar = checker.check(form)
        finally:
            self._idle.put(checker)
        return build(tokenizer, form, grammar)

    def _loaded(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            return self._tokenizer

    def _load(self) -> LLTokenizer:
        reason = "it has no end-of-sequence token" if not self._end_token_ids else ""
        if not reason:
            try:
                return load_llg_tokenizer(self._folder, self._vocab_size, self._end_token_ids)
            except (ConfigError, ValueError, ImportError) as error:
                reason = " ".join(str(error).split())
        raise InvalidRequestError(
            f"the output of this model cannot be held to a form: {reason}; leave structured output out",
            "structured_output",
            "unsupported_parameter",
        )
