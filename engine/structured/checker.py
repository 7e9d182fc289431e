"""Tries a grammar in a separate process, which may safely take too long or too much memory.

Compiling can take time and memory that grow exponentially with a grammar, in code that nothing can interrupt.
So each new grammar is first compiled in a child of a process that has loaded the tokenizer. One that exceeds
the limits ends only the child. What passes is compiled again where it is used, at the same cost.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import EngineDeadError, GrammarFault, InvalidRequestError
from engine.structured.grammar import build_grammar, load_llg_tokenizer, lowered, refused
from engine.structured_output import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLTokenizer

CPU_LIMIT_S = 0.4
"""CPU time that compiling a grammar may take; usual ones take 0.02 s. With the niceness below, it bounds how
long a hostile one takes to be rejected, and how much it slows others."""

MEMORY_LIMIT = 512 << 20
"""Bytes that compiling a grammar may add to its process."""

NICENESS = 8
"""Added to the niceness of whatever compiles: while the engine runs steps, it gets a seventh of a core."""

WALL_LIMIT_S = 120.0
"""Time after which a process that has not answered is given up. On a busy machine it may get little of it."""

_GRAMMARS_FAULT = {
    -signal.SIGPROF: f"more than {CPU_LIMIT_S} s of CPU time",
    **dict.fromkeys((-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS), "too much memory"),
}
"""Exit statuses of the process for which the grammar is to blame."""


def yield_to_steps(which: int) -> None:
    """Give a process, or on Linux a thread by its native ID, a lower priority than this process has."""
    with contextlib.suppress(OSError):  # the process may have ended
        os.setpriority(os.PRIO_PROCESS, which, os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS)


class GrammarChecker:
    """One process, started at first use and again if it has ended, which no grammar can bring about.

    One thread at a time may ask; any may close it, also while it is asked.
    """

    def __init__(self, folder: str | Path, vocab_size: int, end_token_ids: list[int]) -> None:
        self._arguments = [str(folder), str(vocab_size), *map(str, end_token_ids)]
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()  # guards both

    def check(self, form: StructuredOutput) -> str:
        """The grammar of ``form`` in the library's notation, once it has been compiled within the limits.

        Raises:
            InvalidRequestError: it cannot be compiled, or takes too much time or memory.
            GrammarFault: the process could not be started, or ended although the grammar did nothing wrong.
            EngineDeadError: the checker is closed.
        """
        try:
            process = self._running()
            answer = self._ask(process, json.dumps(asdict(form)))
        except OSError as error:
            self._end_process()
            self._check_open()
            raise _fault(str(error)) from error
        if answer is None or "ended" in answer:
            code = process.wait() if answer is None else int(answer["ended"])
            self._check_open()
            if code in _GRAMMARS_FAULT:
                reason = _GRAMMARS_FAULT[code]
                raise refused(form, f"compiling it takes {reason}; make it smaller or simpler")
            ended = f"with code {code}" if code >= 0 else f"by signal {-code}"
            raise _fault(f"its process ended {ended}, or did not answer within {WALL_LIMIT_S:.0f} s")
        if "error" in answer:
            raise InvalidRequestError(answer["error"], "structured_output", "invalid_grammar")
        return str(answer["grammar"])

    def start(self) -> None:
        """Start the process, if none runs, so that the first grammar need not wait for it.

        Raises:
            EngineDeadError: the checker is closed.
            OSError: it could not be started.
        """
        self._running()

    def close(self) -> None:
        """End the process, and start no other."""
        with self._lock:
            self._closed = True
        self._end_process()

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            self._check_open()
            if self._process is None or self._process.poll() is not None:
                self._process = self._started()
            return self._process

    def _end_process(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDeadError("the engine has stopped")

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.structured.checker", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        yield_to_steps(process.pid)  # already while it loads
        return process

    def _ask(self, process: subprocess.Popen[bytes], question: str) -> dict[str, Any] | None:
        """The answer to one line, or ``None`` if the process has ended instead."""
        assert process.stdin is not None
        assert process.stdout is not None
        limit = threading.Timer(WALL_LIMIT_S, process.kill)
        limit.daemon = True
        limit.start()
        try:
            process.stdin.write(question.encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            return None
        finally:
            limit.cancel()
        answer: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
        return answer


def _fault(reason: str) -> GrammarFault:
    return GrammarFault(
        f"the structured output could not be tried, for no fault of its own: {reason}; send the request again"
    )


def main(folder: str, vocab_size: int, end_token_ids: list[int]) -> None:
    """Answer questions from standard input until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the server, which ends this
    tokenizer = load_llg_tokenizer(folder, vocab_size, end_token_ids)
    _limit_memory()
    for line in sys.stdin:
        sys.stdout.write(_in_child(tokenizer, line.encode(), vocab_size) + "\n")
        sys.stdout.flush()


def _in_child(tokenizer: LLTokenizer, question: bytes, vocab_size: int) -> str:
    """The answer, or how the child has ended without one."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(sys.stdout.fileno())  # whoever reads it must see at once when the parent is killed
            answer = _answer(tokenizer, question, vocab_size).encode()
            with open(writing, "wb") as pipe:
                pipe.write(answer)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.dumps({"ended": code}) if code else answer.decode()


def _answer(tokenizer: LLTokenizer, question: bytes, vocab_size: int) -> str:
    form = StructuredOutput(**json.loads(question))
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)  # its signal ends the process
    try:
        grammar = lowered(form)
        build_grammar(tokenizer, form, grammar, vocab_size)
        return json.dumps({"grammar": grammar})
    except InvalidRequestError as error:
        return json.dumps({"error": error.message})
    except MemoryError:
        os.abort()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory() -> None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux; there such a limit has no effect
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_LIMIT, hard))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(token) for token in sys.argv[3:]])
