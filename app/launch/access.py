"""Checks who will be able to use the server, before it starts."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

from app.api.keys import KeyFile
from app.config import AppConfig
from engine.errors import ConfigError


def check_access(options: AppConfig) -> dict[str, Any]:
    """Read the API keys, and refuse a public address without any unless ``open_access`` is set.

    Returns the options that replicas need in another form: the key file's path, which for them is relative to
    another folder.

    Raises:
        ConfigError: the key file is wrong, or everybody on the network could use the server.
    """
    path = options.ingress.api_keys_file
    keys = KeyFile(path)
    host = options.launch.host
    if not keys.required and not _only_this_machine(host) and not options.launch.open_access:
        raise ConfigError(
            f"host={host} admits other machines and there are no API keys; set api_keys_file, or "
            "open_access=true if something in front authenticates"
        )
    return {} if path is None else {"api_keys_file": str(Path(path).resolve())}


def _only_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
