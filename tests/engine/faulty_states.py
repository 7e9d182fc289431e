"""Faults planted in healthy states, and conditions of checks left out one by one.

A check has to report each fault in words of its own, and has no condition without which all faults are found.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import pytest

from engine.kv.block_pool import InvariantError

Check = Callable[[], None]
Fault = Callable[[], Check]  # plants itself in a new state; returns the check that must find it
Faults = Mapping[str, tuple[Fault, str]]  # what is wrong -> the fault, and what the check must say


def assert_found(fault: Fault, message: str) -> None:
    """The check raises, and calls the fault what it is."""
    check = fault()
    with pytest.raises(InvariantError, match=re.escape(message)):
        check()


def assert_all_needed(owner: type, name: str, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """No condition of the check ``owner.name`` can be left out: some fault would slip through."""
    weakened = list(conditions(getattr(owner, name)))
    assert weakened, "no condition was found"
    for words, function in weakened:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, function)
            # Stops at the first one that slips through: a later one might run for ever (siblings in a circle).
            missed = any(not reported(*fault) for fault in faults.values())
        assert missed, f"no planted fault needs the condition {words!r} of {owner.__name__}.{name}"


def reported(fault: Fault, message: str) -> bool:
    """Whether the fault is found, and called what it is."""
    check = fault()
    try:
        check()
    except InvariantError as error:
        return message in str(error)
    except (IndexError, KeyError, TypeError):  # what a weakened check may run into
        return False
    return False


def conditions(function: Callable[..., object]) -> Iterator[tuple[str, Callable[..., object]]]:
    """Each condition that leads straight to an error, with the function in which it never holds."""
    source = textwrap.dedent(inspect.getsource(function))
    for place in range(len(_alternatives(ast.parse(source)))):
        tree = ast.parse(source)
        words, weaken = _alternatives(tree)[place]
        weaken(ast.Constant(False))
        made: dict[str, Callable[..., object]] = {}
        code = compile(ast.fix_missing_locations(tree), f"weakened {function.__qualname__}", "exec")
        exec(code, function.__globals__, made)
        yield words, made[function.__name__]


def _alternatives(tree: ast.Module) -> list[tuple[str, Callable[[ast.expr], None]]]:
    """Whole conditions, and each part of one that is joined to the others by ``or``."""
    found: list[tuple[str, Callable[[ast.expr], None]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
            found.append((ast.unparse(node.test), partial(setattr, node, "test")))
            for part in ast.walk(node.test):
                if isinstance(part, ast.BoolOp) and isinstance(part.op, ast.Or):
                    for place, value in enumerate(part.values):
                        found.append((ast.unparse(value), partial(part.values.__setitem__, place)))
    return found
