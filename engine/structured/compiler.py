"""Compiles the grammars of requests off the engine's thread, and caches the last ones."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import LifoQueue
from typing import TYPE_CHECKING

from engine.errors import (
    ClientLimitError,
    ConfigError,
    EngineDeadError,
    GrammarFault,
    InvalidRequestError,
    one_line,
)
from engine.structured.budget import FollowBudgets
from engine.structured.checker import GrammarChecker, yield_to_steps
from engine.structured.grammar import Grammar, build_grammar, load_llg_tokenizer, lowered
from engine.structured.lexers import LIMIT, CompiledForm, LexerMemory
from engine.structured.round_robin_queue import RoundRobinQueue
from engine.structured_output import StructuredOutput
from engine.tokenizer import is_panic

if TYPE_CHECKING:
    from llguidance import LLTokenizer

WORKERS = 2
"""Grammars that are compiled at once."""

KEPT = 64
"""Grammars and refusals that are kept."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    form: StructuredOutput
    client: str
    done: Future[Grammar] = field(default_factory=Future)


class GrammarCompiler:
    """Compiles grammars for one model. Any thread may use it.

    Args:
        checked: first try each new grammar in a separate process, because its author may be hostile.
        memory: bytes that all grammars and what follows them may take.
    """

    def __init__(
        self,
        folder: str | Path,
        vocab_size: int,
        end_token_ids: tuple[int, ...],
        *,
        checked: bool,
        memory: int = LIMIT,
    ) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._end_token_ids = list(end_token_ids)
        self._lock = threading.Lock()  # guards what is kept
        self._kept: OrderedDict[StructuredOutput, Grammar | InvalidRequestError] = OrderedDict()
        self._loading = threading.Lock()  # guards the tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._budgets = FollowBudgets()
        self.memory = LexerMemory(memory)
        self._preparing: threading.Thread | None = None
        self._checked = checked
        self._queue: RoundRobinQueue[_Job] = RoundRobinQueue()
        self._threads = 0
        self._checkers = [GrammarChecker(folder, vocab_size, self._end_token_ids) for _ in range(WORKERS)]
        self._idle: LifoQueue[GrammarChecker] = LifoQueue()  # the last one used has its process
        for checker in self._checkers:
            self._idle.put(checker)
        self.faults = 0
        """Grammars that could not be compiled through no fault of their own."""

    def submit(self, form: StructuredOutput, client: str = "") -> Future[Grammar]:
        """Compile in a thread of its own, in which clients take turns; the result raises as :meth:`compile`.

        Raises:
            EngineDeadError: the compiler is closed.
        """
        job = _Job(form, client)
        if not self._checked or self._found(form) is not None:
            self._run(job)
            return job.done
        self._start_threads()
        if not self._queue.put(client, job):
            raise EngineDeadError("the engine has stopped")
        return job.done

    def warm_up(self) -> None:
        """Load what the first grammar needs, in half a second: the tokenizer here, and one of the processes.

        What cannot be loaded raises where it is needed.
        """
        with contextlib.suppress(InvalidRequestError, EngineDeadError, OSError):
            self._loaded()
            self._checkers[-1].start()

    def _start_threads(self) -> None:
        with self._lock:
            while self._threads < WORKERS:
                self._threads += 1
                threading.Thread(target=self._work, name="quire-grammar", daemon=True).start()

    def _work(self) -> None:
        _yield_here()
        while (job := self._queue.get()) is not None:
            if job.done.set_running_or_notify_cancel():
                self._run(job)

    def _run(self, job: _Job) -> None:
        try:
            job.done.set_result(self.compile(job.form, job.client))
        except Exception as error:  # noqa: BLE001 - it is raised where the result is read
            job.done.set_exception(error)

    def compile(self, form: StructuredOutput, client: str = "") -> Grammar:
        """The grammar of ``form`` for the requests of ``client``; may take seconds.

        Raises:
            InvalidRequestError: it cannot be compiled, is too large, or the model cannot be held to any form.
            GrammarFault: it could not be tried, for no fault of its own.
            ClientLimitError: following grammars of ``client`` took more time than it may.
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
        with self._lock:
            budget = self._budgets.of(client)
        if self._checked and (owed_s := budget.owed_s()):
            seconds = math.ceil(owed_s)
            raise ClientLimitError(
                "this client's structured outputs have taken more CPU time than allowed; send the request "
                f"again in {seconds} s, with a simpler form",
                seconds,
            )
        return kept.within(budget)

    def forget(self, form: StructuredOutput) -> None:
        """Compile ``form`` again when it is next needed, because the grammar's cache of outputs is full."""
        with self._lock:
            self._kept.pop(form, None)

    def bound_memory(self) -> None:
        """Keep the memory of all grammars within its limit; only the engine's thread may call it.

        Also compiles in a thread what takes too long to be compiled once sequences need it.
        """
        forms = self.memory.bound()
        if forms and (self._preparing is None or not self._preparing.is_alive()):
            self._preparing = threading.Thread(
                target=self._prepare, args=(forms,), name="quire-grammar", daemon=True
            )
            self._preparing.start()

    @staticmethod
    def _prepare(forms: list[CompiledForm]) -> None:
        _yield_here()
        for form in forms:
            if form.spare is None:
                form.prepare()

    def close(self) -> None:
        """End the processes. What is being compiled or waits for it fails at once, as do later calls."""
        for checker in self._checkers:
            checker.close()
        for job in self._queue.close():
            if job.done.set_running_or_notify_cancel():
                job.done.set_exception(EngineDeadError("the engine has stopped"))

    def _found(self, form: StructuredOutput) -> Grammar | InvalidRequestError | None:
        with self._lock:
            kept = self._kept.pop(form, None)
            if kept is None or (isinstance(kept, Grammar) and kept.form.lexer.dropped):
                return None
            self._kept[form] = kept
            return kept

    def _compiled(self, form: StructuredOutput) -> Grammar:
        tokenizer = self._loaded()
        if not self._checked:
            return build_grammar(tokenizer, form, lowered(form), self._vocab_size, self.memory)
        checker = self._idle.get()
        try:
            grammar = checker.check(form)
        except GrammarFault as error:
            with self._lock:
                self.faults += 1
            logger.error("%s", error)
            raise
        finally:
            self._idle.put(checker)
        return build_grammar(tokenizer, form, grammar, self._vocab_size, self.memory)

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
            except BaseException as error:
                if not isinstance(error, (ConfigError, ValueError, ImportError)) and not is_panic(error):
                    raise
                reason = one_line(error)
        raise InvalidRequestError(
            f"this model's output cannot be constrained to a form: {reason}; leave structured output out",
            "structured_output",
            "unsupported_parameter",
        )


def _yield_here() -> None:
    """Give this thread a lower priority than steps have."""
    if sys.platform == "linux":  # elsewhere threads have no priority of their own
        yield_to_steps(threading.get_native_id())
