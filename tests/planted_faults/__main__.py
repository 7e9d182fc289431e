"""Plant one fault after another in a copy of the tree and see whether the unit tests of the file notice.

``python -m tests.planted_faults`` runs all of them; ``--only admission relay`` those whose file or description
contains one of the words. The exit status is 1 when fewer than 95% are caught or some tests did not end in time,
and 2 when the list itself is wrong: a text that does not occur exactly once, tests that fail without any fault or
cannot run with it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from engine.devices import usable_cores
from tests.planted_faults.catalog import FAULTS
from tests.planted_faults.estimate import Estimate
from tests.planted_faults.fault import Fault
from tests.planted_faults.tree import ROOT, Tree
from tests.planted_faults.verdict import Verdict, passes, summary


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


def plant(faults: Sequence[Fault], jobs: int) -> dict[Fault, Verdict]:
    """Try every fault, ``jobs`` at a time, and print what comes of each and about when the last will end.

    Raises:
        ListError: tests fail without any fault.
    """
    # As tests/conftest.py does, which comes too late for a torch that is loaded before: its threads would wait
    # for each other in a loop, and those of one process for a core that another one has.
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.planted_faults.warm"])
    verdicts: dict[Fault, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="quire-faults-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(jobs):
            trees.put(Tree(Path(folder) / str(number), context))

        def sound(tests: Sequence[str]) -> dict[str, float]:
            tree = trees.get()
            if tree.status(tests) != 0:
                raise ListError(f"tests fail without any fault:\n{tree.output()}")
            times = tree.times()
            trees.put(tree)
            return times

        def attempt(fault: Fault) -> tuple[Fault, Verdict, float, str]:
            tree = trees.get()
            began = time.monotonic()
            with tree.planted(fault):
                verdict = Verdict.of(fault, tree.status(fault.tests, estimate.limit_s(fault), estimate.times))
            output = tree.output()
            trees.put(tree)
            return fault, verdict, time.monotonic() - began, output

        files = sorted({test for fault in faults for test in fault.tests})
        print(f"running {len(files)} files of tests without any fault", flush=True)
        began = time.monotonic()
        parts = filter(None, (files[number::jobs] for number in range(jobs)))
        estimate = Estimate(pool.map(sound, parts))
        print(
            f"they pass, in {time.monotonic() - began:.0f} s; {len(faults)} faults, {jobs} at a time",
            flush=True,
        )
        began, left = time.monotonic(), set(faults)
        # The longest first: so the last ones end together.
        ordered = sorted(faults, key=estimate.seconds, reverse=True)
        for done in as_completed([pool.submit(attempt, fault) for fault in ordered]):
            fault, verdict, seconds, output = done.result()
            verdicts[fault] = verdict
            left.discard(fault)
            remaining = estimate.remaining_s(time.monotonic() - began, verdicts, left)
            print(
                f"{len(verdicts)}/{len(faults)} {verdict.value:24} {seconds:5.1f} s  {fault.file}: {fault.why}"
                f"  ({remaining / 60:.0f} min left)",
                flush=True,
            )
            if verdict is Verdict.BROKEN:
                print(output, flush=True)
    return verdicts


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults", description=__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="words in a fault's file or description")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="faults at a time")
    arguments = parser.parse_args()
    faults = [one for one in FAULTS if any(word in f"{one.file} {one.why}" for word in arguments.only)]
    if not faults:
        parser.error("no fault is about that")
    began = time.monotonic()
    try:
        check(FAULTS)
        verdicts = plant(faults, arguments.jobs)
    except ListError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"\nin {(time.monotonic() - began) / 60:.0f} min:", *summary(verdicts), sep="\n")
    return 2 if Verdict.BROKEN in verdicts.values() else int(not passes(verdicts))


if __name__ == "__main__":
    sys.exit(main())
