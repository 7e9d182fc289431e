"""API keys: who may use the server, and how much. ``python -m app.api.keys new NAME`` makes one.

A file names the keys, as YAML or JSON::

    keys:
      - id: alice
        sha256: 5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8
        requests_per_minute: 600
        tokens_per_minute: 100000
        concurrent_requests: 16
        concurrent_streams: 8
        max_context_tokens: 8192
        min_priority: -10
        models: [smollm2-135m-instruct]

Only digests are stored. A key has 256 random bits, so its SHA-256 cannot be searched; no slow hash is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.wrong_values import must_be
from engine.errors import ConfigError, nearest, one_line, shown

ENVIRONMENT = "QUIRE_KEYS"
"""Names keys as ``id:sha256`` pairs, separated by commas."""

PREFIX = "qk_"
"""Of keys that the command makes."""

REREAD_S = 1.0
"""How often the file system is asked whether the file has changed."""

MAX_FILE_BYTES = 4 * 1024 * 1024

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # of a thousand keys: in 0.2 s instead of 1 s

_UNREADABLE = (OSError, ValueError, LookupError, AttributeError, yaml.YAMLError, RecursionError)
"""What a file may raise; PyYAML lets through what Python says of a date or a number that is none."""

_FIELD = re.compile("[A-Za-z_]{1,32}")
"""A name that is no key."""

_ID = re.compile(rf"^(?!{PREFIX})[A-Za-z0-9._-]{{1,64}}\Z")  # logs and metrics show it, so no key
_QUOTED = re.compile(r"""('.'|'<[a-z ]+>')|['"].*""", re.DOTALL)
"""What YAML's errors quote: a sign or a kind of token, or else, up to the end, a tag or anchor, maybe a key."""

_FORMS = {
    "id": f"1 to 64 letters, digits, and . _ -, and must not begin with {PREFIX}, as keys do",
    "sha256": "64 hexadecimal digits in lower case, the SHA-256 of the key and not the key itself; "
    "`python -m app.api.keys new NAME` makes both",
}
"""What the texts of an entry must be."""

logger = logging.getLogger(__name__)


class ApiKey(BaseModel):
    """One key and its limits; ``None`` is no limit. Each ingress replica enforces its even share of a rate."""

    model_config = ConfigDict(extra="forbid", frozen=True, regex_engine="python-re")  # the other has no (?!

    id: str = Field(pattern=_ID.pattern)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}\Z")
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)  # prompt tokens and output tokens
    concurrent_requests: int | None = Field(default=None, ge=1)
    concurrent_streams: int | None = Field(default=None, ge=1)  # requests with ``stream``
    max_context_tokens: int | None = Field(default=None, ge=1)  # of prompt and output together
    min_priority: int | None = Field(default=None, ge=-1000, le=1000)  # in place of the option of this name
    models: tuple[str, ...] | None = None  # that it may use
    admin: bool = False  # may use the routes of ``admin_routes``, and sees what others have used


