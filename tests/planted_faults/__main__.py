"""Plant one fault after another in a copy of the tree and see whether the unit tests of the file notice.

``python -m tests.planted_faults`` runs all of them; ``--only admission relay`` those whose file or description
contains one of the words. The exit status is 1 when fewer than 95% are caught, and 2 when the list itself is
wrong: a text that does not occur exactly once, tests that fail without any fault or that cannot run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from tests.planted_faults.catalog import FAULTS
from tests.planted_faults.fault import Fault
from tests.planted_faults.tree import ROOT, Tree, Verdict

BAR = 0.95


class ListError(Exception):
    """The list of faults does not fit the sources or the tests."""


def check(faults: Sequence[Fault]) -> None:
    """The list fits the sources.

    Raises:
        ListError: names each fault that does not.
    """
    wrong = []
    for fault in faults:
        source = (ROOT / fault.file).read_text() if (ROOT / fault.file).exists() else ""
        if (count := source.count(fault.old)) != 1:
            wrong.append(f"{fault.file}: occurs {count} times instead of once: {fault.old!r}")
        elif fault.file.endswith(".py"):
            try:
                compile(source.replace(fault.old, fault.new), fault.file, "exec")
            except SyntaxError as error:
                wrong.append(f"{fault.file}: {fault.new!r}: {error}")
        wrong += [f"{fault.file}: no tests/{test}" for test in fault.tests if not exists(test)]
    if wrong:
        raise ListError("\n".join(wrong))


def exists(test: str) -> bool:
    """Whether there are such tests: a file, or one function in it."""
    file, _, name = test.partition("::")
    path = ROOT / "tests" / file
    return path.exists() and (not name or f"\ndef {name}(" in path.read_text())


def plant(faults: Sequence[Fault], processes: int) -> dict[Fault, Verdict]:
    """Try every fault, ``processes`` at a time, and print what comes of each.

    Raises:
        ListError: tests fail without any fault, or cannot run.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.planted_faults.warm"])
    verdicts: dict[Fault, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="quire-faults-") as folder, ThreadPoolExecutor(processes) as pool:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(processes):
            trees.put(Tree(Path(folder) / str(number), context))

        def sound(tests: Sequence[str]) -> None:
            tree = trees.get()
            if tree.status(tests, limit_s=None) != 0:  # all at once: on a busy machine they take minutes
                raise ListError(f"tests fail without any fault:\n{tree.output()}")
            trees.put(tree)

        def attempt(fault: Fault) -> tuple[Fault, Verdict, float, str]:
            tree = trees.get()
            began = time.monotonic()
            verdict = tree.verdict(fault)
            output = tree.output()
            trees.put(tree)
            return fault, verdict, time.monotonic() - began, output

        files = sorted({test for fault in faults for test in fault.tests})
        list(pool.map(sound, filter(None, (files[number::processes] for number in range(processes)))))
        for done in as_completed([pool.submit(attempt, fault) for fault in faults]):
            fault, verdict, seconds, output = done.result()
            verdicts[fault] = verdict
            print(f"{verdict.value:24} {seconds:5.1f} s  {fault.file}: {fault.why}", flush=True)
            if verdict is Verdict.BROKEN:
                raise ListError(output)
    return verdicts


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="words in a fault's file or description")
    parser.add_argument("--processes", type=int, default=2, help="faults at a time")
    arguments = parser.parse_args()
    faults = [one for one in FAULTS if any(word in f"{one.file} {one.why}" for word in arguments.only)]
    if not faults:
        parser.error("no fault is about that")
    try:
        check(FAULTS)
        verdicts = plant(faults, arguments.processes)
    except ListError as error:
        print(error, file=sys.stderr)
        return 2
    survivors = [fault for fault, verdict in verdicts.items() if verdict is Verdict.SURVIVED]
    caught = len(faults) - len(survivors)
    print(f"\n{caught} of {len(faults)} planted faults were caught ({caught / len(faults):.0%})")
    for fault in survivors:
        print(f"survived: {fault.file}: {fault.why}\n  - {fault.old}\n  + {fault.new}")
    return int(caught < BAR * len(faults))


if __name__ == "__main__":
    sys.exit(main())
