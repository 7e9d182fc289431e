"""Checks of single fields of a JSON request; each error names the field, its value, and what it must be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from typing import Any

from app.api.errors import show
from engine.errors import InvalidRequestError, nearest

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_TEXT = 16, 64, 512
"""OpenAI's limits: pairs, and characters of a key and of a text."""

_AT_ONCE = 1 << 16
"""Entries of a list that are checked before other threads may run again: in about a millisecond."""

_SAME = (
    ("max_tokens", "max_output_tokens", "max_new_tokens"),
    ("stop", "stop_sequences", "stop_sequence"),
    ("n", "num_return_sequences"),
    ("seed", "random_seed"),
    ("user", "user_id"),
)
"""Names that APIs and libraries have for one parameter; spelling does not tell that they mean the same."""

_LEAST_LETTERS = 4
"""Shorter names are not checked: too many words are one letter away."""

_MOST_LETTERS = 40
"""Longer names are not checked."""


def known_fields(
    body: dict[str, Any], known: Collection[str], refused: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The fields of ``body`` that are not ``null``.

    Raises:
        InvalidRequestError: one is not ``known``, or ``refused`` with the reason given there.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if refused is not None and name in refused and value not in (False, [], {}):
            raise InvalidRequestError(f"{name}: {refused[name]}", name, "unsupported_parameter")
        if name not in known and (refused is None or name not in refused):
            raise unknown(name, known)
    return fields


def unknown(name: str, known: Collection[str]) -> InvalidRequestError:
    """The error for a field that is not ``known``, with the known one that it most likely means."""
    return InvalidRequestError(
        f"{show(name)} is not a known parameter{name_hint(name, known)}", name[:64], "unknown_parameter"
    )


def name_hint(name: str, known: Collection[str]) -> str:
    """``; did you mean 'stop'?``, or nothing if no ``known`` name is near or means the same elsewhere."""
    name = name.lower()
    same = _same(name)
    meant = next((other for other in same if other in known), "") if same else nearest(name, sorted(known))
    return f"; did you mean {meant!r}?" if meant else ""


def _same(name: str) -> list[str]:
    return [other for group in _SAME if name in group for other in group]


def only_known(value: Mapping[str, Any], name: str, known: Collection[str]) -> None:
    """Refuse a field of the object ``name`` that is not ``known``, unless it is ``null``."""
    for key, entry in value.items():
        if key not in known and entry is not None:
            raise _unknown_in(name, key, name_hint(key, known))


def check_names(value: Mapping[str, Any], name: str, known: tuple[str, ...]) -> None:
    """Refuse a field of the object ``name`` that is not ``known`` but almost spelled like one that is missing.

    Other fields pass without effect: clients send back what other servers, or they themselves, have added to an
    answer, such as ``context`` beside ``content``, and newer SDKs know more names.
    """
    for key, entry in value.items():
        if key in known or entry is None:
            continue
        meant = _misspelt(key, known)
        if meant and value.get(meant) is None:
            raise _unknown_in(name, key, f"; did you mean {meant!r}?")


def _unknown_in(name: str, key: str, hint: str) -> InvalidRequestError:
    message = f"{name} has {show(key)}, which is not a known field of it{hint}"
    return InvalidRequestError(message, f"{name}.{key[:64]}", "unknown_parameter")


def _misspelt(name: str, known: tuple[str, ...]) -> str:
    """The ``known`` name from which ``name`` differs by a letter, or by how words are joined; else empty.

    A body may have 100,000 names, too many to measure the distance of each from all that are known.
    """
    if len(name) > _MOST_LETTERS:
        return ""
    spellings, word = _spellings(known), _letters(name)
    if word in spellings:
        return spellings[word]
    for i in range(len(word)):
        if (one := word[:i] + word[i + 1 :]) in spellings:
            return spellings[one]
    return ""


@cache
def _spellings(known: tuple[str, ...]) -> dict[str, str]:
    """The known names by their letters, by all letters but one, and by names that mean the same elsewhere.

    Two names with the same letters but one differ by a letter that is missing, wrong, or misplaced.
    """
    found = {_letters(other): name for name in known for other in _same(name)}
    for name in known:
        if len(word := _letters(name)) >= _LEAST_LETTERS:
            found |= {word[:i] + word[i + 1 :]: name for i in range(len(word))} | {word: name}
    return found


def _letters(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def text(value: object, name: str, param: str | None = None) -> str:
    """``value`` as text that can be encoded; ``param`` is the field to blame if it is not ``name``."""
    if not isinstance(value, str):
        raise wrong(name, value, "a string", param)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} has half of a surrogate pair at character {error.start}, which is not valid text",
            param or name,
        ) from error
    return value