class _KeyList(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: tuple[ApiKey, ...]


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys of one moment, by digest."""

    by_digest: Mapping[str, ApiKey]

    def find(self, key: str) -> ApiKey | None:
        """The entry of a key that a client sent.

        The lookup is by digest: its time says nothing about a key, because nobody can choose a digest.
        """
        digest = digest_of(key)
        found = self.by_digest.get(digest)
        return found if found is not None and hmac.compare_digest(found.sha256, digest) else None


class KeyFile:
    """The keys of a file and of the environment; a change of the file takes effect without a restart.

    Raises:
        ConfigError: at construction, if the file is wrong. A wrong change later is logged and has no effect.
    """

    def __init__(
        self,
        path: str | None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._path = None if path is None else Path(path)
        given = (os.environ if environment is None else environment).get(ENVIRONMENT, "")
        self._of_environment = _parse_pairs(given)
        self._version = self._stat()
        self._ring = self._read()

    @property
    def required(self) -> bool:
        """Whether requests need a key: a file or the environment names them, even if it names none."""
        return self._path is not None or bool(self._of_environment)

    def ring(self) -> KeyRing:
        """The current keys."""
        return self._ring

    async def watch(self) -> None:
        """Reread the file whenever it changes, in a thread: 10,000 keys in YAML take seconds."""
        while self._path is not None:
            await asyncio.sleep(REREAD_S)
            await asyncio.to_thread(self.reread)

    def reread(self) -> None:
        """Read the file again if it has changed; until then :meth:`ring` returns the keys before."""
        version = self._stat()
        if version == self._version:
            return
        self._version = version
        try:
            self._ring = self._read()
        except ConfigError as error:
            logger.error("the changed key file has no effect: %s", error)
        else:
            logger.info("%d API keys", len(self._ring.by_digest))

    def _stat(self) -> tuple[int, int, int] | None:
        if self._path is None:
            return None
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> KeyRing:
        listed = () if self._path is None else _read_file(self._path)
        return _ring([*listed, *self._of_environment])


def digest_of(key: str) -> str:
    """SHA-256 of a key, in hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _read_file(path: Path) -> tuple[ApiKey, ...]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"the key file {path} exceeds {MAX_FILE_BYTES} bytes")
        content = _parsed(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:  # as text it has the line, which may be one with a key
        mark = error.problem_mark
        where = f"in line {mark.line + 1}: " if mark is not None else ""
        problem = _QUOTED.sub(lambda found: found[1] or "...", error.problem or "it is not YAML")
        raise ConfigError(f"the key file {path} cannot be read: {where}{problem}") from None
    except _UNREADABLE as error:
        raise ConfigError(f"the key file {path} cannot be read: {_reason(error)}") from None
    try:
        return _KeyList.model_validate(content).keys
    except ValidationError as error:
        raise ConfigError(f"the key file {path} is wrong: {_explain(error.errors()[0], content)}") from None


def _reason(error: Exception) -> str:
    """What is wrong with a file that is not YAML, without what the error may quote of it."""
    match error:
        case OSError() | yaml.YAMLError():
            return one_line(error)
        case UnicodeError():
            return "it is not UTF-8"
        case RecursionError():
            return "it is nested too deeply"
    return "one of its dates, numbers or tagged values is not valid"


def _explain(error: Mapping[str, Any], content: object) -> str:
    """One of pydantic's errors: entry, field, and what it must be; of values only numbers, as no key is one."""
    kind, loc, value = error["type"], error["loc"], error["input"]
    entries = content.get("keys") if isinstance(content, Mapping) else None
    if loc[:1] != ("keys",) or len(loc) < 2 or not isinstance(entries, list):  # a YAML set, too, has entries
        return "it must be a mapping with only keys, a list of entries with id and sha256"
    entry = _entry(entries[loc[1]], loc[1])
    if len(loc) == 2:
        return f"{entry} must be a mapping with id and sha256"
    name = str(loc[2])
    if kind == "extra_forbidden":
        meant = nearest(name, ApiKey.model_fields)
        shown_name = name if _FIELD.fullmatch(name) else "a name"
        hint = f"did you mean {meant}?" if meant else f"fields: {', '.join(ApiKey.model_fields)}"
        return f"{entry} has {shown_name}, which is not a known field; {hint}"
    if kind == "missing":
        return f"{entry} has no {name}; it must be {_FORMS[name]}"
    what = f"{name}={shown(value)}" if type(value) in (int, float) and name not in _FORMS else name
    return f"{entry}: {what} {must_be(error, _FORMS.get(name, ''))}"


def _entry(entry: object, index: int) -> str:
    """An entry by its place, from 1, and its id; a text that is no id may be a key."""
    name = entry.get("id") if isinstance(entry, Mapping) else None
    named = isinstance(name, str) and _ID.fullmatch(name)
    return f"entry {index + 1}{f' ({name})' if named else ''}"


def _parsed(text: str) -> object:
    """YAML, or JSON, which is YAML, too, but read a hundred times as fast.

    Raises:
        any of ``_UNREADABLE``: it is neither.
    """
    try:
        return json.loads(text)
    except ValueError:
        return yaml.load(text, _Loader)


def _parse_pairs(pairs: str) -> list[ApiKey]:
    keys = []
    for index, pair in enumerate(filter(None, (part.strip() for part in pairs.split(",")))):
        name, _, digest = pair.partition(":")
        try:
            keys.append(ApiKey(id=name, sha256=digest))
        except ValidationError as error:
            wrong = str(error.errors()[0]["loc"][0])
            raise ConfigError(
                f"{ENVIRONMENT} must have id:sha256 pairs, separated by commas, but in {_entry(None, index)} "
                f"{wrong} must be {_FORMS[wrong]}"
            ) from None
    return keys


def _ring(keys: list[ApiKey]) -> KeyRing:
    for name in ("id", "sha256"):
        value, count = next(iter(Counter(getattr(key, name) for key in keys).most_common(1)), ("", 0))
        if count > 1:
            raise ConfigError(f"two API keys have the same {name}, {value}")
    return KeyRing({key.sha256: key for key in keys})


def main(arguments: list[str] | None = None) -> int:
    """Print a new key, and a key file with it."""
    parser = argparse.ArgumentParser(prog="python -m app.api.keys", description="Make an API key.")
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="print a new key, and the lines for the key file")
    new.add_argument("id", help="who gets the key; appears in logs and metrics, never the key itself")
    parsed = parser.parse_args(arguments)
    key = f"{PREFIX}{secrets.token_urlsafe(32)}"
    try:
        entry = ApiKey(id=parsed.id, sha256=digest_of(key))
    except ValidationError:
        print(f"quire: an id must be {_FORMS['id']}", file=sys.stderr)
        return 1
    # Apart, so that `> keys.yaml` writes a file that works, and the key to no disk.
    print(
        f"The key, which is not shown again: {key}\n"
        "Save these lines as the file that api_keys_file names; if there is one, add the last two to it:",
        file=sys.stderr,
        flush=True,
    )
    print(f"keys:\n  - id: {entry.id}\n    sha256: {entry.sha256}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
