"""The option ``models``: several models of one server, each a name with the options that are its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from engine.errors import ConfigError, one_line, shown
from engine.models.folders import at_home

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}")
"""A model's name, as clients send it."""

Entry = dict[str, Any]
"""``name``, and options by their flat names."""


_MERGE = "tag:yaml.org,2002:merge"
"""Of the key ``<<``."""


class _Loader(yaml.SafeLoader):
    """YAML as usual, but a key that appears twice is an error instead of replacing the first one."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key) for key, _ in node.value if key.tag != _MERGE]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"{shown(key)} appears twice")
    loader.flatten_mapping(node)  # what << merges comes after the check: the mapping's own keys replace it
    return dict(loader.construct_mapping(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_entries(value: Any) -> list[Entry]:
    """The entries in ``value``, in their order: the first one is the default.

    ``value`` is a mapping from names to options, a list of mappings with ``name`` or of names, YAML text of
    either, or the path of such a YAML file.

    Raises:
        ConfigError: one line that says what is wrong, or which name is empty, malformed, or given twice.
    """
    if isinstance(value, str):
        value = _read_text(value)
    if isinstance(value, Mapping):
        entries = [_entry(name, options) for name, options in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        entries = [_listed(item) for item in value]
    else:
        raise ConfigError(
            f"models={shown(value)}: must be a mapping from names to options, a list, or the path of a YAML "
            "file"
        )
    if not entries:
        raise ConfigError("models is empty; name at least one model, or leave the option out")
    names = [entry["name"] for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"models has {shown(name)} twice; give each model a name of its own")
    return entries


def _read_text(text: str) -> Any:
    source = "models"
    try:
        if not text.lstrip().startswith(("{", "[")):
            source = f"models={text}"
            text = at_home(text).read_text(encoding="utf-8")
        found = yaml.load(text, _Loader)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{source} is not YAML: {one_line(error)}") from None
    # A file may name the option, as serve_config.yaml does.
    return found["models"] if isinstance(found, Mapping) and list(found) == ["models"] else found


def _listed(item: Any) -> Entry:
    if isinstance(item, str):
        return _entry(item, None)
    if not isinstance(item, Mapping) or "name" not in item:
        raise ConfigError(f"models has {shown(item)}, which must be a mapping with name, or a name")
    return _entry(item["name"], {key: value for key, value in item.items() if key != "name"})


def _entry(name: Any, options: Any) -> Entry:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"models has the name {shown(name)}; a name is 1 to 128 letters, digits, and ._/:@+- and begins "
            "with a letter or a digit"
        )
    if options is None:
        options = {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"models: {name}: {shown(options)} must be a mapping from options to values")
    if "name" in options:
        raise ConfigError(f"models: {name}: remove name from the options; the entry's key is the name")
    return {"name": name, **{str(key): value for key, value in options.items()}}