def texts_in(value: object) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, list):
            waiting += found
        elif isinstance(found, dict):
            waiting += [*found.keys(), *found.values()]


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with ``change`` of each string in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [with_texts(entry, change) for entry in value]
    if isinstance(value, dict):
        return {change(key): with_texts(entry, change) for key, entry in value.items()}
    return value


def integers(value: object, name: str, param: str | None = None) -> list[int]:
    """``value`` as a list of integers; their range is the engine's to check."""
    if not isinstance(value, list):
        raise wrong(name, value, "a list of token ids", param)
    for begin in range(0, len(value), _AT_ONCE):
        if set(map(type, value[begin : begin + _AT_ONCE])) - {int}:
            i = next(i for i, entry in enumerate(value) if type(entry) is not int)
            raise wrong(f"{name}[{i}]", value[i], "a token id", param or name)
    return value


def integer(fields: dict[str, Any], name: str, low: int | None) -> int:
    """The field as an integer, at least ``low``."""
    value = fields[name]
    if type(value) is not int or (low is not None and value < low):
        bound = "" if low is None else f", at least {low}"
        raise wrong(name, value, f"an integer{bound}")
    return value


def number(fields: dict[str, Any], name: str, default: float) -> float:
    """The field as a number, or ``default`` without it."""
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(name, value, "a number")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidRequestError(f"{name} is too large a number", name) from error


def boolean(fields: dict[str, Any], name: str, prefix: str = "") -> bool:
    """The field as a switch, off without it."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong(f"{prefix}{name}", value, "true or false")
    return bool(value)


def check_metadata(fields: Mapping[str, Any]) -> None:
    """Refuse ``metadata`` beyond OpenAI's limits: it is kept with the request, and a response may repeat it."""
    found = fields.get("metadata", {})
    if not isinstance(found, dict):
        raise wrong("metadata", found, "an object of texts")
    if len(found) > MAX_METADATA:
        raise InvalidRequestError(
            f"metadata has {len(found)} pairs but at most {MAX_METADATA} are allowed", "metadata"
        )
    for key, value in found.items():
        if len(text(key, "a key of metadata", "metadata")) > MAX_METADATA_KEY:
            raise InvalidRequestError(
                f"metadata has a key of {len(key)} characters but at most {MAX_METADATA_KEY} are allowed",
                "metadata",
            )
        bounded_text(value, f"metadata.{key}", MAX_METADATA_TEXT, "metadata")


def bounded_text(value: object, name: str, most: int, param: str | None = None) -> str:
    """:func:`text` of at most so many characters."""
    found = text(value, name, param)
    if len(found) > most:
        raise InvalidRequestError(
            f"{name} has {len(found)} characters but at most {most} are allowed", param or name
        )
    return found


def one_of(value: object, name: str, kinds: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """``value`` as an object whose ``type`` is one of ``kinds``, which have the names of its other fields.

    Raises:
        InvalidRequestError: it is not, and the message names both; or a name is misspelt (``check_names``).
    """
    kind = value.get("type") if isinstance(value, dict) else value
    if not isinstance(value, dict) or not isinstance(kind, str) or kind not in kinds:
        must_be = " or ".join(map(repr, kinds))
        if isinstance(value, dict) and kind is None:
            raise wrong(f"{name}.type", kind, must_be, name)
        raise InvalidRequestError(
            f"{said(name, kind)} but its type must be {must_be}",
            name,
            "unsupported_parameter" if isinstance(kind, str) else "invalid_value",
        )
    check_names(value, name, ("type", *kinds[kind]))
    return value


def wrong(name: str, value: object, must_be: str, param: str | None = None) -> InvalidRequestError:
    """The error for a field of the wrong type or range."""
    return InvalidRequestError(f"{said(name, value)} but must be {must_be}", param or name)


def said(name: str, value: object) -> str:
    """What a request says of a field: nothing, as ``null`` counts as absent, or its value."""
    if value is None and not name.endswith("]"):  # an entry of a list is there
        return f"{name} is missing or null"
    return f"{name} is {show(value)}"
