"""A chat template whose rendering ends, whatever the messages: Jinja's sandbox with bounds of time and size.

Loops and calls look at the clock, so no nesting of them lasts. Nothing interrupts the interpreter inside a
single operation, so what one makes is bounded: ``"x" * n``, ``n ** n``, ``join`` and their like fail before
they begin. All others take time in proportion to values that are bounded. What is left to the model's author is
a template that nests a list in itself dozens of times and then compares it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from math import inf
from types import BuiltinMethodType
from typing import Any, cast

from jinja2 import Template, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateError
from jinja2.filters import _GroupTuple as _Group
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 2**25
"""The longest text that a template may make: four times the longest body of a request."""

MAX_ITEMS = 2**20
"""The longest list that a template may make, and the most values in what it writes as text."""

MAX_NUMBER = 10_000
"""The greatest width, indent or count that it may give to a function, and the most bits of its numbers."""

_TURN_S, _PAUSE_S = 0.001, 0.0001  # a thread that gives way runs so long, then pauses

_WIDTH = re.compile(r"\*|\d{5,}|\{[^{}]*\{")
"""In a format: a width that is an argument or has many digits."""


_CONTAINERS = frozenset({list, tuple, dict, set, type({}.items()), type({}.values()), type(_Group("", []))})


class TemplateTimeoutError(TemplateError):
    """The rendering took more processor time than it may."""


class TemplateClock(threading.local):
    """How long the rendering in this thread may still run; without an end before ``start``."""

    look_at = inf  # in s of time.perf_counter, which costs a tenth of what the thread's clock does
    _ends_at = inf  # in s of time.thread_time
    _limit_s = inf
    _gives_way = False

    def start(self, cpu_s: float, gives_way: bool) -> None:
        """Let ``look`` fail after ``cpu_s`` of the thread's processor time from now on.

        With ``gives_way`` it also pauses now and then, so that a thread that waits for the interpreter need not
        wait for its switch interval.
        """
        self._limit_s, self._gives_way = cpu_s, gives_way
        self._ends_at = time.thread_time() + cpu_s
        self._set(cpu_s)

    def look(self) -> None:
        """Called by loops and calls once it is ``look_at``.

        Raises:
            TemplateTimeoutError: the time is up.
        """
        left_s = self._ends_at - time.thread_time()
        if left_s <= 0:
            raise TemplateTimeoutError(f"it did not finish in {self._limit_s:g} s of CPU time")
        if self._gives_way:
            time.sleep(_PAUSE_S)
        self._set(left_s)

    def _set(self, left_s: float) -> None:
        self.look_at = time.perf_counter() + (min(left_s, _TURN_S) if self._gives_way else left_s)


class _Generator(CodeGenerator):
    """Writes looks at the clock into loops, and checks of size; the names stand in ``from_string``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bodies: list[Sequence[nodes.Node]] = []  # of loops

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:  # it may pass over all items without one run of the body
            looks = nodes.Call(nodes.EnvironmentAttribute("no_op"), [], [], None, None)
            node.test = nodes.And(nodes.Not(looks), node.test)
        self._bodies.append(node.body)
        super().visit_For(node, frame)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        if any(nodes is body for body in self._bodies):
            self.writeline("if perf_counter() >= clock.look_at: clock.look()")
        super().blockvisit(nodes, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        constant = isinstance(node.left, nodes.Const) or isinstance(node.right, nodes.Const)
        self.write("(" if constant else "add(")
        self.visit(node.left, frame)
        self.write(" + " if constant else ", ")
        self.visit(node.right, frame)
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Where templates with bounds are made; used by any number of threads."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "**", "%", "/", "//"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.clock = TemplateClock()
        del self.globals["lipsum"]
        for name in _NO_FILTERS:
            del self.filters[name]
        for name, check in _FILTER_CHECKS.items():
            self.filters[name] = _checked(self.filters[name], check)

    @staticmethod
    def concat(parts: Iterable[str], /) -> str:
        """The whole text."""
        return _concat(parts)

    def from_string(self, *args: Any, **kwargs: Any) -> Template:
        """See :meth:`jinja2.Environment.from_string`."""
        template = super().from_string(*args, **kwargs)
        template.root_render_func.__globals__.update(
            concat=_concat,
            str_join=_str_join,
            str=_str,
            add=_add,
            clock=self.clock,
            perf_counter=time.perf_counter,
        )
        return template

    def no_op(self) -> None:
        """Does nothing, but is called: see ``call``."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`SandboxedEnvironment.call`."""
        if time.perf_counter() >= __self.clock.look_at:
            __self.clock.look()
        if isinstance(__obj, BuiltinMethodType):
            if __obj.__name__ == "join" and args:  # as the check would use up an iterator
                args = (list(args[0]), *args[1:])
            _check_method(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See :meth:`SandboxedEnvironment.call_binop`."""
        if isinstance(left, (str, bytes)) and operator == "%":
            _check_format(left, right)
        else:
            _check_product(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """See :meth:`SandboxedEnvironment.wrap_str_format`."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(text, [args, kwargs])
            return wrapped(*args, **kwargs)

        return checked


def _check_chars(chars: float) -> None:
    if chars > MAX_CHARS:
        raise TemplateError(f"it makes a text of more than {MAX_CHARS} characters")


def _check_items(items: float) -> None:
    if items > MAX_ITEMS:
        raise TemplateError(f"it makes a list of more than {MAX_ITEMS} items")


def _check_number(number: Any) -> None:
    if isinstance(number, (int, float)) and abs(number) > MAX_NUMBER:
        raise TemplateError(f"it gives a function a number above {MAX_NUMBER}")


def _check_product(operator: str, left: Any, right: Any) -> None:
    """Before ``left * right``, ``**``, ``/``, ``//`` or ``%``."""
    numbers = [value for value in (left, right) if isinstance(value, int)]
    if operator == "*" and len(numbers) == 1:
        for value in (left, right):
            if isinstance(value, (str, bytes)):
                _check_chars(len(value) * numbers[0])
            elif isinstance(value, (list, tuple)):
                _check_items(weight(value).values * numbers[0])
    elif len(numbers) == 2:
        bits = left.bit_length() * max(right, 1) if operator == "**" else sum(n.bit_length() for n in numbers)
        if bits > MAX_NUMBER:
            raise TemplateError(f"it makes a number of more than {MAX_NUMBER} bits")


class Weight:
    """What a value holds: ``chars`` in ``values`` values, itself included, ``depth`` within each other."""

    def __init__(self) -> None:
        self.chars = self.values = self.depth = 0

    def add(self, value: Any, depth: int = 1) -> None:
        """Count a value and all in it, as often as it is there.

        Raises:
            TemplateError: they are more than a template may write.
        """
        self.values += 1
        self.depth = max(self.depth, depth)
        if isinstance(value, (str, bytes)):
            self.chars += len(value)
            _check_chars(self.chars)
        elif isinstance(value, dict):
            for key, item in value.items():
                self.add(key, depth + 1)
                self.add(item, depth + 1)
        elif type(value) in _CONTAINERS:
            for item in value:
                self.add(item, depth + 1)
        _check_items(self.values)


def weight(value: Any) -> Weight:
    """The weight of a value.

    Raises:
        TemplateError: it is more than a template may write.
    """
    total = Weight()
    total.add(value)
    return total


def _concat(parts: Iterable[str]) -> str:
    parts = list(parts)
    _check_chars(sum(map(len, parts)))
    return "".join(parts)


def _str_join(values: Iterable[Any]) -> str:
    return _concat([_str(value) for value in values])


def _str(value: Any) -> str:
    kind = type(value)
    if kind is str:
        return cast(str, value)
    if kind in _CONTAINERS:
        weight(value)
    return str(value)


def _add(left: Any, right: Any) -> Any:
    value = left + right
    kind = type(value)
    if kind is str or kind is bytes:
        if len(value) > MAX_CHARS:
            _check_chars(len(value))
    elif kind in _CONTAINERS:
        _check_items(len(value))
    return value


def _check_format(form: Any, values: Any) -> None:
    form = form.decode("latin-1") if isinstance(form, bytes) else str(form)
    if _WIDTH.search(form):
        raise TemplateError(f"it formats with a width that is no number up to {MAX_NUMBER}")
    places = form.count("%") + form.count("{")
    _check_chars(len(form) + places * (MAX_NUMBER + weight(values).chars))


def _check_join(values: Iterable[Any], separator: Any = "", attribute: Any = None) -> None:
    total = weight(values)
    _check_chars(total.chars + total.values * len(separator))


def _check_replace(text: Any, old: Any, new: Any, count: int | None = -1) -> None:
    if len(_text(new)) > len(_text(old)):
        places: int = _text(text).count(_text(old))
        if count is not None and count >= 0:
            places = min(places, count)
        _check_chars(len(_text(text)) + places * len(_text(new)))


def _text(value: Any) -> Any:
    return value if isinstance(value, bytes) else _str(value)


def _check_method(method: BuiltinMethodType, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before a method of a built-in type is called."""
    this, name, given = method.__self__, method.__name__, (*args, *kwargs.values())
    if isinstance(this, (str, bytes)):
        if name == "join":
            _check_join(args[0] if args else (), this)
        elif name == "replace":
            _check_replace(this, *args, **kwargs)
        elif name == "translate":
            raise TemplateError("it calls translate, which templates may not")
        elif name == "expandtabs":
            tab = "\t" if isinstance(this, str) else b"\t"
            _check_chars(len(this) + _text(this).count(tab) * _greatest(given, 8))
        elif name in ("center", "ljust", "rjust", "zfill"):
            _check_number(_greatest(given, 0))
    elif isinstance(this, int):
        for number in given:
            _check_number(number)


def _greatest(numbers: Iterable[Any], least: int) -> int:
    return max((number for number in numbers if isinstance(number, int)), default=least)


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    _check_number(width)
    lines = str(text).count("\n") + 1
    _check_chars(len(text) + lines * (len(width) if isinstance(width, str) else width))


def _check_numbers(_: Any, *args: Any, **kwargs: Any) -> None:
    for number in (*args, *kwargs.values()):
        _check_number(number)


def _check_sum(values: Sequence[Any], attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, (int, float)):  # it copies a list for each value
        _check_number(len(values))


def check_text_size(value: Any, indent: Any = None) -> None:
    """Before a value is written as text, each value in it on an indented line of its own.

    Raises:
        TemplateError: it is more than a template may write.
    """
    _check_number(indent)
    total = weight(value)
    if isinstance(indent, int):
        _check_chars(total.chars + total.values * total.depth * indent)


_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "batch": _check_numbers,
    "center": _check_numbers,
    "format": lambda form, *args, **kwargs: _check_format(form, [args, kwargs]),
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
    "round": _check_numbers,
    "slice": _check_numbers,
    "string": check_text_size,
    "sum": _check_sum,
}
"""What is seen to before a filter begins; other filters make nothing greater than what they are given."""

_NO_FILTERS = ("pprint", "urlize", "wordwrap", "xmlattr")
"""They are for pages, and slow on long text."""


def _checked(made: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A filter with a check of its arguments; the first is a list where an iterator was given."""
    begin = int(hasattr(made, "jinja_pass_arg"))  # after Jinja's own argument

    @wraps(made)
    def call(*args: Any, **kwargs: Any) -> Any:
        value = args[begin]
        if isinstance(value, Iterator):
            value = list(value)
        check(value, *args[begin + 1 :], **kwargs)
        return made(*args[:begin], value, *args[begin + 1 :], **kwargs)

    return call
